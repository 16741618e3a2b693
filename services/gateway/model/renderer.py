"""Renders chat templates in separate processes (render_process.py).

Chats are sent to the first process ahead of its responses, as a chat takes less time to render than
an iteration of the event loop. A chat that exceeds the first process's short limit is rendered by a
second process with a long limit, so chats on which a template loops do not delay others. In both,
clients take turns.
"""

import asyncio
import contextlib
import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from services.common.message_pipes import MessagePipes
from services.common.messages import encode_message
from services.common.timeouts import timeout
from services.gateway.model.render_process import LONG, SHORT, TEXT, TOO_LONG, RenderLimits
from services.gateway.structure.fair_semaphore import FairSemaphore
from services.gateway.vocabulary.errors import (
    BadRequest,
    GatewayError,
    QueueFull,
    ServiceUnavailable,
)

log = logging.getLogger(__name__)

_MODULE = "services.gateway.model.render_process"
RENDER_TIMEOUT_S = 10.0
"""Time limit for queueing, process starts and rendering together."""
START_DELAY_S = 1.0
"""Delay of the process's start, so that it does not slow the start of the gateway."""
SENT_MAX = 32
"""Requests that the first process has, of which it renders one."""
CLIENT_SENT_MAX = 16
WAITING_MAX = 2**20
"""Waiting requests of a client; `inflight_max` bounds the requests of all clients."""
STUCK_S = 2.0
"""Time beyond the process's own limit after which a process that does not respond is killed."""


class PromptTooLong(Exception):
    """The prompt has more bytes than permitted."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.size_bytes = size_bytes


class TemplateRenderer:
    """Owns the processes, which start with the first request. The creator calls `close`."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], hidden: str | None = None
    ) -> None:
        """`special_tokens`: variables of the template. `hidden`: see `ChatTemplate`."""
        setup = {"source": source, "special_tokens": special_tokens, "hidden": hidden}
        self._short = _Renderers(setup, SHORT, SENT_MAX, CLIENT_SENT_MAX)
        self._long = _Renderers(setup, LONG, 1, 1)

    async def run(self, delay_s: float = START_DELAY_S) -> None:
        """Start a process after `delay_s`, ahead of the first request; end all when cancelled."""
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
            ServiceUnavailable: if a process cannot be started or fails.
        """
        try:
            async with timeout(RENDER_TIMEOUT_S):
                response = await self._short.response(request, limit_key)
                if response == TOO_LONG:
                    response = await self._long.response(request, limit_key)
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

    async def close(self) -> None:
        """End the processes."""
        await asyncio.gather(self._short.close(), self._long.close())


class _Renderers:
    """A process, replaced when it ends, and the clients that wait for it."""

    def __init__(
        self, setup: Mapping[str, Any], limits: RenderLimits, sent_max: int, client_max: int
    ) -> None:
        """`sent_max`, `client_max`: requests that the process has, in all and of a client."""
        self._setup_message = encode_message({"limits": limits, "template": setup})
        self._stuck_s = limits.wall_s + STUCK_S
        self._semaphore = FairSemaphore(
            sent_max, client_max, WAITING_MAX, "chats are being rendered"
        )
        self._process: _RenderProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    async def response(self, request: bytes, limit_key: str) -> bytes:
        """Return the process's response to `request`. Raises QueueFull, ServiceUnavailable."""
        async with self._semaphore.slot(limit_key) as slot:
            for last_try in (False, True):
                process = await self._usable_process()
                # A cancelled caller returns at once; its slot is held until its work is done.
                slot.work = work = process.submit(request)
                try:
                    return await asyncio.shield(work)
                except ServiceUnavailable:
                    # Rendering has no effects, so it may be repeated.
                    if last_try or self._closed:
                        raise
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """End the process."""
        self._closed = True
        if self._starting is not None:
            await asyncio.wait([self._starting])
        if self._process is not None:
            await self._process.close()

    async def _usable_process(self) -> "_RenderProcess":
        if self._process is None or not self._process.usable:
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._start())
            # Other callers may wait for the same start.
            await asyncio.shield(self._starting)
        assert self._process is not None
        return self._process

    async def _start(self) -> None:
        try:
            pipes = await MessagePipes.start(_MODULE)
        except OSError as error:
            raise ServiceUnavailable(
                f"the process that renders chats cannot be started ({error.strerror}); try again"
            ) from error
        self._process = _RenderProcess(pipes, self._setup_message, self._stuck_s)


class _RenderProcess:
    """Connection to one process, until the process ends; it responds in order of the requests."""

    def __init__(self, pipes: MessagePipes, setup_message: bytes, stuck_s: float) -> None:
        """`stuck_s`: the process is killed if a response after the first takes longer."""
        self._pipes = pipes
        self._stuck_s = stuck_s
        # The first response comes after the start of the process.
        self._response_s = RENDER_TIMEOUT_S
        self._stuck: asyncio.TimerHandle | None = None
        # Responses that are awaited, in order of the requests.
        self._pending = deque[asyncio.Future[bytes]]()
        self._closing = False
        pipes.receive = self._receive_response
        pipes.send(setup_message)
        self._ending = asyncio.create_task(self._wait_end())

    @property
    def usable(self) -> bool:
        """Whether the process still runs."""
        return not self._ending.done() and self._pipes.process.returncode is None

    def submit(self, request: bytes) -> asyncio.Future[bytes]:
        """Send a request; return its response, or ServiceUnavailable if the process ends first."""
        response: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending.append(response)
        if len(self._pending) == 1:
            self._set_timer()
        self._pipes.send(request)
        return response

    async def close(self) -> None:
        """Kill the process and fail its requests."""
        self._closing = True
        self._pipes.process.kill()
        await self._ending

    def _receive_response(self, message: bytes) -> None:
        self._pending.popleft().set_result(message)
        self._response_s = self._stuck_s
        self._set_timer()

    def _set_timer(self) -> None:
        """Limit the time of the first pending request, which the process renders."""
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None
        if self._pending:
            loop = asyncio.get_running_loop()
            self._stuck = loop.call_later(self._response_s, self._pipes.process.kill)

    async def _wait_end(self) -> None:
        code = await self._pipes.end()
        if not self._closing:
            log.warning("the process that renders chats ended with code %d", code)
        error = f"the process that renders chats ended with code {code}; try again"
        while self._pending:
            response = self._pending.popleft()
            response.set_exception(ServiceUnavailable(error))
            # Mark the exception as retrieved, or asyncio logs it if the caller was cancelled.
            response.exception()
        self._set_timer()


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
