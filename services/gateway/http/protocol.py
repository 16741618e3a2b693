"""One HTTP connection: uvicorn's protocol, and bounds for what comes before a request does.

The parser keeps the bytes of headers until they are complete, and uvicorn every request that is
sent while another one is answered, both however many they are and however long they take.
"""

import asyncio
from collections import deque

import msgspec
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from services.gateway.errors import BodyTimeout, GatewayError, HeadersTooLarge

HEADER_TIMEOUT_S = 10.0
"""How long headers may take, from the connection or their first byte on."""
INCOMPLETE_BYTES_MAX = 64 * 2**10
"""Bytes that may come before headers, a part of the body or the body's trailers are complete."""
PIPELINED_MAX = 8
"""Requests of one connection that may wait while another one is answered."""
# Clients that still send would not see the answer if the connection was cut at once.
LINGER_S = 1.0


class BoundedProtocol(HttpToolsProtocol):
    """Ends connections whose clients send too much, or too slowly, of what is no request yet."""

    # Bytes since the parser had something complete.
    _incomplete_bytes = 0
    _timer: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        # Of those that others follow, whose end uvicorn does not tell that the client is gone.
        self._overtaken: deque[RequestResponseCycle] = deque(maxlen=PIPELINED_MAX + 1)
        self._timer = self.loop.call_later(HEADER_TIMEOUT_S, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop_timer()
        for cycle in self._overtaken:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._refused:
            return
        self._incomplete_bytes += len(data)
        super().data_received(data)
        if self._timer is None and not self._answering:
            self._timer = self.loop.call_later(HEADER_TIMEOUT_S, self._expire)
        if self._incomplete_bytes > INCOMPLETE_BYTES_MAX:
            self._refuse(
                HeadersTooLarge(f"the headers exceed {INCOMPLETE_BYTES_MAX} bytes; send fewer")
            )

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._incomplete_bytes = 0
        self._stop_timer()
        if len(self.pipeline) >= PIPELINED_MAX:
            # Ends the parsing, and with it the connection.
            raise ValueError("too many requests before the first one was answered")
        before = self.cycle
        super().on_headers_complete()
        if self.pipeline:
            self._overtaken.append(before)

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._incomplete_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        self._incomplete_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP; in the midst of another answer only the end can tell."""
        if self._answering:
            self.transport.close()
        else:
            super().send_400_response(msg)

    @property
    def _answering(self) -> bool:
        """Whether a request has not got its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if self._incomplete_bytes:
            self._refuse(BodyTimeout(f"the headers did not arrive within {HEADER_TIMEOUT_S:g} s"))
        else:
            self.transport.close()

    def _refuse(self, error: GatewayError) -> None:
        """Answer, if it can be told from other answers, and read no more requests."""
        self._stop_timer()
        self._refused = True
        if self._answering or self.transport.is_closing():
            self.transport.close()
            return
        body = msgspec.json.encode(error.body())
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        end = b"connection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + head.encode() + end + body)
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)
