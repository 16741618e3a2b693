"""Requests that wait, one line per model, in order of arrival."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Waiting:
    """A request in the queue.

    `stream_id` is where its answer goes. `start_tokens` of KV must be free before it can run.
    `overtaken`: how many younger ones have been assigned before it; `returns`: how many workers
    have given it back.
    """

    request_id: str
    stream_id: int
    model: str
    prompt_tokens: int
    max_tokens: int
    arrival_s: float
    start_tokens: int = 0
    overtaken: int = 0
    returns: int = 0


@dataclass(slots=True)
class WaitQueue:
    """The lines of all models, each in order of arrival; a change looks at O(log n) entries."""

    _live: dict[str, tuple[int, Waiting]] = field(default_factory=dict)
    _lines: dict[str, list[tuple[float, int, str]]] = field(default_factory=dict)
    _live_count: dict[str, int] = field(default_factory=dict)
    _start_tokens: dict[str, int] = field(default_factory=dict)
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
        return self._live_count.get(model, 0), self._start_tokens.get(model, 0)

    def of_stream(self, stream_id: int) -> list[str]:
        """Ids of the requests whose answers go to this stream."""
        return list(self._by_stream.get(stream_id, ()))

    def line(self, model: str) -> Iterator[Waiting]:
        """Who waits for `model`, the longest-waiting first; do not change the queue meanwhile."""
        return (self._live[request_id][1] for _, _, request_id in self._lines.get(model, ()))

    def head(self, model: str) -> Waiting | None:
        """The longest-waiting request for `model`, or None."""
        return next(self.line(model), None)

    def oldest_arrival_s(self) -> float | None:
        """When the longest-waiting request of all arrived, or None."""
        heads = (self.head(model) for model in self._lines)
        return min((head.arrival_s for head in heads if head is not None), default=None)

    def push(self, waiting: Waiting) -> None:
        """Add a request whose id is not in the queue."""
        assert waiting.request_id not in self._live
        number = self._next_number
        self._next_number += 1
        self._live[waiting.request_id] = (number, waiting)
        line = self._lines.setdefault(waiting.model, [])
        insort(line, (waiting.arrival_s, number, waiting.request_id))
        self._live_count[waiting.model] = self._live_count.get(waiting.model, 0) + 1
        tokens = self._start_tokens.get(waiting.model, 0)
        self._start_tokens[waiting.model] = tokens + waiting.start_tokens
        self._by_stream.setdefault(waiting.stream_id, set()).add(waiting.request_id)

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
        model = waiting.model
        line = self._lines[model]
        del line[bisect_left(line, (waiting.arrival_s, number, request_id))]
        self._live_count[model] -= 1
        self._start_tokens[model] -= waiting.start_tokens
        if not self._live_count[model]:
            del self._lines[model], self._live_count[model], self._start_tokens[model]
        return waiting

    def check_invariants(self) -> None:
        """Raise AssertionError if an index disagrees with the others."""
        counts: dict[str, int] = {}
        tokens: dict[str, int] = {}
        for request_id, (number, waiting) in self._live.items():
            counts[waiting.model] = counts.get(waiting.model, 0) + 1
            tokens[waiting.model] = tokens.get(waiting.model, 0) + waiting.start_tokens
            assert request_id == waiting.request_id
            assert request_id in self._by_stream[waiting.stream_id]
            assert (waiting.arrival_s, number, request_id) in self._lines[waiting.model]
        assert counts == self._live_count and tokens == self._start_tokens
        assert set(self._lines) == set(counts)
        assert sum(map(len, self._by_stream.values())) == len(self._live)
        for model, line in self._lines.items():
            assert len(line) == counts[model] and line == sorted(line)

    def _leave_stream(self, waiting: Waiting) -> None:
        ids = self._by_stream[waiting.stream_id]
        ids.discard(waiting.request_id)
        if not ids:
            del self._by_stream[waiting.stream_id]
