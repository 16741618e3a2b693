"""Asks the process that checks grammars; one object for each process that is started."""

import asyncio
import contextlib
import itertools
import json
import logging
import sys
from dataclasses import dataclass
from typing import Any

from services.common.child import Child
from services.core.request import Grammar
from services.gateway.structure.check_process import LENGTH, framed
from services.gateway.vocabulary.errors import ServiceUnavailable

log = logging.getLogger(__name__)

_MODULE = "services.gateway.structure.check_process"
STUCK_S = 10.0
"""A process that has not cancelled a check by then is ended: nothing else keeps it so long."""


@dataclass(frozen=True, slots=True)
class RunningCheck:
    """A check that the process makes."""

    number: int
    answer: asyncio.Future[dict[str, Any]]
    """What the process says; ServiceUnavailable if it ends before."""


class CheckClient:
    """Talks to one process until that ends. Its creator closes it."""

    def __init__(
        self,
        process: Child,
        written: asyncio.WriteTransport,
        read: asyncio.StreamReader,
        greeting: bytes,
    ) -> None:
        """Use `start`."""
        self._process = process
        self._input, self._output = written, read
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._send(greeting)
        self._closing = False
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, greeting: bytes) -> "CheckClient":
        """A process that has been told the special tokens. Raises ServiceUnavailable."""
        try:
            process = Child(
                (sys.executable, "-m", _MODULE), output=True, new_session=True, quiet=True
            )
        except OSError as error:
            raise ServiceUnavailable(
                f"no process to check grammars can be started ({error.strerror}); try again"
            ) from error
        loop, read = asyncio.get_running_loop(), asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(read), process.output)
        written, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.input)
        return cls(process, written, read, greeting)

    @property
    def usable(self) -> bool:
        """Whether it may still answer."""
        return not self._listening.done()

    def ask(self, grammar: Grammar) -> RunningCheck:
        """Have a grammar checked."""
        asked = RunningCheck(next(self._numbers), asyncio.get_running_loop().create_future())
        self._asked[asked.number] = asked.answer
        # Few ask at once, and grammars are bounded: nobody needs to wait for the pipe.
        self._send(framed({"number": asked.number, "kind": grammar.kind, "text": grammar.text}))
        return asked

    def cancel(self, asked: RunningCheck) -> None:
        """End a check that nobody waits for any more; its answer comes soon, whatever it is."""
        if not asked.answer.done():
            self._send(framed({"cancel": asked.number}))
            stuck = asyncio.get_running_loop().call_later(STUCK_S, self._process.kill)
            asked.answer.add_done_callback(lambda _: stuck.cancel())

    def _send(self, data: bytes) -> None:
        """Write, if the process is still there; `_listen` hears of it if it is not."""
        # The latter is what uvloop raises for a pipe that has no other end any more.
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._input.write(data)

    async def close(self) -> None:
        """End the process, and the checks that it makes."""
        self._closing = True
        self._process.kill()
        await self._listening

    async def _listen(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await self._output.readexactly(LENGTH.size)
                body = await self._output.readexactly(LENGTH.unpack(head)[0])
                answer = json.loads(body)
                asked = self._asked.pop(answer["number"])
                if not asked.done():
                    asked.set_result(answer)
        self._process.kill()
        self._input.close()
        code = await self._process.wait()
        if not self._closing:
            log.warning("the process that checks grammars ended with code %d", code)
        error = f"the process that checks grammars ended with code {code}; try again"
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(ServiceUnavailable(error))
                asked.exception()  # the caller may have gone, and then no one else retrieves it
