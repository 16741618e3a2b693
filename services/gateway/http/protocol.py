"""Extends uvicorn's HTTP protocol by limits on incomplete and pipelined requests.

Without it, the parser buffers incomplete headers, and uvicorn all headers and all pipelined
requests, without limits of size or time. A cycle is uvicorn's state of a request and its response.
"""

import asyncio
from collections import deque

import msgspec
from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from services.gateway.bounds.connections import ClientConnection, CloseReason
from services.gateway.http.request_middleware import HEADER_BYTES_MAX, HEADERS_MAX, RESTRICTED
from services.gateway.vocabulary.errors import BodyTimeout, GatewayError, HeadersTooLarge

HEADER_TIMEOUT_S = 10.0
"""Timeout for the headers, from the start of the connection or their first byte."""
INCOMPLETE_BYTES_MAX = 64 * 2**10
"""Maximum bytes of incomplete headers, of an incomplete body part, or of incomplete trailers."""
PIPELINED_MAX = 8
"""Maximum requests of a connection that wait for the response to an earlier request."""
PIPELINED_BYTES_MAX = 64 * 2**10
"""Maximum total body bytes of these waiting requests."""
# Seconds from an error response to the close: closing while the client sends would reset the
# connection, and the client would miss the response.
LINGER_S = 1.0


class BoundedProtocol(HttpToolsProtocol):
    """Ends connections whose incomplete requests are too slow or too large."""

    # Bytes since the parser last completed headers or a part of a body.
    _incomplete_bytes = 0
    # Bytes of the buffered headers.
    _header_bytes = 0
    _timer: asyncio.TimerHandle | None = None
    _refused = False
    # Whether a request is partly received, and whether its headers are complete.
    _in_message = False
    _in_body = False

    def __init__(
        self, connection: ClientConnection, config: Config, server_state: ServerState
    ) -> None:
        super().__init__(config, server_state, app_state={})
        self._connection = connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connection.close = transport.abort
        # Requests with pipelined successors, which uvicorn does not notify of a disconnect.
        self._superseded: deque[RequestResponseCycle] = deque(maxlen=PIPELINED_MAX + 1)
        self._timer = self.loop.call_later(HEADER_TIMEOUT_S, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.leave()
        self._stop_timer()
        for cycle in self._superseded:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._incomplete_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except HttpParserError:
            self._connection.note(CloseReason.INVALID)
            self.send_400_response("Invalid HTTP request received.")
        if self._refused:
            return
        if not self._response_running:
            self._wait_for_more()
        if self._incomplete_bytes > INCOMPLETE_BYTES_MAX:
            self._refuse(_too_large(INCOMPLETE_BYTES_MAX))

    def _wait_for_more(self) -> None:
        """Start the timeout for the rest of a request, or the keep-alive between requests.

        The keep-alive also starts if the response ended before its request was complete.
        """
        if self._in_message or self._incomplete_bytes:
            if self._timer is None:
                self._timer = self.loop.call_later(HEADER_TIMEOUT_S, self._expire)
        elif self.timeout_keep_alive_task is None:
            self._stop_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _feed(self, data: bytes) -> None:
        """Parse the data; ignore offers to upgrade the protocol.

        The parser would treat the data after such an offer as another protocol, so feed it the
        request's head again without the offer.
        """
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
                if not self._offers_upgrade:
                    continue
            if self._headers_full:
                # A header that was not buffered may have had the length of the body.
                self._refuse(_too_large(HEADER_BYTES_MAX))
                return
            self.parser.feed_data(self._head_without_offer())

    def _head_without_offer(self) -> bytes:
        """The head of the latest request without its Upgrade header."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        self._header_bytes = 0
        self._in_message, self._in_body = True, False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Buffer a header. RequestMiddleware refuses the request once `_headers_full`.

        Drops trailers, the fields after a chunked body: the request's headers are already in use.
        """
        if not self._in_body and not self._headers_full:
            self._header_bytes += len(name) + len(value)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._incomplete_bytes = 0
        if self._offers_upgrade:
            return
        self._in_body = True
        self._stop_timer()
        if len(self.pipeline) >= PIPELINED_MAX:
            # The exception ends the parsing and the connection.
            raise ValueError("too many pipelined requests")
        before = self.cycle
        self._connection.begin()
        admitted = self._connection.admit()
        if not admitted:
            self.scope["state"][RESTRICTED] = True
        super().on_headers_complete()
        if not admitted:
            self.cycle.keep_alive = False
        if self.pipeline:
            self._superseded.append(before)
            # Undo uvicorn's pause: only reads detect a disconnect. `on_body` bounds the bytes.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._incomplete_bytes = 0
        if self.pipeline:
            waiting = sum(len(cycle.body) for cycle, _ in self.pipeline)
            if waiting + len(body) > PIPELINED_BYTES_MAX:
                raise ValueError("the bodies of pipelined requests are too large")
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._incomplete_bytes = 0
        self._in_message = False
        if not self._offers_upgrade:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._connection.end()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP; during another response just end the connection."""
        if self._response_running:
            self._end()
        else:
            super().send_400_response(msg)

    @property
    def _offers_upgrade(self) -> bool:
        """Whether the request offers a protocol upgrade; the parser then expects no body."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    @property
    def _headers_full(self) -> bool:
        """Whether the buffered headers exceed the limits."""
        return len(self.headers) > HEADERS_MAX or self._header_bytes > HEADER_BYTES_MAX

    @property
    def _response_running(self) -> bool:
        """Whether a response is incomplete."""
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
        """Send the error, unless another response is in progress, and stop reading."""
        self._stop_timer()
        self._refused = True
        if self._response_running or self.transport.is_closing():
            self._end()
            return
        body = msgspec.json.encode(error.body())
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        end = b"connection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + head.encode() + end + body)
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _end(self) -> None:
        """Stop reading; close the connection after the responses to complete requests."""
        self._refused = True
        # Remove the newest pipelined request if its body is incomplete.
        if self.pipeline and self.cycle.more_body:
            self.pipeline.popleft()
            self.cycle = self._superseded.pop()
        if self._response_running and not self.cycle.more_body:
            self.cycle.keep_alive = False
        else:
            self.transport.close()


def _too_large(bytes_max: int) -> HeadersTooLarge:
    return HeadersTooLarge(f"the headers exceed {bytes_max} bytes; send fewer")
