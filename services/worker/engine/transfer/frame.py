"""The binary format of frames between engines, its codec, and memory for frames.

    envelope  fixed size, little-endian: see `_ENVELOPE`; contains the lengths of all other parts
    ids       group id, sender's worker id, sender's incarnation, in UTF-8
    header    a registered type in msgpack, identified by the kind in the envelope
    padding   to a multiple of `ALIGNMENT_BYTES`, so that the payload can be viewed as any dtype
    payload   bytes, possibly none

The checksum is XXH3-64 over everything but itself. It takes 0.05 ms per MiB (zlib's crc32: 0.46),
so it cannot be disabled. It detects accidental damage; it does not authenticate the sender.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from services.worker.engine.transfer.errors import ChecksumMismatch, FrameError

Bytes: TypeAlias = npt.NDArray[np.uint8]

ALIGNMENT_BYTES = 64
HEADER_BYTES_MAX = 16 << 20
ROOM_BYTES = 4096
"""Space before the payload in a `PayloadRoom`, for envelope, ids and header of most frames."""
KIND_MAX = 0xFFFF

_MAGIC = b"TSF1"
# magic, kind, lengths of the three ids, header length, epoch, sequence number, payload length
_ENVELOPE = struct.Struct("<4sHBBBxxxIQQQ")
_CHECKSUM = struct.Struct("<Q")
_IDS_START = _ENVELOPE.size + _CHECKSUM.size
_NO_BYTES: Bytes = np.empty(0, np.uint8)
_NO_BYTES.flags.writeable = False


@dataclass(frozen=True, slots=True, eq=False)
class PayloadRoom:
    """Memory for a payload that is sent without a copy.

    The codec writes all other parts of the frame right before the payload.
    """

    memory: Bytes  # of a single frame: `ROOM_BYTES` of space, then the payload

    @property
    def payload(self) -> Bytes:
        """The view to write the payload to."""
        return self.memory[ROOM_BYTES:]

    def with_front(self, size_bytes: int) -> Bytes | None:
        """Return a view of the payload and `size_bytes` before it; None if there is less space."""
        return self.memory[ROOM_BYTES - size_bytes :] if size_bytes <= ROOM_BYTES else None


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A message. The sending lane fills in `sender`, `incarnation` and `sequence`.

    `payload` is a contiguous buffer of bytes (uint8 tensor or array, bytes), which the codec
    copies, or a `PayloadRoom`. The payload of a received frame is a writable uint8 array that
    belongs to the receiver; `encoded` is the memory of the whole frame.
    """

    group_id: str
    epoch: int
    header: Any
    payload: Any = field(default_factory=lambda: _NO_BYTES)
    sender: str = ""
    incarnation: str = ""
    sequence: int = 0
    encoded: Bytes | None = field(default=None, repr=False)

    def stamped(self, sender: str, incarnation: str, sequence: int) -> "Frame":
        """Return a copy with the fields that the sending lane fills in."""
        return Frame(
            self.group_id, self.epoch, self.header, self.payload, sender, incarnation, sequence
        )

    @property
    def size_bytes(self) -> int:
        """Size of a received frame, all parts included; 0 for a frame that was not received."""
        return 0 if self.encoded is None else int(self.encoded.size)

    def verify(self) -> None:
        """Raise ChecksumMismatch if a received frame was damaged in transit."""
        if self.encoded is None:
            return
        (expected,) = _CHECKSUM.unpack_from(self.encoded.data, _ENVELOPE.size)
        if _checksum(self.encoded) != expected:
            raise ChecksumMismatch(
                f"frame {self.sequence} from {self.sender or 'a peer'} was damaged in transit"
            )


class FrameCodec:
    """Encodes and decodes frames with a fixed set of header types.

    A header type is a dataclass or a msgspec Struct; its number is the frame's kind.
    """

    def __init__(self, kinds: Mapping[int, type[Any]]) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._numbers: dict[type[Any], int] = {}
        self._decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {}
        for number, kind in kinds.items():
            if not 0 <= number <= KIND_MAX:
                raise ValueError(f"{kind.__name__} needs a number between 0 and {KIND_MAX}")
            self._numbers[kind] = number
            self._decoders[number] = msgspec.msgpack.Decoder(kind)

    def encode(self, frame: Frame) -> Bytes:
        """Encode a frame; a payload in a `PayloadRoom` is not copied.

        Raises:
            ValueError: for unknown header types and for values that exceed the format's limits.
        """
        number = self._numbers.get(type(frame.header))
        if number is None:
            raise ValueError(f"{type(frame.header).__name__} is not a kind of this lane")
        header = self._encoder.encode(frame.header)
        if len(header) > HEADER_BYTES_MAX:
            raise ValueError(f"a header of {len(header)} bytes is too large")
        ids = [name.encode() for name in (frame.group_id, frame.sender, frame.incarnation)]
        # In a `PayloadRoom` with enough space, write the parts before the payload in place.
        room = frame.payload if isinstance(frame.payload, PayloadRoom) else None
        payload = as_bytes(frame.payload if room is None else room.payload)
        header_start = _IDS_START + sum(map(len, ids))
        payload_start = _aligned(header_start + len(header))
        encoded = None if room is None else room.with_front(payload_start)
        if encoded is None:
            encoded = np.empty(payload_start + payload.size, np.uint8)
            encoded[payload_start:] = payload
        try:
            _ENVELOPE.pack_into(
                encoded.data, 0, _MAGIC, number, *map(len, ids),
                len(header), frame.epoch, frame.sequence, payload.size,
            )  # fmt: skip
        except struct.error as error:
            raise ValueError(f"a value of the frame is out of range: {error}") from error
        front = b"".join((*ids, header)).ljust(payload_start - _IDS_START, b"\0")
        encoded[_IDS_START:payload_start] = np.frombuffer(front, np.uint8)
        _CHECKSUM.pack_into(encoded.data, _ENVELOPE.size, _checksum(encoded))
        return encoded

    def decode(self, encoded: Bytes) -> Frame:
        """Decode the frame in `encoded`; its payload is a view of `encoded`. Raises FrameError.

        Checks the lengths and not the checksum: call `Frame.verify` before the payload is used.
        """
        if encoded.size < _IDS_START:
            raise FrameError(f"{encoded.size} bytes are too few for a frame")
        # The bytes come from a peer: check every length before it is used.
        magic, number, *rest = _ENVELOPE.unpack_from(encoded.data)
        group_length, sender_length, incarnation_length, header_length, *rest = rest
        epoch, sequence, payload_length = rest
        if magic != _MAGIC:
            raise FrameError("the bytes do not start like a frame")
        decoder = self._decoders.get(number)
        if decoder is None:
            raise FrameError(f"frames of kind {number} are unknown")
        if header_length > HEADER_BYTES_MAX:
            raise FrameError(f"a header of {header_length} bytes is too large")
        sender_start = _IDS_START + group_length
        incarnation_start = sender_start + sender_length
        header_start = incarnation_start + incarnation_length
        header_end = header_start + header_length
        payload_start = _aligned(header_end)
        if payload_start + payload_length != encoded.size:
            raise FrameError(f"a frame of {encoded.size} bytes does not match its lengths")
        front = encoded[:header_end].tobytes()
        try:
            return Frame(
                front[_IDS_START:sender_start].decode(),
                epoch,
                decoder.decode(front[header_start:]),
                encoded[payload_start:],
                front[sender_start:incarnation_start].decode(),
                front[incarnation_start:header_start].decode(),
                sequence,
                encoded,
            )
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError(f"a frame of kind {number} is malformed: {error}") from error


def as_bytes(payload: Any) -> Bytes:
    """Return a payload (uint8 tensor or array, bytes) as a flat array over the same memory.

    Raises ValueError unless the payload is contiguous uint8.
    """
    if isinstance(payload, bytes | bytearray | memoryview):
        return np.frombuffer(payload, np.uint8)
    array = np.asarray(payload)
    if array.dtype != np.uint8 or not array.flags.c_contiguous:
        raise ValueError("a payload must be contiguous uint8")
    return array.reshape(-1)


def _checksum(encoded: Bytes) -> int:
    digest = xxhash.xxh3_64(encoded[: _ENVELOPE.size].data)
    digest.update(encoded[_IDS_START:].data)
    return digest.intdigest()


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


KEPT_BYTES_MAX = 16 << 20
LARGE_BYTES = 256 << 10  # smaller buffers are not worth keeping
KEPT_S = 10.0  # buffers that are not needed for so long are freed


class FrameMemory:
    """A thread-safe pool of frame buffers; keeps at most `bytes_max`, of the latest returned.

    `expire` frees buffers that are not needed; otherwise each size, and the most frames that ever
    were under way together, would leave buffers behind.
    """

    def __init__(self, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._due_s = 0.0  # when `expire` looks again
        self._lock = Lock()  # guards the attributes below
        self._free: list[Bytes] = []
        self._free_bytes = 0
        self._unused = 0  # the fewest free buffers since `expire` looked

    def take(self, size_bytes: int) -> Bytes:
        """Return an uninitialized buffer of that size, backed by less than twice as much memory."""
        with self._lock:
            for number in reversed(range(len(self._free))):
                if size_bytes <= self._free[number].size < 2 * size_bytes:
                    buffer = self._free.pop(number)
                    self._free_bytes -= buffer.size
                    self._unused = min(self._unused, len(self._free))
                    return buffer[:size_bytes]
        return np.empty(size_bytes, np.uint8)

    def give_back(self, memory: Bytes) -> None:
        """Return a buffer of `take` to the pool."""
        whole = memory.base if isinstance(memory.base, np.ndarray) else memory
        if whole.size < LARGE_BYTES:
            return
        with self._lock:
            self._free.append(whole)
            self._free_bytes += whole.size
            while self._free_bytes > self._bytes_max:
                self._free_bytes -= self._free.pop(0).size
                self._unused = min(self._unused, len(self._free))

    def expire(self, now_s: float) -> None:
        """Free buffers that were not needed for `KEPT_S`; call it repeatedly."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + KEPT_S
        with self._lock:
            # The latest returned are at the end, and are taken first.
            self._free_bytes -= sum(buffer.size for buffer in self._free[: self._unused])
            del self._free[: self._unused]
            self._unused = len(self._free)
