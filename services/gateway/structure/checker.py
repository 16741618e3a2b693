"""Has grammars checked by processes that any grammar may bring down, and remembers the answers.

Owners take turns, so that one who sends many bombs waits for them alone.
"""

import asyncio
import contextlib
import hashlib
import json
import signal
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.timeouts import timeout
from services.core.request import Grammar
from services.gateway.errors import InvalidRequest, QueueFull, Unavailable
from services.gateway.structure.asked import Structure
from services.gateway.structure.check_process import LENGTH, framed
from services.gateway.structure.turns import Turns

PROCESSES = 2
"""One goes on while the other is brought down."""
WAITING_MAX = 256
"""Checks of one owner that may wait for a process."""
VERDICTS_MAX = 1024
CHECK_TIMEOUT_S = 10.0
"""For waiting in line, starting a process and the check, which itself is bounded in CPU time."""
REASON_CHARS_MAX = 200

_MODULE = "services.gateway.structure.check_process"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of a grammar: why it cannot be used, or what to use in place of its text."""

    error: str | None
    text: str | None = None
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checked:
    """A grammar that workers can follow; what they take no notice of is `ignored`: ASCII."""

    grammar: Grammar
    ignored: tuple[str, ...] = ()


class GrammarChecker:
    """Owns the processes; they start when they are needed first."""

    def __init__(self, vocab_size: int, special_tokens: Mapping[int, str]) -> None:
        """`special_tokens`: those that grammars may name, as in the model's tokenizer."""
        self._greeting = framed({"vocab_size": vocab_size, "special": special_tokens})
        self._idle: list[asyncio.subprocess.Process] = []
        self._turns = Turns(PROCESSES, WAITING_MAX)
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()

    async def check(self, structure: Structure, owner: str) -> Checked:
        """The grammar of `structure`, which `owner` wants, once it is known to be usable.

        Raises:
            InvalidRequest: if it is not, or costs too much.
            Unavailable: if it could not be checked now.
        """
        verdict = await self._verdict(structure.grammar, owner)
        if verdict.error is not None:
            raise InvalidRequest(
                f"'{structure.param}' cannot be followed: {verdict.error}; correct or simplify it",
                param=structure.param,
            )
        text = verdict.text if verdict.text is not None else structure.grammar.text
        return Checked(Grammar(structure.grammar.kind, text), verdict.ignored)

    async def close(self) -> None:
        """End the processes."""
        while self._idle:
            await _kill(self._idle.pop())

    async def _verdict(self, grammar: Grammar, owner: str) -> Verdict:
        key = hashlib.sha256(f"{grammar.kind}\0{grammar.text}".encode()).digest()
        if (known := self._known(key)) is not None:
            return known
        try:
            async with timeout(CHECK_TIMEOUT_S), self._turns.turn(owner):
                # Another request may have asked the same meanwhile.
                if (known := self._known(key)) is not None:
                    return known
                verdict = await self._ask(grammar)
        except TimeoutError:
            raise QueueFull("too many grammars are being checked; try again") from None
        self._verdicts[key] = verdict
        if len(self._verdicts) > VERDICTS_MAX:
            self._verdicts.popitem(last=False)
        return verdict

    def _known(self, key: bytes) -> Verdict | None:
        verdict = self._verdicts.get(key)
        if verdict is not None:
            self._verdicts.move_to_end(key)
        return verdict

    async def _ask(self, grammar: Grammar) -> Verdict:
        process = await self._process()
        try:
            answer = await _exchange(process, {"kind": grammar.kind, "text": grammar.text})
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await _ended(process)
            # Whoever sent one may send more: the next request finds a process that has started.
            while len(self._idle) < PROCESSES:
                self._idle.append(await self._start())
            if code == -signal.SIGPROF:
                return Verdict("it takes too long to compile")
            if code in (-signal.SIGABRT, -signal.SIGSEGV):
                return Verdict("it takes too much memory to compile")
            raise Unavailable(
                f"the check of the grammar ended with code {code}; try again"
            ) from None
        except BaseException:
            await _kill(process)
            raise
        self._idle.append(process)
        return _verdict_of(answer)

    async def _process(self) -> asyncio.subprocess.Process:
        """The one that waits longest, as it has surely started, or a new one."""
        while self._idle:
            process = self._idle.pop(0)
            if process.returncode is None:
                return process
        return await self._start()

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _MODULE),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise Unavailable(
                f"no process to check grammars can be started ({error.strerror}); try again"
            ) from error
        assert process.stdin is not None
        process.stdin.write(self._greeting)
        return process


async def _exchange(
    process: asyncio.subprocess.Process, message: Mapping[str, Any]
) -> dict[str, Any]:
    """The answer to `message`."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(framed(message))
    await process.stdin.drain()
    head = await process.stdout.readexactly(LENGTH.size)
    body = await process.stdout.readexactly(LENGTH.unpack(head)[0])
    answer: dict[str, Any] = json.loads(body)
    return answer


async def _ended(process: asyncio.subprocess.Process) -> int:
    """The exit code of a process that has closed its output."""
    try:
        async with timeout(1.0):
            return await process.wait()
    except TimeoutError:
        return await _kill(process)


async def _kill(process: asyncio.subprocess.Process) -> int:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    return await process.wait()


def _verdict_of(answer: Mapping[str, Any]) -> Verdict:
    if answer["error"] is not None:
        return Verdict(_reason(answer["error"]))
    return Verdict(None, answer["text"], tuple(map(_note, answer["ignored"])))


def _note(text: str) -> str:
    """What is ignored, in letters that fit into a header."""
    plain = _reason(text).replace('"', "'").replace("\\", "?")
    return plain.encode("ascii", "replace").decode()


def _reason(error: str) -> str:
    """The first line of an error, printable and not too long."""
    first = error.strip().split("\n", 1)[0].rstrip(" :.;")
    shown = "".join(c if c.isprintable() else " " for c in first)
    return shown if len(shown) <= REASON_CHARS_MAX else f"{shown[:REASON_CHARS_MAX]}…"
