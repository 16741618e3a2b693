"""The TCP connection beside the UCX endpoint: handshake, heartbeats, and the end of a peer.

The kernel closes it as soon as a peer dies; UCX does not notice that over shared memory. A message
is msgpack behind its length in four bytes.
"""

import socket
import struct

import msgspec

from services.common.address import split_address
from services.worker.engine.transfer.errors import FrameError
from services.worker.engine.transfer.handshake import Hello, Welcome

MESSAGE_BYTES_MAX = 65_536
UNSENT_BYTES_MAX = 65_536


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """The sender lives, and its engine has taken this many frames of the receiver."""

    taken: int


class Bye(msgspec.Struct, tag="bye", frozen=True):
    """The sender ends the connection on purpose; `reason` is a sentence or empty."""

    reason: str = ""


Control = Hello | Welcome | Beat | Bye

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)
_LENGTH = struct.Struct("<I")


class ControlLink:
    """Whole messages over a non-blocking socket, which the link owns."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._descriptor = connection.fileno()
        self._unsent = bytearray()
        self._unread = bytearray()

    @classmethod
    def dial(cls, address: str) -> "ControlLink":
        """Begin to connect. Raises OSError, ValueError (the host must be numeric)."""
        host, port = split_address(address)
        found = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
        family, kind, protocol, _, place = found[0]
        connection = socket.socket(family, kind, protocol)
        link = cls(connection)
        connection.connect_ex(place)
        return link

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` is to be called when the descriptor is writable."""
        return bool(self._unsent)

    def fileno(self) -> int:
        """The socket's descriptor, also after `close`."""
        return self._descriptor

    def send(self, message: Control) -> None:
        """Send a message; the part that the socket does not accept waits. Raises OSError."""
        encoded = _encoder.encode(message)
        if len(self._unsent) + len(encoded) > UNSENT_BYTES_MAX:
            raise ConnectionError("the peer does not read its control messages")
        self._unsent += _LENGTH.pack(len(encoded)) + encoded
        self.flush()

    def flush(self) -> None:
        """Send what waits; nothing while the socket still connects. Raises OSError."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass

    def receive(self) -> list[Control]:
        """The messages that have arrived. Raises FrameError, and OSError also at the end."""
        try:
            data = self._socket.recv(MESSAGE_BYTES_MAX)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionError("the peer closed the connection")
        self._unread += data
        messages: list[Control] = []
        while len(self._unread) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread)
            end = _LENGTH.size + length
            if length > MESSAGE_BYTES_MAX:
                raise FrameError(f"a control message of {length} bytes is too large")
            if len(self._unread) < end:
                break
            messages.append(self._decode(bytes(self._unread[_LENGTH.size : end])))
            del self._unread[:end]
        return messages

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    @staticmethod
    def _decode(encoded: bytes) -> Control:
        try:
            return _decoder.decode(encoded)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FrameError(f"a control message is malformed: {error}") from error
