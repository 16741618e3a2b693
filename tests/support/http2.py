"""Builds raw HTTP/2 frames, for clients that libraries do not allow."""

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Frame types.
DATA, HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
ACK, END_STREAM, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header as a literal field without indexing."""
    return b"\0" + b"".join(_length(len(text)) + text.encode() for text in (name, value))


def _length(length: int) -> bytes:
    """A string length in HPACK encoding."""
    if length < 127:
        return bytes([length])
    encoded, length = b"\x7f", length - 127
    while length >= 128:
        encoded += bytes([length % 128 + 128])
        length //= 128
    return encoded + bytes([length])


def block_of(path: str, **more: str) -> bytes:
    """The headers of a call."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "gateway",
        "te": "trailers",
        "content-type": "application/grpc",
        **more,
    }
    return b"".join(literal(*pair) for pair in headers.items())


def head_of(stream: int, path: str) -> bytes:
    """The frame that begins a call."""
    return frame(HEADERS, END_HEADERS, stream, block_of(path))


def whole_call(stream: int, path: str, message: bytes) -> bytes:
    """The frames of a unary call."""
    sent = b"\0" + struct.pack(">I", len(message)) + message
    return head_of(stream, path) + frame(DATA, END_STREAM, stream, sent)
