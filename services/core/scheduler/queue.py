"""Requests that wait: a line for each model, in the order that a policy gives.

Requests that have run go before all others, and have no deadline here.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from services.core.line_order import LineKey, LineOrder, by_arrival
from services.core.scheduler.dispatch import NOBODY
from services.core.scheduler.vocabulary import Asked


@dataclass(slots=True)
class Waiting:
    """A request in the queue.

    `stream_id` is where its answer goes: that of the latest ask. `start_tokens` of KV must be free
    before it can run. `overtaken` counts requests behind it in the line that were assigned before
    it; `returns` counts workers that have given it back. One that is `placed` was assigned before:
    by a return, a change of groups or the loss of a worker, it is here again. Until `alone_until_s`
    it may start only where nothing else runs.
    """

    ask: Asked
    stream_id: int
    arrival_s: float
    start_tokens: int = 0
    overtaken: int = 0
    returns: int = 0
    placed: bool = False
    alone_until_s: float = -inf

    def avoided(self, now_s: float) -> frozenset[str]:
        """Addresses of workers that its gateway does not want now."""
        if not self.ask.avoided or now_s >= self.ask.now_s + self.ask.avoided_s:
            return NOBODY
        return frozenset(self.ask.avoided)


@dataclass(slots=True)
class _Line:
    """The requests of one model. Entries end in a number, by which equals keep their order."""

    by_key: list[tuple[LineKey, int, str]] = field(default_factory=list)
    by_arrival: list[tuple[float, int, str]] = field(default_factory=list)  # resumed ones last
    start_tokens: int = 0


@dataclass(slots=True)
class WaitQueue:
    """The lines of all models; a change looks at O(log n) entries."""

    order: LineOrder = by_arrival
    _live: dict[str, tuple[int, Waiting]] = field(default_factory=dict)
    _lines: dict[str, _Line] = field(default_factory=dict)
    _by_stream: dict[int, set[str]] = field(default_factory=dict)
    _next_number: int = 0

    def __len__(self) -> int:
        return len(self._live)

    def get(self, request_id: str) -> Waiting | None:
        """The waiting request of this id, or None."""
        found = self._live.get(request_id)
        return found[1] if found is not None else None

    def models(self) -> list[str]:
        """Models with waiting requests."""
        return list(self._lines)

    def wanted(self, model: str) -> tuple[int, int]:
        """How many requests wait for `model`, and the KV in tokens that they need to start."""
        line = self._lines.get(model)
        return (len(line.by_key), line.start_tokens) if line is not None else (0, 0)

    def of_stream(self, stream_id: int) -> list[str]:
        """Ids of the requests whose answers go to this stream."""
        return list(self._by_stream.get(stream_id, ()))

    def line(self, model: str) -> Iterator[Waiting]:
        """The requests for `model` in order; do not change the queue while you iterate."""
        line = self._lines.get(model)
        return (self._live[entry[-1]][1] for entry in (line.by_key if line is not None else ()))

    def head(self, model: str) -> Waiting | None:
        """The first request in the line of `model`, or None."""
        return next(self.line(model), None)

    def oldest(self, model: str) -> Waiting | None:
        """The longest-waiting request for `model` that can expire, wherever it stands, or None."""
        line = self._lines.get(model)
        found = self._live[line.by_arrival[0][-1]][1] if line is not None else None
        return None if found is None or found.ask.resumed else found

    def oldest_arrival_s(self) -> float | None:
        """When the longest-waiting request of all that can expire arrived, or None."""
        oldest = [waiting for model in self._lines if (waiting := self.oldest(model)) is not None]
        return min((waiting.arrival_s for waiting in oldest), default=None)

    def push(self, waiting: Waiting) -> None:
        """Add a request whose id is not in the queue."""
        ask, number = waiting.ask, self._next_number
        assert ask.request_id not in self._live
        self._next_number += 1
        self._live[ask.request_id] = (number, waiting)
        line = self._lines.setdefault(ask.model, _Line())
        insort(line.by_key, (self._key(waiting), number, ask.request_id))
        insort(line.by_arrival, (_expires_in_order(waiting), number, ask.request_id))
        line.start_tokens += waiting.start_tokens
        self._by_stream.setdefault(waiting.stream_id, set()).add(ask.request_id)

    def move(self, request_id: str, stream_id: int) -> None:
        """Send the answer to another stream."""
        _, waiting = self._live[request_id]
        self._leave_stream(waiting)
        waiting.stream_id = stream_id
        self._by_stream.setdefault(stream_id, set()).add(request_id)

    def remove(self, request_id: str) -> Waiting:
        """Take a request out, wherever it stands."""
        number, waiting = self._live.pop(request_id)
        self._leave_stream(waiting)
        model = waiting.ask.model
        line = self._lines[model]
        del line.by_key[bisect_left(line.by_key, (self._key(waiting), number, request_id))]
        expiry = (_expires_in_order(waiting), number, request_id)
        del line.by_arrival[bisect_left(line.by_arrival, expiry)]
        line.start_tokens -= waiting.start_tokens
        if not line.by_key:
            del self._lines[model]
        return waiting

    def check_invariants(self) -> None:
        """Raise AssertionError if an index disagrees with the others."""
        tokens = dict.fromkeys(self._lines, 0)
        for request_id, (number, waiting) in self._live.items():
            line = self._lines[waiting.ask.model]
            tokens[waiting.ask.model] += waiting.start_tokens
            assert request_id == waiting.ask.request_id
            assert request_id in self._by_stream[waiting.stream_id]
            assert (self._key(waiting), number, request_id) in line.by_key
            assert (_expires_in_order(waiting), number, request_id) in line.by_arrival
        assert sum(len(line.by_key) for line in self._lines.values()) == len(self._live)
        assert sum(map(len, self._by_stream.values())) == len(self._live)
        for model, line in self._lines.items():
            assert line.by_key and len(line.by_key) == len(line.by_arrival)
            assert line.by_key == sorted(line.by_key)
            assert line.by_arrival == sorted(line.by_arrival)
            assert line.start_tokens == tokens[model]

    def _key(self, waiting: Waiting) -> LineKey:
        return not waiting.ask.resumed, *self.order(waiting.ask.service, waiting.arrival_s)

    def _leave_stream(self, waiting: Waiting) -> None:
        ids = self._by_stream[waiting.stream_id]
        ids.discard(waiting.ask.request_id)
        if not ids:
            del self._by_stream[waiting.stream_id]


def _expires_in_order(waiting: Waiting) -> float:
    """Smaller expires earlier; a request that has run does not expire."""
    return inf if waiting.ask.resumed else waiting.arrival_s
