"""HTTP/1.1 client of streamed completions, fast enough to timestamp tokens.

httptools parses HTTP, orjson the events; connections are reused by later requests.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import httptools
import orjson

from services.common.clock import monotonic_s
from services.common.timeouts import timeout
from tideserve.load.workload import BATCH_CLASS, DEFAULT_CLASS, PlannedRequest

DATA = b"data:"
DONE = b"[DONE]"
IDLE_MAX_S = 3.0  # uvicorn hangs up after 5
CONNECT_TIMEOUT_S = 10.0


class ClassFields(StrEnum):
    """Fields that carry a request's class: tideserve's, vLLM's priority, or none."""

    CLASSES = "classes"
    PRIORITY = "priority"
    NONE = "none"


class StreamFailed(Exception):
    """The response ended with the error in the message."""


class StreamedAnswer:
    """The response to a request so far.

    `output_ids` are known if the request asks for them; `prompt_tokens`, `output_tokens` and
    `cached_tokens` (prompt tokens from a prefix cache) come from the response's usage.
    `retry_after_s`: the header Retry-After, in seconds.
    """

    def __init__(self) -> None:
        self.status = 0
        self.output_ids: list[int] = []
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.finish_reason = ""
        self.request_id = ""
        self.retry_after_s: float | None = None
        self.token_times_s: list[float] = []
        self.output_tokens = 0
        self.error = ""
        self.finished = False
        self._rest = b""
        self._body = b""
        self._pieces: list[str] = []

    def feed(self, data: bytes, now_s: float) -> None:
        """Parse a piece of the body that arrived at `now_s`."""
        if self.status != 200:
            self._body = (self._body + data)[:2000]
            return
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if event.startswith(DATA):
                self._take(event[len(DATA) :].strip(), now_s)

    @property
    def body(self) -> str:
        """The beginning of the body of a response that is not a stream."""
        return self._body.decode("utf-8", "replace")

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    def _take(self, payload: bytes, now_s: float) -> None:
        if payload == DONE:
            self.finished = True
            return
        try:
            event = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self.error = "an event of the stream is not JSON"
            return
        if "error" in event:
            self.error = str(event["error"])[:500]
        for choice in event.get("choices") or ():
            # A token may have no text, such as all but the last of a character's tokens. An event
            # with an empty list of ids has no token.
            token_ids = choice.get("token_ids")
            if "text" in choice and token_ids != []:
                self.token_times_s.append(now_s)
            self.output_ids += token_ids or ()
            self._pieces.append(choice.get("text") or "")
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if usage := event.get("usage"):
            self.output_tokens = usage["completion_tokens"]
            self.prompt_tokens = usage.get("prompt_tokens") or 0
            details = usage.get("prompt_tokens_details") or {}
            self.cached_tokens = details.get("cached_tokens") or 0


class HttpConnection(asyncio.Protocol):
    """A connection to a server; serves a request at a time.

    httptools calls the methods that begin with `on_`.
    """

    def __init__(self) -> None:
        self.idle_since_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._answer = StreamedAnswer()
        self._parser: httptools.HttpResponseParser | None = None
        self._ended: asyncio.Future[None] | None = None

    @property
    def usable(self) -> bool:
        """Whether the connection can take another request."""
        closing = self._transport is None or self._transport.is_closing()
        return not closing and monotonic_s() - self.idle_since_s < IDLE_MAX_S

    async def request(self, head: bytes, body: bytes, answer: StreamedAnswer) -> None:
        """Send a request and read the whole response into `answer`. Raises StreamFailed."""
        assert self._transport is not None
        self._answer = answer
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(head + body)
        await self._ended
        self.idle_since_s = monotonic_s()

    def close(self) -> None:
        """Abort the connection."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.idle_since_s = monotonic_s()

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(StreamFailed(f"the response is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(StreamFailed("the server closed the connection"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._answer.request_id = value.decode("ascii", "replace")
        elif name.lower() == b"retry-after":
            with contextlib.suppress(ValueError):  # it may be a date
                self._answer.retry_after_s = float(value)

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._answer.feed(body, monotonic_s())

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
        self._end(None)

    def _end(self, error: StreamFailed | None) -> None:
        if self._ended is not None and not self._ended.done():
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)


class OpenAIServer:
    """An OpenAI-compatible server and the idle connections to it."""

    def __init__(
        self, url: str, api_key: str | None, class_fields: ClassFields = ClassFields.CLASSES
    ) -> None:
        parts = urlsplit(url)
        self._class_fields = class_fields
        self._host = parts.hostname or "127.0.0.1"
        self._secure = parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Content-Type: application/json\r\nAccept: text/event-stream\r\n{key}"
        )
        self._idle: list[HttpConnection] = []

    async def complete(
        self,
        model: str,
        request: PlannedRequest,
        answer: StreamedAnswer,
        on_sent: Callable[[], None],
    ) -> None:
        """Send a request and fill `answer` as the response arrives.

        Raises:
            StreamFailed, OSError: if the response fails or is incomplete.
        """
        body = completion_body(model, request, self._class_fields)
        connection = await self._connection()
        head = f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode()
        on_sent()
        try:
            await connection.request(head, body, answer)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)

    async def close(self) -> None:
        """Close all connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connection(self) -> HttpConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            with contextlib.suppress(OSError):
                connection.close()
        try:
            async with timeout(CONNECT_TIMEOUT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    HttpConnection, self._host, self._port, ssl=self._secure or None
                )
        except TimeoutError as error:
            # The caller takes a TimeoutError for a request that exceeds the job's deadline.
            raise StreamFailed(f"no connection within {CONNECT_TIMEOUT_S:g} s") from error
        return connection


def completion_body(
    model: str, request: PlannedRequest, class_fields: ClassFields = ClassFields.CLASSES
) -> bytes:
    """Encode a streamed request."""
    fields = completion_fields(model, request)
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    fields |= CLASS_ENCODERS[class_fields](request)
    if request.cache_salt is not None:
        fields |= {"return_token_ids": True, "cache_salt": request.cache_salt}
    return orjson.dumps(fields)


def completion_fields(model: str, request: PlannedRequest) -> dict[str, Any]:
    """The fields of a request; `min_tokens` and `ignore_eos` force the planned output length."""
    return {
        "model": model,
        "prompt": request.prompt_ids,
        "max_tokens": request.output_tokens,
        "min_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": request.temperature,
        "seed": request.seed % 2**31,
    }


def _class_fields(request: PlannedRequest) -> dict[str, Any]:
    """Class and targets in tideserve's fields."""
    fields: dict[str, Any] = {}
    if request.slo_class != DEFAULT_CLASS:
        fields["slo_class"] = request.slo_class
    targets = {"ttft_ms": request.ttft_s, "tpot_ms": request.tpot_s}
    slo = {name: seconds * 1e3 for name, seconds in targets.items() if seconds is not None}
    return fields | ({"slo": slo} if slo else {})


def _priority_field(request: PlannedRequest) -> dict[str, Any]:
    """The class as vLLM's priority: online 0, batch 1."""
    return {"priority": int(request.slo_class == BATCH_CLASS)}


CLASS_ENCODERS: Mapping[ClassFields, Callable[[PlannedRequest], dict[str, Any]]] = {
    ClassFields.CLASSES: _class_fields,
    ClassFields.PRIORITY: _priority_field,
    ClassFields.NONE: lambda request: {},
}
