"""Starts the process that checks grammars (check_process.py), and sends it grammars."""

import asyncio
import contextlib
import itertools
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.common.child import Child
from services.core.request import Grammar
from services.gateway.structure.check_process import LENGTH, encode_message
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

    def __init__(
        self,
        process: Child,
        input_pipe: asyncio.WriteTransport,
        output_reader: asyncio.StreamReader,
        setup_message: bytes,
    ) -> None:
        """Use `start`."""
        self._process = process
        self._input, self._output = input_pipe, output_reader
        self._numbers = itertools.count()
        # Results that are awaited, by number of the check.
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._send(setup_message)
        self._closing = False
        self._reading = asyncio.create_task(self._read_results())

    @classmethod
    async def start(cls, setup_message: bytes) -> "CheckClient":
        """Start a process and send it `setup_message`. Raises ServiceUnavailable."""
        try:
            process = Child(
                (sys.executable, "-m", _MODULE), output=True, new_session=True, quiet=True
            )
        except OSError as error:
            raise ServiceUnavailable(
                f"the process that checks grammars cannot be started ({error.strerror}); try again"
            ) from error
        loop, read = asyncio.get_running_loop(), asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(read), process.output)
        written, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.input)
        return cls(process, written, read, setup_message)

    @property
    def usable(self) -> bool:
        """Whether the process still runs."""
        return not self._reading.done()

    def submit(self, grammars: Sequence[Grammar]) -> RunningCheck:
        """Send grammars to the process, which starts their check at once."""
        check = RunningCheck(next(self._numbers), asyncio.get_running_loop().create_future())
        self._pending[check.number] = check.result
        # No flow control: the number of concurrent checks and the size of grammars are bounded.
        texts = [(grammar.kind, grammar.text) for grammar in grammars]
        self._send(encode_message({"number": check.number, "grammars": texts}))
        return check

    def cancel(self, check: RunningCheck) -> None:
        """Cancel a check unless it has ended; its `result` is still resolved."""
        if not check.result.done():
            self._send(encode_message({"cancel": check.number}))
            stuck = asyncio.get_running_loop().call_later(STUCK_S, self._process.kill)
            check.result.add_done_callback(lambda _: stuck.cancel())

    def _send(self, data: bytes) -> None:
        """Write unless the process has ended; `_read_results` handles its end."""
        # uvloop raises RuntimeError for a pipe whose other end is closed.
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._input.write(data)

    async def close(self) -> None:
        """Kill the process and fail its checks."""
        self._closing = True
        self._process.kill()
        await self._reading

    async def _read_results(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await self._output.readexactly(LENGTH.size)
                body = await self._output.readexactly(LENGTH.unpack(head)[0])
                result = json.loads(body)
                pending = self._pending.pop(result["number"])
                if not pending.done():
                    pending.set_result(result)
        self._process.kill()
        self._input.close()
        code = await self._process.wait()
        if not self._closing:
            log.warning("the process that checks grammars ended with code %d", code)
        error = f"the process that checks grammars ended with code {code}; try again"
        for pending in self._pending.values():
            if not pending.done():
                pending.set_exception(ServiceUnavailable(error))
                # Mark the exception as retrieved, or asyncio logs it if the caller was cancelled.
                pending.exception()
