"""Requests that move between two workers, at the new one.

The engine reports that it has adopted a request. The gateway attaches to read on. Either may come
first, and either may never come. Pure: time is an argument.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.core.logprobs import LogprobRows
from services.core.planner.events import EmitToken, RefuseRequest
from services.core.request import FinishReason
from services.worker.ipc import AdoptedRequest, MovedRequest, RequestTimes

ATTACH_TIMEOUT_S = 10.0
# Gateways that may wait for a request, and aborts that are remembered.
EXPECTED_MAX = 100_000
ABORTED_MAX = 10_000

R = TypeVar("R")
V = TypeVar("V")
Ending = FinishReason | RefuseRequest | MovedRequest


@dataclass(slots=True)
class UnreadOutput:
    """An adopted request without a reader: all its output, and how it ended here if it has.

    `times` come with the ending, where they are known. `logprobs` are the rows of the last
    tokens, and `prompt_logprobs` those that go with the first, if they were asked for, as does the
    number of `cached_tokens`.
    """

    token_ids: list[int]
    expires_s: float
    ending: Ending | None = None
    times: RequestTimes | None = None
    logprobs: list[LogprobRows] = field(default_factory=list)
    prompt_logprobs: LogprobRows | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WaitingReader(Generic[R]):
    """A reader that waits for a request, for its tokens from `from_index` on.

    It was sent here for the configuration of `group_id` at `epoch`. `coalesced`: it wants its
    tokens gathered.
    """

    request_id: str
    group_id: str
    epoch: int
    from_index: int
    reader: R
    expires_s: float
    coalesced: bool = False


@dataclass(slots=True)
class Handovers(Generic[R]):
    """Adopted requests without a reader, readers without a request, aborts without either.

    Each is kept for `timeout_s` and then dropped. A request is in at most one of the three.
    """

    timeout_s: float = ATTACH_TIMEOUT_S
    # All three are in the order in which they expire.
    _arrived: dict[str, UnreadOutput] = field(default_factory=dict)
    _expected: dict[str, WaitingReader[R]] = field(default_factory=dict)
    _aborted: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many requests have come or are waited for."""
        return len(self._arrived) + len(self._expected)

    @property
    def arrived_ids(self) -> list[str]:
        """Adopted requests without a reader."""
        return list(self._arrived)

    def adopt(self, adopted: AdoptedRequest, now_s: float) -> bool:
        """Keep a request until it is read; False, and nothing is kept, if it was aborted before.

        One that comes back replaces what was kept of it.
        """
        if self._aborted.pop(adopted.request_id, None) is not None:
            return False
        self._arrived.pop(adopted.request_id, None)
        self._arrived[adopted.request_id] = UnreadOutput(
            list(adopted.emitted_ids),
            now_s + self.timeout_s,
            logprobs=[adopted.logprobs] if adopted.logprobs is not None else [],
            prompt_logprobs=adopted.prompt_logprobs,
            cached_tokens=adopted.cached_tokens,
        )
        return True

    def expect(self, expected: WaitingReader[R]) -> bool:
        """Have a reader wait; False if the request was dropped before, or too many wait.

        A later reader of the same request replaces an earlier one. The rest of an
        earlier stay of the request here is dropped: a move of epoch e or an older one must not
        send away a reader that comes for epoch e.
        """
        self._expected.pop(expected.request_id, None)
        if expected.request_id in self._aborted or len(self._expected) >= EXPECTED_MAX:
            return False
        arrival = self._arrived.get(expected.request_id)
        ending = arrival.ending if arrival is not None else None
        if isinstance(ending, MovedRequest) and ending.epoch <= expected.epoch:
            del self._arrived[expected.request_id]
        self._expected[expected.request_id] = expected
        return True

    def match(self, request_id: str) -> tuple[UnreadOutput, WaitingReader[R]] | None:
        """The request and its reader, which are then forgotten; None while one is missing."""
        if request_id not in self._arrived or request_id not in self._expected:
            return None
        return self._arrived.pop(request_id), self._expected.pop(request_id)

    def add_token(self, token: EmitToken, times: RequestTimes | None = None) -> None:
        """Keep a token of an adopted request; no effect for others. `times`: if it is the last."""
        arrival = self._arrived.get(token.request_id)
        if arrival is not None and arrival.ending is None:
            # Anything else is a defect of the engine; its gap then shows at the gateway.
            if token.index == len(arrival.token_ids):
                arrival.token_ids.append(token.token_id)
                if token.logprobs is not None:
                    arrival.logprobs.append(token.logprobs)
                if token.prompt_logprobs is not None:
                    arrival.prompt_logprobs = token.prompt_logprobs
            arrival.ending = token.finish_reason
            arrival.times = times

    def end(self, ending: RefuseRequest | MovedRequest, times: RequestTimes | None = None) -> bool:
        """Note that an adopted request has ended here; False if it is none."""
        arrival = self._arrived.get(ending.request_id)
        if arrival is None:
            return False
        if arrival.ending is None:
            arrival.ending = ending
            arrival.times = times
        return True

    def abort(self, request_id: str, now_s: float) -> UnreadOutput | None:
        """Forget a request and return it; if it has not come, remember that it was aborted."""
        arrival = self.forget(request_id)
        if arrival is None:
            self._remember(request_id, now_s)
        return arrival

    def forget(self, request_id: str) -> UnreadOutput | None:
        """Forget all about an id; returns the request if it had come."""
        self._expected.pop(request_id, None)
        self._aborted.pop(request_id, None)
        return self._arrived.pop(request_id, None)

    def expected_by(self, reader: R) -> list[str]:
        """The requests that `reader` waits for."""
        return [e.request_id for e in self._expected.values() if e.reader is reader]

    def clear(self) -> list[WaitingReader[R]]:
        """Forget everything; returns the readers that waited."""
        waiting = list(self._expected.values())
        for kept in (self._arrived, self._expected, self._aborted):
            kept.clear()
        return waiting

    def expire(self, now_s: float) -> tuple[list[str], list[WaitingReader[R]]]:
        """Drop what is overdue: requests that the engine must abort, and readers."""
        overdue = _take_while(self._arrived, lambda arrival: arrival.expires_s <= now_s)
        running = [request_id for request_id, a in overdue.items() if a.ending is None]
        for request_id in running:
            self._remember(request_id, now_s)
        timed_out = _take_while(self._expected, lambda expected: expected.expires_s <= now_s)
        _take_while(self._aborted, lambda expires_s: expires_s <= now_s)
        return running, list(timed_out.values())

    def _remember(self, request_id: str, now_s: float) -> None:
        """Remember that a request was aborted."""
        if len(self._aborted) >= ABORTED_MAX:
            del self._aborted[next(iter(self._aborted))]
        self._aborted[request_id] = now_s + self.timeout_s

    def check_invariants(self) -> None:
        """Raise AssertionError if the parts contradict each other; call it after `match`."""
        kept = [set(self._arrived), set(self._expected), set(self._aborted)]
        assert sum(map(len, kept)) == len(set.union(*kept))
        assert len(self._expected) <= EXPECTED_MAX and len(self._aborted) <= ABORTED_MAX
        for deadlines in (
            [arrival.expires_s for arrival in self._arrived.values()],
            [expected.expires_s for expected in self._expected.values()],
            list(self._aborted.values()),
        ):
            assert deadlines == sorted(deadlines)


def _take_while(entries: dict[str, V], overdue: Callable[[V], bool]) -> dict[str, V]:
    """Remove and return the entries at the front for which `overdue` holds."""
    taken: dict[str, V] = {}
    while entries and overdue(entries[first := next(iter(entries))]):
        taken[first] = entries.pop(first)
    return taken
