"""Renders chat templates in a separate process (render_process.py).

Clients share the process fairly: a client that sends many long chats delays only its own requests.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from services.common.message_pipes import MessagePipes
from services.common.messages import encode_message
from services.common.timeouts import timeout
from services.gateway.model.render_process import TEXT
from services.gateway.structure.checker import FairSemaphore
from services.gateway.vocabulary.errors import (
    BadRequest,
    GatewayError,
    QueueFull,
    ServiceUnavailable,
)

log = logging.getLogger(__name__)

_MODULE = "services.gateway.model.render_process"
RENDER_TIMEOUT_S = 10.0
"""Time limit for queueing, process start and rendering together."""
START_DELAY_S = 1.0
"""Delay of the process's start, so that it does not slow the start of the gateway."""
WAITING_MAX = 2**20
"""Waiting requests of a client; `inflight_max` bounds the requests of all clients."""


class PromptTooLong(Exception):
    """The prompt has more bytes than permitted."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.size_bytes = size_bytes


class TemplateRenderer:
    """Owns the process, which starts with the first request. The creator calls `close`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: variables of the template."""
        self._setup_message = encode_message({"source": source, "special_tokens": special_tokens})
        self._process: _RenderProcess | None = None
        # A single slot: the process serves its requests in order.
        self._semaphore = FairSemaphore(1, 1, WAITING_MAX, "chats are being rendered")

    async def run(self, delay_s: float = START_DELAY_S) -> None:
        """Start the process after `delay_s`, ahead of the first request; end it when cancelled."""
        try:
            await asyncio.sleep(delay_s)
            request = render_request({"messages": [{"role": "user", "content": ""}]}, 0)
            with contextlib.suppress(GatewayError, PromptTooLong):
                await self.render(request, "")
            await asyncio.Event().wait()
        finally:
            await self.close()

    async def render(
        self, request: bytes, limit_key: str, warn: Callable[[str], object] | None = None
    ) -> str:
        """Return the text of the prompt of `request`, an encoded message; see `render_request`.

        `limit_key`: the client. `warn`: see `ChatTemplate.render`.

        Raises:
            BadRequest: if the template refuses the messages, or takes too much time or memory.
            PromptTooLong: if the text has more than `bytes_max` bytes.
            QueueFull: if the text is not rendered within `RENDER_TIMEOUT_S`.
            ServiceUnavailable: if the process cannot be started or fails.
        """
        try:
            async with timeout(RENDER_TIMEOUT_S), self._semaphore.slot(limit_key) as slot:
                # A cancelled caller returns at once; its slot is held until its work is done.
                if self._process is None or not self._process.usable:
                    slot.work = asyncio.ensure_future(self._start())
                    await asyncio.shield(slot.work)
                assert self._process is not None
                slot.work = self._process.submit(request)
                response: bytes = await asyncio.shield(slot.work)
        except TimeoutError:
            raise QueueFull("too many chats are being rendered; try again") from None
        if response.startswith(TEXT):
            end = response.index(TEXT, len(TEXT))
            if warn is not None and (warning := response[len(TEXT) : end]):
                warn(warning.decode())
            return str(memoryview(response)[end + len(TEXT) :], "utf-8", "surrogatepass")
        result: dict[str, Any] = json.loads(response)
        if (failed := result.get("failed")) is not None:
            raise BadRequest(
                f"the model's chat template {failed} with these messages; send fewer or shorter"
                " messages",
                param="messages",
            )
        if (size_bytes := result.get("bytes")) is not None:
            raise PromptTooLong(size_bytes)
        raise BadRequest(result["refused"], param=result["param"])

    async def _start(self) -> None:
        self._process = await _RenderProcess.start(self._setup_message)

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            await self._process.close()


class _RenderProcess:
    """Connection to one process, until the process ends; it serves one request at a time."""

    def __init__(self, pipes: MessagePipes, setup_message: bytes) -> None:
        """Use `start`."""
        self._pipes = pipes
        self._response: asyncio.Future[bytes] | None = None
        self._closing = False
        pipes.send(setup_message)
        self._reading = asyncio.create_task(self._read_responses())

    @classmethod
    async def start(cls, setup_message: bytes) -> "_RenderProcess":
        """Start a process. Raises ServiceUnavailable."""
        try:
            return cls(await MessagePipes.start(_MODULE), setup_message)
        except OSError as error:
            raise ServiceUnavailable(
                f"the process that renders chats cannot be started ({error.strerror}); try again"
            ) from error

    @property
    def usable(self) -> bool:
        """Whether the process still runs."""
        return not self._reading.done() and self._pipes.process.returncode is None

    def submit(self, request: bytes) -> asyncio.Future[bytes]:
        """Send a request; return its response, or ServiceUnavailable if the process ends first."""
        loop = asyncio.get_running_loop()
        self._response = response = loop.create_future()
        stuck = loop.call_later(RENDER_TIMEOUT_S, self._pipes.process.kill)
        response.add_done_callback(lambda _: stuck.cancel())
        self._pipes.send(request)
        return response

    async def close(self) -> None:
        """Kill the process and fail its request."""
        self._closing = True
        self._pipes.process.kill()
        await self._reading

    async def _read_responses(self) -> None:
        while (message := await self._pipes.receive()) is not None:
            if self._response is not None and not self._response.done():
                self._response.set_result(message)
        code = await self._pipes.end()
        if not self._closing:
            log.warning("the process that renders chats ended with code %d", code)
        if self._response is not None and not self._response.done():
            self._response.set_exception(
                ServiceUnavailable(
                    f"the process that renders chats ended with code {code}; try again"
                )
            )
            # Mark the exception as retrieved, or asyncio logs it if the caller was cancelled.
            self._response.exception()


def render_request(fields: Mapping[str, Any], bytes_max: int) -> bytes:
    """Encode a request to render `fields`, the arguments of `ChatTemplate.render`.

    `bytes_max`: maximum length of the text.

    Raises:
        BadRequest: if the arguments of a tool call are nested too deeply.
    """
    try:
        return encode_message({"bytes_max": bytes_max, "fields": fields})
    except RecursionError:
        raise BadRequest(
            "the arguments of a tool call are nested too deeply; send fewer levels",
            param="messages",
        ) from None
