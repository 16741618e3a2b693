"""The HTTP client of an upstream server: JSON requests, and streams of events that can be cut."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx2
import msgspec

from services.common.clock import monotonic_s
from services.common.timeouts import timeout
from services.worker.openai_engine.completions import BUSY, CHANGED, MESSAGE_CHARS_MAX
from services.worker.openai_engine.errors import (
    UpstreamBusy,
    UpstreamFailed,
    UpstreamLost,
    UpstreamRefused,
)

CONNECT_TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 16 * 2**20
"""Largest answer, and largest event of a stream."""
RETRY_AFTER_S = 1.0
"""Time until a refused request is tried again, unless the server says otherwise."""
RETRY_AFTER_MIN_S, RETRY_AFTER_MAX_S = 0.25, 10.0
INVALID_JSON = (msgspec.DecodeError, RecursionError)
"""Errors of decoding JSON; msgspec raises RecursionError for deeply nested values."""
_DONE = "[DONE]"


class TokenDeadline:
    """When a stream must have its next token: after `first_s`, then `later_s` after each token."""

    def __init__(self, first_s: float, later_s: float) -> None:
        self._later_s = later_s
        self._due_s = monotonic_s() + first_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self._due_s - monotonic_s()

    def note_token(self) -> None:
        """The stream has a token."""
        self._due_s = monotonic_s() + self._later_s


class UpstreamClient:
    """Calls an upstream server at `url`; `key` is its API key, if it requires one."""

    def __init__(self, url: str, key: str | None = None) -> None:
        headers = {"Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self.url = url
        self._client = httpx2.AsyncClient(
            base_url=url,
            headers=headers,
            # `_cuttable` limits each read, and the number of requests bounds the connections.
            timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
            # A load balancer's cookie would bind all requests to a single server behind it.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
        )
        self._reads: set[asyncio.Timeout] = set()  # of the streams

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    def cut(self) -> None:
        """End all streams with UpstreamLost."""
        now_s = asyncio.get_running_loop().time()
        for read in self._reads:
            read.reschedule(now_s)

    async def get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and content of a GET; raises UpstreamLost without an answer in `timeout_s`."""
        with _losses():
            async with timeout(timeout_s), self._client.stream("GET", path) as response:
                return response.status_code, await _content(response)

    async def post(
        self, path: str, body: Mapping[str, Any], timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        """Status of a POST, and its JSON if it is OK.

        Raises:
            UpstreamLost: without an answer in `timeout_s`, or one that is no JSON object.
            UpstreamBusy: if the server has no room.
        """
        with _losses():
            async with timeout(timeout_s), self._opened(path, body) as response:
                content = await _content(response)
                status = response.status_code
                if status in BUSY:
                    _check(response, content)
                return status, _json(content) if status == httpx2.codes.OK else {}

    async def answer(self, path: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The JSON that answers a POST.

        Raises:
            UpstreamLost: if the server or the connection fails, or there is no answer in time.
            UpstreamBusy: if the server has no room.
            UpstreamRefused: if it refuses the request.
            UpstreamFailed: if it redirects the request.
        """
        with _losses():
            async with timeout(timeout_s), self._opened(path, body) as response:
                content = await _content(response)
                _check(response, content)
                return _json(content)

    async def events(
        self, path: str, body: Mapping[str, Any], deadline: TokenDeadline
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a streamed POST; closing the generator hangs up.

        The caller notes tokens in `deadline`, which limits each wait: events without tokens and
        comments do not defer it.

        Raises:
            UpstreamLost: if the server or the connection fails, or `cut` is called.
            UpstreamBusy: if the server has no room.
            UpstreamRefused: if it refuses the request.
            UpstreamFailed: if it redirects the request.
        """
        with _losses():
            request = self._opened(path, body)
            async with self._cuttable(deadline.left_s):
                response = await request.__aenter__()
            try:
                if response.status_code != httpx2.codes.OK:
                    async with self._cuttable(deadline.left_s):
                        content = await _content(response)
                    _check(response, content)
                source = httpx2.EventSource(response, ANSWER_BYTES_MAX)
                async with aclosing(_data(source)) as events:
                    while True:
                        async with self._cuttable(deadline.left_s):
                            data = await anext(events, None)
                        if data is None or data == _DONE:
                            return
                        yield _json(data.encode())
            finally:
                # Closes the connection unless the answer has been read to its end.
                await request.__aexit__(None, None, None)

    def _opened(self, path: str, body: Mapping[str, Any]) -> Any:
        content = msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        return self._client.stream("POST", path, content=content, headers=headers)

    @asynccontextmanager
    async def _cuttable(self, limit_s: float) -> AsyncIterator[None]:
        """A deadline of a read that `cut` moves to now."""
        async with timeout(limit_s) as read:
            self._reads.add(read)
            try:
                yield
            finally:
                self._reads.discard(read)


def _check(response: httpx2.Response, content: bytes) -> None:
    """Raise the error of an answer that is not OK."""
    status = response.status_code
    if status == httpx2.codes.OK:
        return
    if status in BUSY:
        raise UpstreamBusy(_retry_after_s(response.headers.get("retry-after")))
    if httpx2.codes.is_redirect(status):
        raise UpstreamFailed(
            f"the upstream server redirects requests (HTTP {status}), which the worker does not"
            " follow; set 'upstream_url' to the address that it redirects to"
        )
    if status in CHANGED or not httpx2.codes.is_client_error(status):
        # Without its message, which may quote the prompt: losses are logged.
        raise UpstreamLost(f"the upstream server failed with HTTP status {status}")
    message = f"{message_of(content)} (HTTP {status})"
    raise UpstreamRefused(f"the upstream server refused the request: {message}")


async def _data(source: httpx2.EventSource) -> AsyncGenerator[str, None]:
    async for event in source:
        yield event.data


@contextmanager
def _losses() -> Iterator[None]:
    """Convert errors of the connection to UpstreamLost."""
    try:
        yield
    except TimeoutError as error:
        raise UpstreamLost("the upstream server did not answer in time", silent=True) from error
    except (httpx2.HTTPError, httpx2.StreamError) as error:
        cause = str(error) or type(error).__name__
        raise UpstreamLost(f"the connection to the upstream server failed: {cause}") from error


async def _content(response: httpx2.Response) -> bytes:
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        if len(content) > ANSWER_BYTES_MAX:
            raise UpstreamLost(f"the upstream server sent more than {ANSWER_BYTES_MAX} bytes")
    return bytes(content)


def _json(content: bytes) -> dict[str, Any]:
    """A JSON object; raises UpstreamLost for anything else, such as an event that was cut off."""
    try:
        value = msgspec.json.decode(content)
    except INVALID_JSON as error:
        raise UpstreamLost("the upstream server sent invalid JSON") from error
    if not isinstance(value, dict):
        raise UpstreamLost("the upstream server sent JSON that is no object")
    return value


def message_of(content: bytes) -> str:
    """The message in the body of an error; its beginning if it has another format."""
    text = content.decode(errors="replace")
    try:
        body = msgspec.json.decode(content)
    except INVALID_JSON:
        return text[:MESSAGE_CHARS_MAX]
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or text)[:MESSAGE_CHARS_MAX]


def _retry_after_s(header: str | None) -> float:
    try:
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, float(header or RETRY_AFTER_S)))
    except ValueError:
        return RETRY_AFTER_S
