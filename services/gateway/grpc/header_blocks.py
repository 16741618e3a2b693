"""Follows the HTTP/2 frames of a client: bounds its header blocks and adds a header to each.

gRPC's server has no hook before HTTP/2, and keeps a header block in memory until it ends.
"""

from math import inf

FRAME_HEAD_BYTES = 9
HEADERS, CONTINUATION = 1, 9
END_HEADERS = 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
BLOCK_BYTES_MAX = 32 * 2**10
"""Twice the metadata that a call may have: gRPC refuses such a call with a better error."""
FRAME_STEPS, BLOCK_STEPS = 1, 5
"""The cost of following a frame, and of adding the header to a block, in `steps`."""


class InvalidFrames(Exception):
    """The frames are not HTTP/2."""


class BlockTooLarge(Exception):
    """A header block exceeds `BLOCK_BYTES_MAX`."""


class HeaderBlocks:
    """Follows the frames of a connection, from the end of its preface.

    The header is added in a CONTINUATION frame at the end of a block, as a literal that leaves the
    compression of later headers as it is.
    """

    def __init__(self, name: str, value: str) -> None:
        """`name` and `value`: the header, each shorter than 127 characters."""
        self._literal = b"\x10" + b"".join(
            bytes([len(text)]) + text.encode() for text in (name, value)
        )
        # An incomplete frame head.
        self._head = b""
        # Bytes that the current frame still has, and bytes to insert after it.
        self._left = 0
        self._insert = b""
        # Bytes of the current header block; 0: none, or its last frame has begun.
        self._block_bytes = 0
        self.block_stream = b""
        """The stream of the current header block until its last byte; empty: none."""
        self.steps = 0
        """The cost of all frames so far."""

    def feed(self, data: bytes, steps_max: float = inf) -> tuple[list[bytes], bytes]:
        """Return the bytes for the server, and the rest of `data` after about `steps_max` steps.

        Raises:
            InvalidFrames: if the client violates HTTP/2.
            BlockTooLarge: if a header block is too large.
        """
        parts: list[bytes] = []
        if self._head:
            data, self._head = self._head + data, b""
        begin, at, end = 0, 0, len(data)
        steps_end = self.steps + steps_max
        while True:
            # The rest of a frame.
            taken = min(self._left, end - at)
            at += taken
            self._left -= taken
            if self._left:
                break
            if self._insert:
                parts += (data[begin:at], self._insert)
                begin, self._insert, self.block_stream = at, b"", b""
            if self.steps >= steps_end:
                break
            if end - at < FRAME_HEAD_BYTES:
                self._head = data[at:]
                parts.append(data[begin:at])
                return parts, b""
            head = data[at : at + FRAME_HEAD_BYTES]
            sent = self._open(head)
            if sent is not head:
                parts += (data[begin:at], sent)
                begin = at + FRAME_HEAD_BYTES
            at += FRAME_HEAD_BYTES
        parts.append(data[begin:at])
        return parts, data[at:]

    def _open(self, head: bytes) -> bytes:
        """Begin a frame; return the head for the server."""
        self._left = int.from_bytes(head[:3])
        self.steps += FRAME_STEPS
        kind, flags = head[3], head[4]
        if kind == CONTINUATION or self._block_bytes:
            if kind != CONTINUATION or not self._block_bytes:
                raise InvalidFrames
        elif kind != HEADERS:
            return head
        stream = head[5:]
        self.block_stream = stream
        self._block_bytes += FRAME_HEAD_BYTES + self._left
        if self._block_bytes > BLOCK_BYTES_MAX:
            raise BlockTooLarge
        if not flags & END_HEADERS:
            return head
        self._block_bytes = 0
        self.steps += BLOCK_STEPS
        self._insert = (
            len(self._literal).to_bytes(3)
            + bytes([CONTINUATION, END_HEADERS])
            + stream
            + self._literal
        )
        return head[:4] + bytes([flags & ~END_HEADERS]) + stream
