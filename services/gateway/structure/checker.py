"""Has grammars checked by a process that no grammar brings down, and remembers the answers.

Guests take turns, so that a guest that sends many bombs waits for them alone.
"""

import asyncio
import contextlib
import hashlib
import logging
import signal
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from services.common.timeouts import timeout
from services.core.fair_line import FairLine
from services.core.request import Grammar, GrammarKind
from services.gateway.structure.asked import Structure
from services.gateway.structure.check_client import CheckClient
from services.gateway.structure.check_process import framed
from services.gateway.vocabulary.errors import BadRequest, QueueFull, ServiceUnavailable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    guest: str
    called: asyncio.Future[None]


@dataclass(slots=True)
class Turn:
    """A place that a guest has."""

    work: asyncio.Future[Any] | None = None
    """What it is kept for when the guest leaves before that is done."""


class Turns:
    """So many may work at once; others wait, those of one guest in the order in which they came."""

    def __init__(self, places: int, each_max: int, waiting_max: int) -> None:
        """`each_max`: places that one guest may have; `waiting_max`: how many of one may wait."""
        self._places = places
        self._each_max = each_max
        self._inside = Counter[str]()
        self._line = FairLine[_Waiter](waiting_max)

    @property
    def taken(self) -> int:
        """Places that somebody has."""
        return self._inside.total()

    @contextlib.asynccontextmanager
    async def turn(self, guest: str) -> AsyncIterator[Turn]:
        """Have a place meanwhile, and until its `work` is done, once it is the guest's turn.

        Raises:
            QueueFull: if many of the guest wait already.
        """
        await self._enter(guest)
        turn = Turn()
        try:
            yield turn
        finally:
            if turn.work is None or turn.work.done():
                self._hand_on(guest)
            else:
                turn.work.add_done_callback(lambda _: self._hand_on(guest))

    async def _enter(self, guest: str) -> None:
        # A guest that waits while a place is free has as many as one guest may have.
        if self.taken < self._places and self._inside[guest] < self._each_max:
            self._inside[guest] += 1
            return
        waiter = _Waiter(guest, asyncio.get_running_loop().create_future())
        if not self._line.join(guest, waiter):
            raise QueueFull("many grammars of yours are being checked; try again")
        try:
            await waiter.called
        except asyncio.CancelledError:
            # A waiter that is called in the same moment has the place.
            if not self._line.leave(guest, waiter):
                self._hand_on(guest)
            raise

    def _hand_on(self, guest: str) -> None:
        self._inside[guest] -= 1
        if not self._inside[guest]:
            del self._inside[guest]
        full = [one for one, count in self._inside.items() if count >= self._each_max]
        if (waiter := self._line.next(full)) is not None:
            self._inside[waiter.guest] += 1
            # A cancelled waiter that has not run since hands the place on when it runs.
            if not waiter.called.done():
                waiter.called.set_result(None)


CHECKS_MAX = 8
"""Checks that run at once; they share what the machine has to spare."""
GUEST_CHECKS_MAX = 2
"""Checks of one guest that run at once: expensive ones do not take all places."""
WAITING_MAX = 256
"""Checks of one guest that may wait for a place."""
VERDICTS_MAX = 1024
CHECK_TIMEOUT_S = 10.0
"""Time for the wait in line, the start of a process and the check, bounded in CPU time itself."""
START_DELAY_S = 1.0
"""The process starts so long after the gateway, which is busy with its own start."""
STARTS_MAX = 3
REASON_CHARS_MAX = 200

_ANY, _NOBODY = Grammar(GrammarKind.REGEX, "a"), ""


@dataclass(frozen=True, slots=True)
class GrammarVerdict:
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
    """Owns the process; that starts a little after the gateway, or when it is needed first."""

    def __init__(self, vocab_size: int, special_tokens: Mapping[int, str]) -> None:
        """`special_tokens`: those that grammars may name, as in the model's tokenizer."""
        self._greeting = framed({"vocab_size": vocab_size, "special": special_tokens})
        self._client: CheckClient | None = None
        self._starting = asyncio.Lock()
        self._turns = Turns(CHECKS_MAX, GUEST_CHECKS_MAX, WAITING_MAX)
        self._verdicts: OrderedDict[bytes, GrammarVerdict] = OrderedDict()

    async def run(self, delay_s: float = START_DELAY_S) -> None:
        """Start the process in `delay_s`, so that no request waits for that; try a few times."""
        for _ in range(STARTS_MAX):
            await asyncio.sleep(delay_s)
            try:
                await self._verdict(_ANY, _NOBODY)
            except (QueueFull, ServiceUnavailable) as error:
                log.warning("%s", error.message)
            else:
                return

    async def check(self, structure: Structure, guest: str) -> Checked:
        """The grammar of `structure`, which `guest` wants, once it is known to be usable.

        Raises:
            BadRequest: if it is not, or costs too much.
            ServiceUnavailable: if it could not be checked now.
        """
        verdict = await self._verdict(structure.grammar, guest)
        if verdict.error is not None:
            raise BadRequest(
                f"'{structure.param}' cannot be followed: {verdict.error}; correct or simplify it",
                param=structure.param,
            )
        text = verdict.text if verdict.text is not None else structure.grammar.text
        return Checked(Grammar(structure.grammar.kind, text), verdict.ignored)

    async def close(self) -> None:
        """End the process."""
        if self._client is not None:
            await self._client.close()

    async def _verdict(self, grammar: Grammar, guest: str) -> GrammarVerdict:
        key = hashlib.sha256(f"{grammar.kind}\0{grammar.text}".encode()).digest()
        if (known := self._known(key)) is not None:
            return known
        try:
            async with timeout(CHECK_TIMEOUT_S), self._turns.turn(guest) as turn:
                # Another request may have asked the same meanwhile.
                if (known := self._known(key)) is not None:
                    return known
                verdict = await self._ask(grammar, turn)
        except TimeoutError:
            raise QueueFull("too many grammars are being checked; try again") from None
        self._verdicts[key] = verdict
        if len(self._verdicts) > VERDICTS_MAX:
            self._verdicts.popitem(last=False)
        return verdict

    def _known(self, key: bytes) -> GrammarVerdict | None:
        verdict = self._verdicts.get(key)
        if verdict is not None:
            self._verdicts.move_to_end(key)
        return verdict

    async def _ask(self, grammar: Grammar, turn: Turn) -> GrammarVerdict:
        client = await self._started()
        asked = client.ask(grammar)
        turn.work = asked.answer
        try:
            return _verdict_of(await asyncio.shield(asked.answer))
        finally:
            # A caller leaves at once; the check keeps its place until it has ended, too.
            client.cancel(asked)

    async def _started(self) -> CheckClient:
        async with self._starting:
            if self._client is None or not self._client.usable:
                self._client = await CheckClient.start(self._greeting)
            return self._client


def _verdict_of(answer: Mapping[str, Any]) -> GrammarVerdict:
    """Raises ServiceUnavailable if the check ended by what is no fault of the grammar's."""
    code = answer.get("ended")
    if code == -signal.SIGPROF:
        return GrammarVerdict("it takes too long to compile")
    if code in (-signal.SIGABRT, -signal.SIGSEGV):
        return GrammarVerdict("it takes too much memory to compile")
    if code is not None:
        raise ServiceUnavailable(f"the check of the grammar ended with code {code}; try again")
    if answer["error"] is not None:
        return GrammarVerdict(_reason(answer["error"]))
    return GrammarVerdict(None, answer["text"], tuple(map(_note, answer["ignored"])))


def _note(text: str) -> str:
    """What is ignored, in letters that fit into a header."""
    plain = _reason(text).replace('"', "'").replace("\\", "?")
    return plain.encode("ascii", "replace").decode()


def _reason(error: str) -> str:
    """The first line of an error, printable and not too long."""
    first = error.strip().split("\n", 1)[0].rstrip(" :.;")
    shown = "".join(c if c.isprintable() else " " for c in first)
    return shown if len(shown) <= REASON_CHARS_MAX else f"{shown[:REASON_CHARS_MAX]}…"
