"""Starts the process that checks grammars (check_process.py), and sends it grammars."""

import asyncio
import itertools
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.common.message_pipes import MessagePipes
from services.common.messages import encode_message
from services.core.request import Grammar
from services.gateway.vocabulary.errors import ServiceUnavailable

log = logging.getLogger(__name__)

_MODULE = "services.gateway.structure.check_process"
STUCK_S = 10.0
"""Seconds after which a process that does not end a cancelled check is killed."""


@dataclass(frozen=True, slots=True)
class RunningCheck:
    """A check that was sent to the process."""

    number: int
    result: asyncio.Future[dict[str, Any]]
    """The process's result message; ServiceUnavailable if the process ends first."""


class CheckClient:
    """Connection to one process, until the process ends. The creator calls `close`."""

    def __init__(self, pipes: MessagePipes, setup_message: bytes) -> None:
        """Use `start`."""
        self._pipes = pipes
        self._numbers = itertools.count()
        # Results that are awaited, by number of the check.
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        pipes.receive = self._receive_result
        pipes.send(setup_message)
        self._closing = False
        self._ending = asyncio.create_task(self._wait_end())

    @classmethod
    async def start(cls, setup_message: bytes) -> "CheckClient":
        """Start a process and send it `setup_message`. Raises ServiceUnavailable."""
        try:
            pipes = await MessagePipes.start(_MODULE)
        except OSError as error:
            raise ServiceUnavailable(
                f"the process that checks grammars cannot be started ({error.strerror}); try again"
            ) from error
        return cls(pipes, setup_message)

    @property
    def usable(self) -> bool:
        """Whether the process still runs."""
        return not self._ending.done()

    def submit(self, grammars: Sequence[Grammar]) -> RunningCheck:
        """Send grammars to the process, which starts their check at once."""
        check = RunningCheck(next(self._numbers), asyncio.get_running_loop().create_future())
        self._pending[check.number] = check.result
        # No flow control: the number of concurrent checks and the size of grammars are bounded.
        texts = [(grammar.kind, grammar.text) for grammar in grammars]
        self._pipes.send(encode_message({"number": check.number, "grammars": texts}))
        return check

    def cancel(self, check: RunningCheck) -> None:
        """Cancel a check unless it has ended; its `result` is still resolved."""
        if not check.result.done():
            self._pipes.send(encode_message({"cancel": check.number}))
            stuck = asyncio.get_running_loop().call_later(STUCK_S, self._pipes.process.kill)
            check.result.add_done_callback(lambda _: stuck.cancel())

    async def close(self) -> None:
        """Kill the process and fail its checks."""
        self._closing = True
        self._pipes.process.kill()
        await self._ending

    def _receive_result(self, body: bytes) -> None:
        result = json.loads(body)
        pending = self._pending.pop(result["number"])
        if not pending.done():
            pending.set_result(result)

    async def _wait_end(self) -> None:
        code = await self._pipes.end()
        if not self._closing:
            log.warning("the process that checks grammars ended with code %d", code)
        error = f"the process that checks grammars ended with code {code}; try again"
        for pending in self._pending.values():
            if not pending.done():
                pending.set_exception(ServiceUnavailable(error))
                # Mark the exception as retrieved, or asyncio logs it if the caller was cancelled.
                pending.exception()
