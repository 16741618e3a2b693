"""One HTTP connection: uvicorn's protocol, and bounds for what comes before a request does.

The parser keeps the bytes of headers until they are complete, and uvicorn every header and every
request that is sent while another one is answered, all however many they are and however long they
take.
"""

import asyncio
from collections import deque

import msgspec
from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from services.gateway.http.request_middleware import HEADER_BYTES_MAX, HEADERS_MAX
from services.gateway.vocabulary.errors import BodyTimeout, GatewayError, HeadersTooLarge

HEADER_TIMEOUT_S = 10.0
"""How long headers may take, from the connection or their first byte on."""
INCOMPLETE_BYTES_MAX = 64 * 2**10
"""Bytes that may come before headers, a part of the body or the body's trailers are complete."""
PIPELINED_MAX = 8
"""Requests of one connection that may wait while another one is answered."""
PIPELINED_BYTES_MAX = 64 * 2**10
"""Bytes that the bodies of waiting requests may have together."""
# A client that still sends would miss the answer if the connection were cut at once.
LINGER_S = 1.0


class BoundedProtocol(HttpToolsProtocol):
    """Ends connections of clients that send incomplete requests too slowly or without bound."""

    # Bytes since the parser last completed something.
    _incomplete_bytes = 0
    # Bytes of the headers that are kept.
    _header_bytes = 0
    _timer: asyncio.TimerHandle | None = None
    _refused = False
    # Whether a part of a request is yet to come.
    _in_message = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Requests that others follow: uvicorn does not tell them that the client is gone.
        self._superseded: deque[RequestResponseCycle] = deque(maxlen=PIPELINED_MAX + 1)
        self._timer = self.loop.call_later(HEADER_TIMEOUT_S, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
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
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")
        if self._refused:
            return
        if not self._answering:
            self._wait_for_more()
        if self._incomplete_bytes > INCOMPLETE_BYTES_MAX:
            self._refuse(_too_large(INCOMPLETE_BYTES_MAX))

    def _wait_for_more(self) -> None:
        """The rest of a request has the time of headers; between requests the connection is kept.

        So it is, too, if a request was answered before all of it was here, and the rest is now.
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
        """Parse it. An offer to change to another protocol is answered in this one.

        The parser takes what follows such an offer for that protocol; so the request is begun
        once more without it.
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
                # Headers that were not kept may say how long the body is.
                self._refuse(_too_large(HEADER_BYTES_MAX))
                return
            self.parser.feed_data(self._head_without_offer())

    def _head_without_offer(self) -> bytes:
        """The head of the latest request, without its offer of another protocol."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        self._header_bytes = 0
        self._in_message = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools. The front door refuses a request with more than those that are kept."""
        if not self._headers_full:
            self._header_bytes += len(name) + len(value)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._incomplete_bytes = 0
        if self._offers_upgrade:
            return
        self._stop_timer()
        if len(self.pipeline) >= PIPELINED_MAX:
            # Ends the parsing, and with it the connection.
            raise ValueError("too many requests before the first one was answered")
        before = self.cycle
        super().on_headers_complete()
        if self.pipeline:
            self._superseded.append(before)
            # Waiting bytes are bounded here, and only a reader sees that the client is gone.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._incomplete_bytes = 0
        if self.pipeline:
            waiting = sum(len(cycle.body) for cycle, _ in self.pipeline)
            if waiting + len(body) > PIPELINED_BYTES_MAX:
                raise ValueError("bodies are too large before the first request was answered")
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._incomplete_bytes = 0
        self._in_message = False
        if not self._offers_upgrade:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP; within another answer the connection just ends."""
        if self._answering:
            self._end()
        else:
            super().send_400_response(msg)

    @property
    def _offers_upgrade(self) -> bool:
        """Whether the request offers a change of protocol, in which there are no bodies."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    @property
    def _headers_full(self) -> bool:
        """Whether the front door refuses the headers that are kept."""
        return len(self.headers) > HEADERS_MAX or self._header_bytes > HEADER_BYTES_MAX

    @property
    def _answering(self) -> bool:
        """Whether a request is unanswered."""
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
        """Answer, unless another answer is being sent, and read no more requests."""
        self._stop_timer()
        self._refused = True
        if self._answering or self.transport.is_closing():
            self._end()
            return
        body = msgspec.json.encode(error.body())
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        end = b"connection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + head.encode() + end + body)
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _end(self) -> None:
        """Read no more requests; end the connection when those that are complete are answered."""
        self._refused = True
        if self.pipeline and self.cycle.more_body:
            self.pipeline.popleft()
            self.cycle = self._superseded.pop()
        if self._answering and not self.cycle.more_body:
            self.cycle.keep_alive = False
        else:
            self.transport.close()


def _too_large(bytes_max: int) -> HeadersTooLarge:
    return HeadersTooLarge(f"the headers exceed {bytes_max} bytes; send fewer")
