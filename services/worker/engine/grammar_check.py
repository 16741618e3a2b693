"""Compiles grammars before their requests reach the planner, on a thread of its own.

Building a grammar lets go of the interpreter, so that the engine's loop goes on meanwhile. What it
takes is bounded by `grammar.PARSER_LIMITS`; a request whose grammar is not ready `TIMEOUT_S` after
it came is refused, however long others before it took. The first thing that the thread does is to
load the tokenizer: that holds the interpreter (0.3 s with 49,152 tokens), and nobody is served yet.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread

from services.core.iteration.events import RefuseRequest
from services.core.request import Grammar, Request
from services.worker.engine.sampling.grammar import GrammarRefused, Grammars

TIMEOUT_S = 5.0
CHECKING_MAX = 1_000
"""Requests whose grammars are being compiled; more are refused for now."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A request that may run, or why not."""

    request: Request
    refusal: RefuseRequest | None = None


class GrammarCheck:
    """Between those who ask and the planner; all methods are the engine's thread's."""

    def __init__(self, grammars: Grammars, now_s: Callable[[], float]) -> None:
        self._grammars = grammars
        self._now_s = now_s
        self._wanted: SimpleQueue[Grammar | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[Grammar, str]] = SimpleQueue()
        # By id, with their deadlines, in the order in which they came.
        self._waiting: dict[str, tuple[Request, float]] = {}
        self._checked: list[Checked] = []
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = Thread(target=self._run, name="grammars", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Requests whose grammars are being compiled."""
        return len(self._waiting)

    def fileno(self) -> int:
        """Readable when something has been compiled."""
        return self._reader

    def submit(self, request: Request) -> None:
        """Take a request with a grammar in; `take` gives it out, at once if that is known."""
        grammar = request.sampling.grammar
        assert grammar is not None
        if self._grammars.knows(grammar):
            self._give_out(request, self._grammars.refusal(grammar))
        elif len(self._waiting) >= CHECKING_MAX:
            message = "too many grammars are being compiled; retry later"
            refusal = RefuseRequest(request.request_id, message, retryable=True)
            self._checked.append(Checked(request, refusal))
        else:
            self._waiting[request.request_id] = (request, self._now_s() + TIMEOUT_S)
            self._wanted.put(grammar)

    def abort(self, request_id: str) -> bool:
        """Forget a request; False if it does not wait here."""
        return self._waiting.pop(request_id, None) is not None

    def take(self) -> list[Checked]:
        """What has been checked since the last call, or waits too long by now."""
        if self._waiting:
            self._take_done()
            self._expire()
        checked, self._checked = self._checked, []
        return checked

    def close(self) -> None:
        """End the thread, once it is through with what it does now."""
        self._wanted.put(None)
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _take_done(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, CHECKING_MAX)
        with contextlib.suppress(Empty):
            while True:
                grammar, refusal = self._done.get_nowait()
                alike = [
                    request
                    for request, _ in self._waiting.values()
                    if request.sampling.grammar == grammar
                ]
                for request in alike:
                    del self._waiting[request.request_id]
                    self._give_out(request, refusal)

    def _expire(self) -> None:
        now_s = self._now_s()
        for request, deadline_s in list(self._waiting.values()):
            if deadline_s > now_s:
                break
            del self._waiting[request.request_id]
            message = f"grammar: it was not compiled within {TIMEOUT_S:.0f} s; simplify it"
            self._give_out(request, message)

    def _give_out(self, request: Request, refusal: str) -> None:
        refused = RefuseRequest(request.request_id, refusal) if refusal else None
        self._checked.append(Checked(request, refused))

    def _run(self) -> None:
        with contextlib.suppress(GrammarRefused):
            self._grammars.load()
        while (grammar := self._wanted.get()) is not None:
            self._done.put((grammar, self._grammars.refusal(grammar)))
            with contextlib.suppress(BlockingIOError):
                os.write(self._writer, b"\0")
