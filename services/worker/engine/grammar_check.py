"""Compiles grammars before their requests reach the planner, on a thread of its own.

Building a grammar lets go of the interpreter, so that the engine's loop goes on meanwhile. What it
takes is bounded by `grammar.PARSER_LIMITS`. Owners take turns, and a grammar that nobody waits for
any more is not compiled. A request whose grammar takes longer than `COMPILE_MAX_S` to compile is
refused for good; one that has waited for others longer than `WAIT_MAX_S` may come again. The first
thing that the thread does is to load the tokenizer: that holds the interpreter (0.3 s with 49,152
tokens), and nobody is served yet.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Condition, Thread
from typing import TypeVar

from services.core.fair_line import FairLine
from services.core.planner.events import RefuseRequest
from services.core.request import Grammar, Request
from services.worker.engine.sampling.grammar import GrammarRefused, Grammars

COMPILE_MAX_S = 5.0
WAIT_MAX_S = 5.0
CHECKING_MAX = 1_000
"""Requests whose grammars are being compiled; more are refused for now."""
OWNED_MAX = CHECKING_MAX // 2
"""Of these, requests of one owner."""

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Checked:
    """A request that may run, or why not."""

    request: Request
    refusal: RefuseRequest | None = None


@dataclass(frozen=True, slots=True)
class _Done:
    """`refusal`: why a grammar cannot be used, "" if it can."""

    grammar: Grammar
    refusal: str


class _Compiler:
    """The thread, and what it is told and tells; its methods are those of other threads.

    `now_s` is asked by both threads.
    """

    def __init__(self, grammars: Grammars, now_s: Callable[[], float]) -> None:
        self._grammars = grammars
        self._now_s = now_s
        self._changed = Condition()
        # Guards all below.
        self._line = FairLine[Grammar](OWNED_MAX)
        self._done: list[_Done] = []
        self._current: tuple[Grammar, float] | None = None
        self._closed = False
        self.reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = Thread(target=self._run, name="grammars", daemon=True)
        self._thread.start()

    def want(self, owner: str, grammar: Grammar) -> None:
        """Have a grammar compiled when it is the owner's turn."""
        with self._changed:
            if self._current is None or self._current[0] != grammar:
                self._line.join(owner, grammar)
                self._changed.notify()

    def drop(self, owner: str, grammar: Grammar) -> None:
        """The owner does not wait for it any more."""
        with self._changed:
            self._line.leave(owner, grammar)

    def take_done(self) -> list[_Done]:
        """What has been compiled since the last call."""
        if not self._done:
            return []
        with self._changed:
            os.read(self.reader, 1)
            done, self._done = self._done, []
        return done

    def overlong(self) -> Grammar | None:
        """The grammar that has been compiled for too long."""
        with self._changed:
            if self._current is None or self._now_s() - self._current[1] < COMPILE_MAX_S:
                return None
            return self._current[0]

    def close(self) -> None:
        """End the thread, once it is through with what it does now."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        os.close(self.reader)
        os.close(self._writer)

    def _run(self) -> None:
        with contextlib.suppress(GrammarRefused):
            self._grammars.load()
        while (grammar := self._next()) is not None:
            done = _Done(grammar, self._grammars.refusal(grammar))
            with self._changed:
                self._current = None
                # Whoever else wants it has it now, though the engine has not taken note yet.
                self._line.leave_all(grammar)
                self._done.append(done)
                # Readable as long as there is something to take.
                if len(self._done) == 1:
                    os.write(self._writer, b"\0")

    def _next(self) -> Grammar | None:
        """The next grammar, whose time begins; None at the end."""
        with self._changed:
            while not self._closed:
                if (grammar := self._line.next()) is not None:
                    self._current = (grammar, self._now_s())
                    return grammar
                self._changed.wait()
        return None


class GrammarCheck:
    """Between those who ask and the planner; all methods are the engine's thread's."""

    def __init__(self, grammars: Grammars, now_s: Callable[[], float]) -> None:
        """`now_s` may be asked by any thread."""
        self._grammars = grammars
        self._now_s = now_s
        self._compiler = _Compiler(grammars, now_s)
        # By id, with their deadlines, in the order in which they came.
        self._waiting: dict[str, tuple[Request, float]] = {}
        # The same requests: ids by grammar; how many of each owner, and of these for a grammar.
        self._by_grammar: dict[Grammar, dict[str, None]] = {}
        self._owned: Counter[str] = Counter()
        self._wanting: Counter[tuple[str, Grammar]] = Counter()
        self._checked: list[Checked] = []

    def __len__(self) -> int:
        """Requests whose grammars are being compiled."""
        return len(self._waiting)

    def fileno(self) -> int:
        """Readable when something has been compiled."""
        return self._compiler.reader

    def submit(self, request: Request) -> None:
        """Take a request with a grammar in; `take` gives it out, at once if that is known."""
        grammar, owner = _grammar_of(request), request.service.tenant
        if (refusal := self._grammars.verdict(grammar)) is not None:
            self._give_out(request, refusal)
        elif len(self._waiting) >= CHECKING_MAX or self._owned[owner] >= OWNED_MAX:
            self._give_out(request, "too many grammars are being compiled; retry later", True)
        else:
            self._waiting[request.request_id] = (request, self._now_s() + WAIT_MAX_S)
            self._by_grammar.setdefault(grammar, {})[request.request_id] = None
            self._owned[owner] += 1
            self._wanting[owner, grammar] += 1
            self._compiler.want(owner, grammar)

    def abort(self, request_id: str) -> bool:
        """Forget a request; False if it does not wait here."""
        return self._forget(request_id) is not None

    def take(self) -> list[Checked]:
        """What has been checked since the last call, or waits too long by now."""
        for done in self._compiler.take_done():
            for request in self._forget_all(self._by_grammar.get(done.grammar, ())):
                self._give_out(request, done.refusal)
        if self._waiting:
            self._expire()
        checked, self._checked = self._checked, []
        return checked

    def close(self) -> None:
        """End the thread, once it is through with what it does now."""
        self._compiler.close()

    def _expire(self) -> None:
        """Refuse those whose own grammar takes too long, and those that wait too long for it."""
        if (overlong := self._compiler.overlong()) is not None:
            message = f"grammar: it was not compiled within {COMPILE_MAX_S:.0f} s; simplify it"
            for request in self._forget_all(self._by_grammar.get(overlong, ())):
                self._give_out(request, message)
        now_s = self._now_s()
        late = []
        for request_id, (_, deadline_s) in self._waiting.items():
            if deadline_s > now_s:
                break
            late.append(request_id)
        for request in self._forget_all(late):
            self._give_out(request, "grammars of other requests are compiled; retry later", True)

    def _forget_all(self, request_ids: Iterable[str]) -> list[Request]:
        found = [self._forget(request_id) for request_id in list(request_ids)]
        return [request for request in found if request is not None]

    def _forget(self, request_id: str) -> Request | None:
        """Take a request out, and its grammar if none of its owner's waits for that."""
        request, _ = self._waiting.pop(request_id, (None, 0.0))
        if request is None:
            return None
        grammar, owner = _grammar_of(request), request.service.tenant
        alike = self._by_grammar[grammar]
        del alike[request_id]
        if not alike:
            del self._by_grammar[grammar]
        if _one_less(self._wanting, (owner, grammar)):
            self._compiler.drop(owner, grammar)
        _one_less(self._owned, owner)
        return request

    def _give_out(self, request: Request, refusal: str, retryable: bool = False) -> None:
        refused = RefuseRequest(request.request_id, refusal, retryable) if refusal else None
        self._checked.append(Checked(request, refused))


def _one_less(counts: Counter[K], key: K) -> bool:
    """Count down; True if none is left."""
    counts[key] -= 1
    if counts[key]:
        return False
    del counts[key]
    return True


def _grammar_of(request: Request) -> Grammar:
    grammar = request.sampling.grammar
    assert grammar is not None, "others need no check"
    return grammar
