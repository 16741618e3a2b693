"""Order of waiting requests by buckets of similar length (BucketServe §IV).

Requests that are alike in length start one after another, so that they share iterations. A *plan*
sets the bounds of the buckets and the order of all waiting requests: first the bucket whose head
has waited longest, which starts as many tokens as fit into the KV memory, then the next plan is
due. The head of each bucket is its oldest request, the others follow by arrival or length. A
request is *overdue*, and goes before all buckets, once as many others have started since its
arrival as waited then, and `PATIENCE` batches more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import NamedTuple

from services.core.queue_order import QueueKey
from services.core.scheduler.bucket_bounds import (
    SAFE_SHARE,
    adaptive_bounds,
    batch_size,
    bisected_bounds,
    bucket_of,
)
from services.core.scheduler.rate import DispatchRate

CHANGES, CHANGED_SHARE = 64, 1 / 8
"""A plan is due after this number of changes, or after this share of the requests has changed."""
PADDING_SHARE = 1 / 10
"""A plan is due when the padding has grown by this share of the tokens."""
LEAST_SHARE = 1 / 32
"""Least share of the requests that changes between two plans, as each costs O(n log n)."""
PATIENCE = 4
"""Number of batches that may delay a request beyond its turn by arrival."""


class Bucketing(StrEnum):
    """How bounds of buckets are chosen: see `adaptive_bounds` and `bisected_bounds`."""

    OFF = "off"
    ON = "on"
    PAPER = "paper"


class BucketSort(StrEnum):
    """Order in a bucket: by arrival, the shortest first or the longest first."""

    FIFO = "fifo"
    SJF = "sjf"
    LJF = "ljf"


class Bucketed(NamedTuple):
    """A waiting request: arrival order, length in tokens, and number of starts when it is due.

    `order` compares rank, arrival and number of requests. `length` includes the expected output.
    `due` counts starts of the model's requests, see `BucketOrder.due`.
    """

    order: QueueKey
    length: int
    due: int


@dataclass(frozen=True, slots=True)
class BucketStats:
    """Buckets of a model: the greatest length and the number of requests of each, ascending.

    `padding_share`: share of the tokens that would be padding if requests were padded to the
    greatest length of their bucket. `arrivals_per_s` and `mean_tokens` are of the requests that
    buckets order; 0 without any.
    """

    model: str
    buckets: tuple[tuple[int, int], ...]
    padding_share: float
    arrivals_per_s: float
    mean_tokens: float


@dataclass(slots=True)
class BucketOrder:
    """Buckets of the waiting requests of a model."""

    mode: Bucketing
    order: BucketSort
    # Greatest length, position in the order of turns and number of requests of each bucket.
    _bounds: tuple[int, ...] = ()
    _positions: tuple[int, ...] = ()
    _counts: list[int] = field(default_factory=list)
    # Requests that wait and that have started, tokens of the former, with and without padding.
    _waiting: int = 0
    _started: int = 0
    _tokens: int = 0
    _padded: int = 0
    # Since the last plan: joins, starts and withdrawals; tokens that may start before the next.
    _changes: int = 0
    _turn_tokens: float = 0.0
    # Tokens that fitted into the memory at the last plan, and whether all requests did; padding.
    _safe_tokens: float = 0.0
    _fitted: bool = True
    _planned_padding: int = 0
    _arrivals: DispatchRate = field(default_factory=DispatchRate)

    @property
    def due(self) -> int:
        """The number of starts after which a request that joins now would start by arrival."""
        return self._started + self._waiting

    def place(self, length: int, arrival_s: float) -> QueueKey:
        """Sort key, within its rank, of a request that joins before the next plan."""
        position = self._positions[bucket_of(length, self._bounds)] if self._positions else 0
        return float(position), self._within(length), arrival_s

    @property
    def has_several(self) -> bool:
        """Whether there is more than one bucket."""
        return len(self._bounds) > 1

    def index_of(self, length: int) -> int:
        """Index of the bucket of a request, by the present bounds."""
        return bucket_of(length, self._bounds)

    def join(self, length: int, now_s: float) -> None:
        """Count a request that joins the queue."""
        self._arrivals.note(now_s)
        self._changes += 1
        self._count(length, 1)

    def leave(self, length: int, started: bool) -> None:
        """Count a request that leaves the queue, because it has `started` or was withdrawn."""
        self._changes += 1
        self._count(length, -1)
        if started:
            self._started += 1
            self._turn_tokens -= length

    @property
    def plan_is_due(self) -> bool:
        """Whether the order should be planned again. O(1)."""
        if not self._waiting or self._changes <= LEAST_SHARE * self._waiting:
            return False
        if self._turn_tokens <= 0 or self._changes >= max(CHANGES, CHANGED_SHARE * self._waiting):
            return True
        if self._padded - self._tokens > self._planned_padding + PADDING_SHARE * self._tokens:
            return True
        return (self._tokens <= self._safe_tokens) != self._fitted

    def plan(
        self, requests: Sequence[Bucketed], memory_tokens: int, length_max: int
    ) -> list[QueueKey]:
        """Sort keys, within their rank, of all waiting requests. O(n log n).

        `memory_tokens`: KV tokens that these requests may use; `length_max`: the longest sequence.
        """
        safe_tokens = SAFE_SHARE * memory_tokens
        by_arrival = sorted(range(len(requests)), key=lambda index: requests[index].order)
        lengths = [requests[index].length for index in by_arrival]
        ordered = sorted(lengths)
        if self.mode is Bucketing.PAPER:
            self._bounds = bisected_bounds(self._bounds, lengths, safe_tokens, length_max)
        else:
            self._bounds = adaptive_bounds(ordered, safe_tokens)
        buckets = [bucket_of(length, self._bounds) for length in lengths]
        heads = dict.fromkeys(buckets)  # in order of their oldest requests
        turns = {bucket: position for position, bucket in enumerate(heads)}
        self._positions = tuple(
            turns.get(bucket, len(turns)) for bucket in range(len(self._bounds))
        )
        overdue = self._started - PATIENCE * max(1, _mean_batch(lengths, safe_tokens))
        keys = [QueueKey()] * len(requests)
        seen = set[int]()
        for index, bucket in zip(by_arrival, buckets, strict=True):
            request, within = requests[index], -inf
            position = float(self._positions[bucket])
            if request.due < overdue:
                position = -1.0
            elif bucket in seen:
                within = self._within(request.length)
            seen.add(bucket)
            keys[index] = position, within, request.order[-1]
        self._recount(lengths)
        self._changes, self._safe_tokens, self._turn_tokens = 0, safe_tokens, safe_tokens
        self._fitted = self._tokens <= safe_tokens
        self._planned_padding = self._padded - self._tokens
        return keys

    def stats(self, model: str, now_s: float) -> BucketStats:
        """Figures of the waiting requests, for metrics."""
        return BucketStats(
            model,
            tuple(zip(self._bounds, self._counts, strict=True)),
            1 - self._tokens / self._padded if self._padded else 0.0,
            self._arrivals.per_s(now_s),
            self._tokens / self._waiting if self._waiting else 0.0,
        )

    def check_invariants(self, lengths: Sequence[int]) -> None:
        """Raise AssertionError if the counts differ from those of `lengths`, in any order."""
        counts, tokens, padded = list(self._counts), self._tokens, self._padded
        assert self._waiting == len(lengths)
        self._recount(lengths)
        assert (counts, tokens, padded) == (self._counts, self._tokens, self._padded)
        assert len(self._bounds) == len(self._counts) == len(self._positions)

    def _within(self, length: int) -> float:
        match self.order:
            case BucketSort.FIFO:
                return 0.0
            case BucketSort.SJF:
                return float(length)
            case BucketSort.LJF:
                return -float(length)

    def _recount(self, lengths: Sequence[int]) -> None:
        self._counts = [0] * len(self._bounds)
        self._waiting = self._tokens = self._padded = 0
        for length in lengths:
            self._count(length, 1)

    def _count(self, length: int, change: int) -> None:
        self._waiting += change
        self._tokens += change * length
        if self._bounds:
            bucket = bucket_of(length, self._bounds)
            self._counts[bucket] += change
            # A request above the last bound pads others, by about as much.
            length = abs(self._bounds[bucket] - length) + length
        self._padded += change * length


def _mean_batch(lengths: Sequence[int], safe_tokens: float) -> int:
    """Number of requests of mean length that fit into `safe_tokens`."""
    mean = sum(lengths) / len(lengths) if lengths else 1.0
    return batch_size([round(mean)] * len(lengths), safe_tokens)
