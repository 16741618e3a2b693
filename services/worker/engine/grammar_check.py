"""Compiles the grammars of requests on a separate thread, before the planner gets the requests.

llguidance releases the interpreter lock while it builds a grammar, so the engine's loop keeps
running. `sampling.grammar.PARSER_LIMITS` bounds the work. Tenants take turns (fair queueing), and
a grammar that no request waits for is not compiled. A request whose grammar compiles for longer
than `COMPILE_MAX_S` is refused as not retryable. A request whose grammar was not compiled within
`WAIT_MAX_S` of its arrival, because other grammars were, is refused as retryable.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Condition, Thread
from typing import TypeVar

from services.core.planner.events import RefuseRequest
from services.core.request import Grammar, Request
from services.core.round_robin_queue import RoundRobinQueue
from services.worker.engine.sampling.grammar import (
    GrammarRefused,
    Grammars,
    GrammarVerdict,
    Unusable,
)

COMPILE_MAX_S = 5.0
WAIT_MAX_S = 5.0
WAITING_MAX = 1_000
"""Maximum number of requests that wait for their grammars; further ones are refused, retryable."""
WAITING_PER_TENANT_MAX = WAITING_MAX // 2
"""The same per tenant, so that a single tenant cannot fill the queue."""

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request whose grammar was checked; it may run if `refusal` is None."""

    request: Request
    refusal: RefuseRequest | None = None


class _Compiler:
    """The compiler thread with its queue and its results.

    The engine's thread calls the public methods, so `now_s` must be thread-safe.
    """

    def __init__(self, grammars: Grammars, now_s: Callable[[], float]) -> None:
        self._grammars = grammars
        self._now_s = now_s
        # Guards the four attributes below; notified when the queue grows and on `close`.
        self._changed = Condition()
        self._queue = RoundRobinQueue[Grammar](WAITING_PER_TENANT_MAX)
        self._done: list[tuple[Grammar, GrammarVerdict]] = []
        self._current: tuple[Grammar, float] | None = None  # being compiled, since when
        self._closed = False
        self.reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = Thread(target=self._run, name="grammars", daemon=True)
        self._thread.start()

    def enqueue(self, tenant: str, grammar: Grammar) -> None:
        """Queue a grammar for a turn of the tenant, unless it is being compiled already."""
        with self._changed:
            # The result of a running compilation serves all tenants.
            if self._current is None or self._current[0] != grammar:
                self._queue.join(tenant, grammar)
                self._changed.notify()

    def dequeue(self, tenant: str, grammar: Grammar) -> None:
        """Remove a grammar of the tenant from the queue."""
        with self._changed:
            self._queue.leave(tenant, grammar)

    def take_done(self) -> list[tuple[Grammar, GrammarVerdict]]:
        """Return the grammars compiled since the last call, with their verdicts."""
        # Check without the lock: the loop calls this in every iteration, so a result that arrives
        # now is returned by the next call.
        if not self._done:
            return []
        with self._changed:
            os.read(self.reader, 1)
            done, self._done = self._done, []
        return done

    def overlong(self) -> Grammar | None:
        """Return the grammar being compiled if it has exceeded `COMPILE_MAX_S`, else None."""
        with self._changed:
            if self._current is None or self._now_s() - self._current[1] < COMPILE_MAX_S:
                return None
            return self._current[0]

    def close(self) -> None:
        """Stop the thread after the compilation in progress."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        os.close(self.reader)
        os.close(self._writer)

    def _run(self) -> None:
        # Loading the tokenizer holds the interpreter lock (0.3 s with 49,152 tokens). Load it now,
        # while the engine serves no request.
        with contextlib.suppress(GrammarRefused):
            self._grammars.load()
        while (grammar := self._next()) is not None:
            verdict = self._grammars.check(grammar)
            with self._changed:
                self._current = None
                # One compilation serves all tenants that queue the grammar.
                self._queue.leave_all(grammar)
                self._done.append((grammar, verdict))
                # One byte in the pipe keeps `reader` readable while there are results.
                if len(self._done) == 1:
                    os.write(self._writer, b"\0")

    def _next(self) -> Grammar | None:
        """Wait for the next grammar and mark it as being compiled; None after `close`."""
        with self._changed:
            while not self._closed:
                if (grammar := self._queue.next()) is not None:
                    self._current = (grammar, self._now_s())
                    return grammar
                self._changed.wait()
        return None


class GrammarCheck:
    """Keeps requests with a grammar until the grammar is compiled or refused.

    Only the engine's thread may call its methods.
    """

    def __init__(self, grammars: Grammars, now_s: Callable[[], float]) -> None:
        """`now_s` must be thread-safe."""
        self._grammars = grammars
        self._now_s = now_s
        self._compiler = _Compiler(grammars, now_s)
        # Waiting requests by id with their deadlines, in order of arrival.
        self._waiting: dict[str, tuple[Request, float]] = {}
        # Ids of the waiting requests by grammar; their counts by tenant and by (tenant, grammar).
        self._by_grammar: dict[Grammar, dict[str, None]] = {}
        self._waiting_by_tenant: Counter[str] = Counter()
        self._waiting_by_pair: Counter[tuple[str, Grammar]] = Counter()
        # Requests to return from the next `take`.
        self._checked: list[CheckedRequest] = []

    def __len__(self) -> int:
        """Number of requests that wait for their grammars."""
        return len(self._waiting)

    def fileno(self) -> int:
        """A descriptor that is readable while `take` has results of compilations to return."""
        return self._compiler.reader

    def submit(self, request: Request) -> None:
        """Accept a request, which `take` returns after its check (at once if it is cached)."""
        grammar, tenant = _grammar_of(request), request.service.tenant
        if (verdict := self._grammars.cached_verdict(grammar)) is not None:
            self._decide(request, verdict)
        elif (
            len(self._waiting) >= WAITING_MAX
            or self._waiting_by_tenant[tenant] >= WAITING_PER_TENANT_MAX
        ):
            self._refuse(request, "too many grammars are being compiled; retry later", True)
        else:
            self._waiting[request.request_id] = (request, self._now_s() + WAIT_MAX_S)
            self._by_grammar.setdefault(grammar, {})[request.request_id] = None
            self._waiting_by_tenant[tenant] += 1
            self._waiting_by_pair[tenant, grammar] += 1
            self._compiler.enqueue(tenant, grammar)

    def abort(self, request_id: str) -> bool:
        """Remove a request, whether waiting or checked; returns False if it is unknown."""
        kept = [checked for checked in self._checked if checked.request.request_id != request_id]
        was_checked = len(kept) < len(self._checked)
        self._checked = kept
        return self._forget(request_id) is not None or was_checked

    def take(self) -> list[CheckedRequest]:
        """Return the requests that were checked or have timed out since the last call."""
        for grammar, verdict in self._compiler.take_done():
            for request in self._forget_all(self._by_grammar.get(grammar, ())):
                self._decide(request, verdict)
        if self._waiting:
            self._expire()
        checked, self._checked = self._checked, []
        return checked

    def close(self) -> None:
        """Stop the compiler thread after the compilation in progress."""
        self._compiler.close()

    def _expire(self) -> None:
        """Refuse requests whose grammar compiles for too long or that have waited too long."""
        if (overlong := self._compiler.overlong()) is not None:
            message = f"grammar: it was not compiled within {COMPILE_MAX_S:.0f} s; simplify it"
            for request in self._forget_all(self._by_grammar.get(overlong, ())):
                self._refuse(request, message)
        now_s = self._now_s()
        late = []
        for request_id, (_, deadline_s) in self._waiting.items():
            # The order of arrival is the order of deadlines: stop at the first later deadline.
            if deadline_s > now_s:
                break
            late.append(request_id)
        for request in self._forget_all(late):
            self._refuse(request, "grammars of other requests are compiled; retry later", True)

    def _forget_all(self, request_ids: Iterable[str]) -> list[Request]:
        # Copy the ids: `_forget` removes them from the dictionary that `request_ids` may view.
        forgotten = [self._forget(request_id) for request_id in list(request_ids)]
        return [request for request in forgotten if request is not None]

    def _forget(self, request_id: str) -> Request | None:
        """Remove a request; dequeue its grammar unless another request of the tenant needs it."""
        request, _ = self._waiting.pop(request_id, (None, 0.0))
        if request is None:
            return None
        grammar, tenant = _grammar_of(request), request.service.tenant
        request_ids = self._by_grammar[grammar]
        del request_ids[request_id]
        if not request_ids:
            del self._by_grammar[grammar]
        if _decrement(self._waiting_by_pair, (tenant, grammar)):
            self._compiler.dequeue(tenant, grammar)
        _decrement(self._waiting_by_tenant, tenant)
        return request

    def _decide(self, request: Request, verdict: GrammarVerdict) -> None:
        if isinstance(verdict, Unusable):
            self._refuse(request, verdict.reason)
        else:
            self._checked.append(CheckedRequest(request))

    def _refuse(self, request: Request, reason: str, retryable: bool = False) -> None:
        refusal = RefuseRequest(request.request_id, reason, retryable)
        self._checked.append(CheckedRequest(request, refusal))


def _decrement(counts: Counter[K], key: K) -> bool:
    """Decrement a count and delete it at zero; returns whether it reached zero."""
    counts[key] -= 1
    if counts[key]:
        return False
    del counts[key]
    return True


def _grammar_of(request: Request) -> Grammar:
    grammar = request.sampling.grammar
    assert grammar is not None, "a request without a grammar needs no check"
    return grammar
