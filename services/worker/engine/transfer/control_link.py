"""The TCP connection beside a UCX endpoint: handshake, heartbeats and failure detection.

The kernel closes it as soon as the peer process dies; UCX does not detect that over shared memory.
A message is a four-byte length followed by msgpack.
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
    """A heartbeat that acknowledges frames."""

    taken: int  # total number of frames that the heartbeat's sender has taken on this connection


class Bye(msgspec.Struct, tag="bye", frozen=True):
    """The sender closes the connection on purpose; `reason` is a sentence or empty."""

    reason: str = ""


Control = Hello | Welcome | Beat | Bye

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)
_LENGTH = struct.Struct("<I")


class ControlLink:
    """Sends and receives complete messages over a non-blocking socket, which it owns."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._descriptor = connection.fileno()
        self._unsent = bytearray()
        self._unread = bytearray()

    @classmethod
    def dial(cls, address: str) -> "ControlLink":
        """Start to connect. Raises OSError, ValueError (the host must be numeric)."""
        host, port = split_address(address)
        infos = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
        family, kind, protocol, _, sockaddr = infos[0]
        connection = socket.socket(family, kind, protocol)
        link = cls(connection)
        connection.connect_ex(sockaddr)
        return link

    @property
    def has_unsent(self) -> bool:
        """Whether to call `flush` when the descriptor is writable."""
        return bool(self._unsent)

    def fileno(self) -> int:
        """The socket's descriptor; returns the same number after `close`, for use as a key."""
        return self._descriptor

    def send(self, message: Control) -> None:
        """Send a message; bytes that the socket does not accept are buffered. Raises OSError."""
        encoded = _encoder.encode(message)
        if len(self._unsent) + len(encoded) > UNSENT_BYTES_MAX:
            raise ConnectionError("the peer does not read its control messages")
        self._unsent += _LENGTH.pack(len(encoded)) + encoded
        self.flush()

    def flush(self) -> None:
        """Send buffered bytes; no effect while the socket is connecting. Raises OSError."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass

    def receive(self) -> list[Control]:
        """Return the messages received so far. Raises FrameError, OSError (also after a close)."""
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
        """Close the socket. Idempotent."""
        self._socket.close()

    @staticmethod
    def _decode(encoded: bytes) -> Control:
        try:
            return _decoder.decode(encoded)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FrameError(f"a control message is malformed: {error}") from error
