"""Checks grammars in a separate process, and caches the verdicts.

Clients share the process fairly: a client that sends many expensive grammars delays only its own
requests. A client is a `limit_key`: the owner of the API key, else an address.
"""

import asyncio
import hashlib
import json
import logging
import signal
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from services.common.messages import encode_message
from services.common.timeouts import timeout
from services.core.request import Grammar, GrammarKind
from services.gateway.structure.check_client import CheckClient
from services.gateway.structure.fair_semaphore import FairSemaphore, Slot
from services.gateway.structure.structured_outputs import Structure
from services.gateway.vocabulary.errors import BadRequest, QueueFull, ServiceUnavailable

log = logging.getLogger(__name__)


CHECKS_MAX = 8
"""Maximum concurrent checks; they run at low priority."""
CLIENT_CHECKS_MAX = 2
"""Maximum concurrent checks of a client, so that expensive grammars cannot take all slots."""
WAITING_MAX = 256
"""Maximum waiting checks of a client."""
VERDICTS_MAX = 1024
"""Maximum checks whose verdicts are cached; the least recently used is evicted."""
CHECK_TIMEOUT_S = 10.0
"""Time limit for queueing, process start and check together; the CPU time has its own limit."""
START_DELAY_S = 1.0
"""Delay of the process's start, so that it does not slow the start of the gateway."""
STARTS_MAX = 3
REASON_CHARS_MAX = 200

_ANY_GRAMMAR, _NO_CLIENT = Grammar(GrammarKind.REGEX, "a"), ""


@dataclass(frozen=True, slots=True)
class GrammarVerdict:
    """Result of a check.

    `error`: why the grammar cannot be used. Without an error, `text`, if set, replaces the
    grammar's text, and `ignored` are warnings about keywords that are not enforced.
    """

    error: str | None
    text: str | None = None
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckedGrammar:
    """A grammar that workers can enforce; `ignored`: ASCII warnings about unenforced keywords."""

    grammar: Grammar
    ignored: tuple[str, ...] = ()


class GrammarChecker:
    """Owns the check process. `run` starts it after a delay, an earlier check starts it at once."""

    def __init__(self, vocab_size: int, special_tokens: Mapping[int, str]) -> None:
        """`special_tokens`: the model's special tokens, which grammars may name, by id."""
        self._setup_message = encode_message({"vocab_size": vocab_size, "special": special_tokens})
        self._client: CheckClient | None = None
        self._starting = asyncio.Lock()
        self._semaphore = FairSemaphore(
            CHECKS_MAX, CLIENT_CHECKS_MAX, WAITING_MAX, "grammars are being checked"
        )
        self._verdicts: OrderedDict[bytes, Sequence[GrammarVerdict]] = OrderedDict()

    async def run(self, delay_s: float = START_DELAY_S) -> None:
        """Start the process after `delay_s`, ahead of the first request; retry a few times."""
        for _ in range(STARTS_MAX):
            await asyncio.sleep(delay_s)
            try:
                await self._checked([_ANY_GRAMMAR], _NO_CLIENT)
            except (QueueFull, ServiceUnavailable) as error:
                log.warning("%s", error.message)
            else:
                return

    async def check(self, structure: Structure, limit_key: str) -> CheckedGrammar:
        """Check a single grammar; see `check_all`."""
        (checked,) = await self.check_all([structure], limit_key)
        return checked

    async def check_all(
        self, structures: Sequence[Structure], limit_key: str
    ) -> list[CheckedGrammar]:
        """Check grammars together for the client `limit_key`; return them if all are usable.

        Raises:
            BadRequest: if a grammar is invalid or too expensive.
            QueueFull: if too many checks wait, or the check is not done within `CHECK_TIMEOUT_S`.
            ServiceUnavailable: if the check process cannot be started or fails.
        """
        grammars = [structure.grammar for structure in structures]
        verdicts = await self._checked(grammars, limit_key)
        # A check that ended early has fewer verdicts, of which the last is an error.
        return list(map(_usable, structures, verdicts))

    async def close(self) -> None:
        """End the process."""
        if self._client is not None:
            await self._client.close()

    async def _checked(
        self, grammars: Sequence[Grammar], limit_key: str
    ) -> Sequence[GrammarVerdict]:
        key = hashlib.sha256(json.dumps(list(map(astuple, grammars))).encode()).digest()
        if (cached := self._cached(key)) is not None:
            return cached
        try:
            async with timeout(CHECK_TIMEOUT_S), self._semaphore.slot(limit_key) as slot:
                # The same grammar may have been checked while this request waited.
                if (cached := self._cached(key)) is not None:
                    return cached
                verdicts = await self._run_check(grammars, slot)
        except TimeoutError:
            raise QueueFull("too many grammars are being checked; try again") from None
        self._verdicts[key] = verdicts
        if len(self._verdicts) > VERDICTS_MAX:
            self._verdicts.popitem(last=False)
        return verdicts

    def _cached(self, key: bytes) -> Sequence[GrammarVerdict] | None:
        verdicts = self._verdicts.get(key)
        if verdicts is not None:
            self._verdicts.move_to_end(key)
        return verdicts

    async def _run_check(self, grammars: Sequence[Grammar], slot: Slot) -> list[GrammarVerdict]:
        client = await self._running_client()
        check = client.submit(grammars)
        slot.work = check.result
        try:
            result = await asyncio.shield(check.result)
            verdicts = list(map(_verdict_of, result["results"]))
            # The check ended within the next grammar, which is refused; the rest is unchecked.
            if (code := result.get("ended")) is not None:
                verdicts.append(_verdict_of_end(code))
            return verdicts
        finally:
            # A cancelled caller returns at once; its slot is held until the check ends.
            client.cancel(check)

    async def _running_client(self) -> CheckClient:
        async with self._starting:
            if self._client is None or not self._client.usable:
                self._client = await CheckClient.start(self._setup_message)
            return self._client


def _usable(structure: Structure, verdict: GrammarVerdict) -> CheckedGrammar:
    """The grammar to enforce; raises BadRequest if it cannot be used."""
    subject = f"{structure.subject}, " if structure.subject else ""
    if verdict.error is not None:
        raise BadRequest(
            f"'{structure.param}' cannot be enforced: {subject}{verdict.error}; correct or"
            " simplify it",
            param=structure.param,
        )
    text = verdict.text if verdict.text is not None else structure.grammar.text
    ignored = tuple(subject + part for part in verdict.ignored)
    return CheckedGrammar(Grammar(structure.grammar.kind, text), ignored)


def _verdict_of(result: Mapping[str, Any]) -> GrammarVerdict:
    if result["error"] is not None:
        return GrammarVerdict(_reason(result["error"]))
    return GrammarVerdict(None, result["text"], tuple(map(_header_text, result["ignored"])))


def _verdict_of_end(code: int) -> GrammarVerdict:
    """The verdict of a grammar in whose check the fork ended with `code`.

    Raises:
        ServiceUnavailable: if the fork died at no limit.
    """
    if code == -signal.SIGPROF:
        return GrammarVerdict("it takes too long to compile")
    if code == -signal.SIGXCPU:
        return GrammarVerdict("it takes too long to compile together with those before it")
    if code in (-signal.SIGABRT, -signal.SIGSEGV):
        return GrammarVerdict("it takes too much memory to compile")
    raise ServiceUnavailable(f"the check of the grammar ended with code {code}; try again")


def _header_text(text: str) -> str:
    """Reduce a warning to characters that are valid in an HTTP header."""
    return _reason(text).encode("ascii", "replace").decode()


def _reason(error: str) -> str:
    """First line of an error, printable, at most `REASON_CHARS_MAX` characters."""
    first = error.strip().split("\n", 1)[0].rstrip(" :.;")
    printable = "".join(c if c.isprintable() else " " for c in first)
    return printable if len(printable) <= REASON_CHARS_MAX else f"{printable[:REASON_CHARS_MAX]}…"
