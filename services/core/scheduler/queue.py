"""The scheduler's waiting requests: a queue per model, ordered by the scheduling policy.

Resumed requests, which have run on a lost worker and sent output, go before other requests and
have no deadline here. If the policy uses service classes, all online requests (interactive and
standard) go before batch requests, and in each of the two parts resumed requests go first. Within a
band of equal priority, tenants (owners of API keys) are served fairly; see `fair_queue`. Online
requests that are late, because they have not started in time for their target, stand behind those
that are not.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from math import inf

from services.core.queue_order import QueueKey
from services.core.scheduler.buckets import Bucketed, Bucketing, BucketOrder, BucketStats
from services.core.scheduler.class_rules import ALL, NO_CLASSES, ClassRules
from services.core.scheduler.dispatch import NO_ADDRESSES
from services.core.scheduler.fair_queue import FairQueue
from services.core.scheduler.queue_slots import QueueSlots, Slot
from services.core.scheduler.vocabulary import Asked
from services.core.service import Service, ServiceClass


@dataclass(slots=True)
class Waiting:
    """A request in the queue."""

    ask: Asked
    # Gateway stream of the latest ask, to which the answer goes.
    stream_id: int
    arrival_s: float
    # Time from which the deadline counts: the arrival, or the latest failure of its worker.
    deadline_start_s: float
    # KV tokens that must be free before it can start.
    start_tokens: int = 0
    # Later requests of the same queue that were assigned before it.
    overtaken: int = 0
    # How often a worker has returned it to the queue.
    requeues: int = 0
    # Whether it was assigned before: it was returned, or its group changed or lost its worker.
    was_assigned: bool = False
    # Until this time it starts only in an idle group.
    alone_until_s: float = -inf
    # Until this time it starts only in a group without a prefill backlog.
    spread_until_s: float = -inf
    # If it starts later, it misses its target; `late`: it has, and stands behind the others.
    latest_s: float = inf
    late: bool = False
    # Predicted time to the first token at its arrival, before its correction; 0: unknown.
    raw_s: float = 0.0
    # Whether it is a retry at its booked time; see `LENIENT`.
    booked: bool = False
    # Prompt and expected output tokens.
    length: int = 0
    # If buckets order it: its sort key within its rank, and see `Bucketed.due`.
    place: QueueKey = ()
    due: int = 0

    def avoided(self, now_s: float) -> frozenset[str]:
        """Addresses of workers that its gateway cannot reach; empty `avoided_s` after the ask."""
        if not self.ask.avoided or now_s >= self.ask.now_s + self.ask.avoided_s:
            return NO_ADDRESSES
        return frozenset(self.ask.avoided)


@dataclass(slots=True)
class _ClassCounts:
    """Counts of the requests of a class for a model; `expiring`: those with a deadline, sorted."""

    requests: int = 0
    start_tokens: int = 0
    expiring: list[Slot] = field(default_factory=list)


@dataclass(slots=True)
class _ModelQueue:
    """The waiting requests of a model, in order and by class."""

    fair_queue: FairQueue = field(default_factory=FairQueue)
    # Requests with a latest start that are not late yet, sorted by it, and ids of late requests.
    timely: list[Slot] = field(default_factory=list)
    late: dict[str, None] = field(default_factory=dict)
    # Order of the requests that are ordered by bucket; None: there are no buckets.
    buckets: BucketOrder | None = None
    by_class: dict[ServiceClass, _ClassCounts] = field(
        default_factory=lambda: {cls: _ClassCounts() for cls in ALL}
    )
    # Only requests that were never assigned use slots: a requeued request needs none.
    slots: QueueSlots = field(default_factory=QueueSlots)


@dataclass(slots=True)
class WaitQueue:
    """The queues of all models; each change costs O(log n)."""

    rules: ClassRules = NO_CLASSES
    # Arrival number and request, by request id.
    _live: dict[str, tuple[int, Waiting]] = field(default_factory=dict)
    # By model; only models with waiting requests.
    _queues: dict[str, _ModelQueue] = field(default_factory=dict)
    # Request ids by gateway stream.
    _by_stream: dict[int, set[str]] = field(default_factory=dict)
    _next_number: int = 0

    def __len__(self) -> int:
        return len(self._live)

    def get(self, request_id: str) -> Waiting | None:
        """The waiting request with this id, or None."""
        entry = self._live.get(request_id)
        return entry[1] if entry is not None else None

    def models(self) -> list[str]:
        """Models with waiting requests."""
        return list(self._queues)

    def demand(self, model: str, classes: Collection[ServiceClass] = ALL) -> tuple[int, int]:
        """Number of requests of `classes` that wait for `model`, and their total `start_tokens`."""
        queue = self._queues.get(model)
        if queue is None:
            return 0, 0
        counts = [queue.by_class[cls] for cls in classes]
        return sum(c.requests for c in counts), sum(c.start_tokens for c in counts)

    def first_tokens(self, model: str) -> int:
        """`start_tokens` of the first request for `model`; 0 if none waits."""
        first = next(self.in_order(model), None)
        return 0 if first is None else first.start_tokens

    def count(self, classes: Collection[ServiceClass]) -> int:
        """Number of requests of `classes` that wait, over all models."""
        return sum(self.demand(model, classes)[0] for model in self._queues)

    def of_stream(self, stream_id: int) -> list[str]:
        """Ids of the requests whose answers go to this gateway stream."""
        return list(self._by_stream.get(stream_id, ()))

    def in_order(self, model: str) -> Iterator[Waiting]:
        """The requests for `model` in queue order; do not change the queue while iterating."""
        queue = self._queues.get(model)
        return (
            self._live[request_id][1]
            for request_id in (queue.fair_queue if queue is not None else ())
        )

    def oldest(self, model: str) -> list[Waiting]:
        """The request of each class for `model` with the earliest deadline start, sorted by it.

        Resumed requests have no deadline and are left out.
        """
        queue = self._queues.get(model)
        counts = queue.by_class.values() if queue is not None else ()
        return [
            self._live[entry[-1]][1]
            for entry in sorted(c.expiring[0] for c in counts if c.expiring)
        ]

    def tokens_ahead(self, ask: Asked, arrival_s: float) -> int:
        """Start tokens of the requests that would start before a new request; see `FairQueue`."""
        queue = self._queues.get(ask.model)
        if queue is None:
            return 0
        new = Waiting(ask, ask.stream_id, arrival_s, arrival_s, length=ask.prompt_tokens)
        if (buckets := self._buckets_of(new)) is not None:
            new.place = buckets.place(new.length, arrival_s)
        return queue.fair_queue.tokens_ahead(*self._band(new), self._key(new))

    def busiest_owner(self, ask: Asked) -> str:
        """The owner with the most waiting tokens among the requests of the same band as `ask`."""
        queue = self._queues.get(ask.model)
        band, _ = self._band(Waiting(ask, ask.stream_id, ask.now_s, ask.now_s))
        return queue.fair_queue.busiest(band) if queue is not None else ""

    def late(self, model: str) -> list[Waiting]:
        """The requests for `model` that are late."""
        queue = self._queues.get(model)
        return [self._live[name][1] for name in queue.late] if queue is not None else []

    def mark_late(self, model: str, now_s: float) -> None:
        """Move the requests for `model` whose latest start is over behind the others."""
        queue = self._queues.get(model)
        while queue is not None and queue.timely and queue.timely[0][0] < now_s:
            _, number, request_id = queue.timely.pop(0)
            waiting = self._live[request_id][1]
            entry = self._key(waiting), number, request_id
            queue.fair_queue.remove(*self._band(waiting), entry)
            waiting.late = True
            queue.fair_queue.add(*self._band(waiting), entry, waiting.start_tokens)
            queue.late[request_id] = None

    def oldest_deadline_start_s(self, classes: Collection[ServiceClass] = ALL) -> float | None:
        """The earliest deadline start among requests of `classes` with a deadline, or None."""
        lists = (queue.by_class[cls].expiring for queue in self._queues.values() for cls in classes)
        return min((expiring[0][0] for expiring in lists if expiring), default=None)

    def victim_for(self, model: str, service: Service) -> Waiting | None:
        """The request for `model` that a new request displaces, or None; see QueueSlots."""
        queue = self._queues.get(model)
        if queue is None or not self.rules.enabled:
            return None
        victim_id = queue.slots.victim_for(service, self.rules.displaceable(service))
        return None if victim_id is None else self._live[victim_id][1]

    def push(self, waiting: Waiting) -> None:
        """Add a request whose id is not in the queue."""
        ask, number = waiting.ask, self._next_number
        assert ask.request_id not in self._live
        self._next_number += 1
        self._live[ask.request_id] = (number, waiting)
        queue = self._queues.setdefault(ask.model, self._new_queue())
        waiting.place = ()
        if (buckets := self._buckets_of(waiting)) is not None:
            waiting.place = buckets.place(waiting.length, waiting.arrival_s)
            waiting.due = buckets.due
            buckets.join(waiting.length, ask.now_s)
        entry = self._key(waiting), number, ask.request_id
        queue.fair_queue.add(*self._band(waiting), entry, waiting.start_tokens)
        if waiting.late:
            queue.late[ask.request_id] = None
        elif waiting.latest_s < inf:
            insort(queue.timely, (waiting.latest_s, number, ask.request_id))
        counts = queue.by_class[ask.service.service_class]
        if not ask.resumed:
            # Output of a resumed request has been sent to its client, so it never expires here.
            insort(counts.expiring, (waiting.deadline_start_s, number, ask.request_id))
        if not waiting.was_assigned:
            queue.slots.add(ask.service, (waiting.arrival_s, number, ask.request_id))
        counts.requests += 1
        counts.start_tokens += waiting.start_tokens
        self._by_stream.setdefault(waiting.stream_id, set()).add(ask.request_id)

    def move(self, request_id: str, stream_id: int) -> None:
        """Direct the answer of a waiting request to another gateway stream."""
        _, waiting = self._live[request_id]
        self._leave_stream(waiting)
        waiting.stream_id = stream_id
        self._by_stream.setdefault(stream_id, set()).add(request_id)

    def start(self, request_id: str) -> Waiting:
        """Remove a request that is being assigned, and charge its tenant its `start_tokens`."""
        waiting = self._live[request_id][1]
        self._queues[waiting.ask.model].fair_queue.charge(
            *self._band(waiting), waiting.start_tokens
        )
        return self.remove(request_id, started=True)

    def remove(self, request_id: str, started: bool = False) -> Waiting:
        """Remove a request at any position of the queue without charging its tenant."""
        number, waiting = self._live.pop(request_id)
        self._leave_stream(waiting)
        ask = waiting.ask
        queue = self._queues[ask.model]
        queue.fair_queue.remove(*self._band(waiting), (self._key(waiting), number, request_id))
        if waiting.place and queue.buckets is not None:
            queue.buckets.leave(waiting.length, started)
        if waiting.late:
            del queue.late[request_id]
        elif waiting.latest_s < inf:
            del queue.timely[bisect_left(queue.timely, (waiting.latest_s, number, request_id))]
        counts = queue.by_class[ask.service.service_class]
        if not ask.resumed:
            entry = waiting.deadline_start_s, number, request_id
            del counts.expiring[bisect_left(counts.expiring, entry)]
        if not waiting.was_assigned:
            queue.slots.remove(ask.service, (waiting.arrival_s, number, request_id))
        counts.requests -= 1
        counts.start_tokens -= waiting.start_tokens
        if not any(c.requests for c in queue.by_class.values()):
            del self._queues[ask.model]
        return waiting

    def plan_is_due(self, model: str) -> bool:
        """Whether the order by bucket of the requests for `model` should be planned again. O(1)."""
        queue = self._queues.get(model)
        return queue is not None and queue.buckets is not None and queue.buckets.plan_is_due

    def plan_buckets(self, model: str, memory_tokens: int, length_max: int) -> None:
        """Order the requests that are ordered by bucket again.

        `memory_tokens`: KV tokens that they may use; `length_max`: the longest sequence.
        """
        queue = self._queues.get(model)
        if queue is None or (buckets := queue.buckets) is None:
            return
        ordered, requests = list[Waiting](), list[Bucketed]()
        for request_id in queue.fair_queue:
            number, waiting = self._live[request_id]
            if waiting.place:
                ordered.append(waiting)
                rank, arrival_s = float(waiting.ask.service.rank), waiting.arrival_s
                order = (rank if self.rules.enabled else 0.0), arrival_s, float(number)
                requests.append(Bucketed(order, waiting.length, waiting.due))
        places = buckets.plan(requests, memory_tokens, length_max)
        for waiting, place in zip(ordered, places, strict=True):
            waiting.place = place
        queue.fair_queue.sort(lambda request_id: self._key(self._live[request_id][1]))

    def bucket_index(self, waiting: Waiting) -> Callable[[int], int] | None:
        """Maps a length to the index of its bucket; None if there is a single bucket or none."""
        buckets = self._queues[waiting.ask.model].buckets
        if not waiting.place or buckets is None or not buckets.has_several:
            return None
        return buckets.index_of

    def bucket_stats(self, model: str, now_s: float) -> BucketStats | None:
        """Figures of the buckets of a model; None without any."""
        queue = self._queues.get(model)
        buckets = queue.buckets if queue is not None else None
        return None if buckets is None else buckets.stats(model, now_s)

    def check_invariants(self) -> None:
        """Raise AssertionError if the indexes disagree."""
        assert sum(map(len, self._by_stream.values())) == len(self._live)
        for request_id, (_, waiting) in self._live.items():
            assert request_id == waiting.ask.request_id
            assert request_id in self._by_stream[waiting.stream_id]
        # Recompute every count and order from the requests themselves.
        all_waiting = [w for _, w in self._live.values()]
        for model, queue in self._queues.items():
            queue.fair_queue.check_invariants()
            of_model = [w for w in all_waiting if w.ask.model == model]
            names = sorted(w.ask.request_id for w in of_model)
            assert names and sorted(queue.fair_queue) == names
            queue.slots.check_invariants(
                (w.ask.service, (w.arrival_s, self._live[w.ask.request_id][0], w.ask.request_id))
                for w in of_model
                if not w.was_assigned
            )
            if queue.buckets is not None:
                queue.buckets.check_invariants([w.length for w in of_model if w.place])
            assert queue.late.keys() == {w.ask.request_id for w in of_model if w.late}
            assert queue.timely == sorted(
                (w.latest_s, self._live[w.ask.request_id][0], w.ask.request_id)
                for w in of_model
                if w.latest_s < inf and not w.late
            )
            for service_class, counts in queue.by_class.items():
                of_class = [w for w in of_model if w.ask.service.service_class is service_class]
                assert counts.requests == len(of_class)
                assert counts.start_tokens == sum(w.start_tokens for w in of_class)
                assert counts.expiring == sorted(
                    (w.deadline_start_s, self._live[w.ask.request_id][0], w.ask.request_id)
                    for w in of_class
                    if not w.ask.resumed
                )
        assert {w.ask.model for w in all_waiting} == self._queues.keys()

    def _key(self, waiting: Waiting) -> QueueKey:
        key = self.rules.queue_order(waiting.ask.service, waiting.arrival_s)
        # A bucket replaces the arrival, which is the last part of these keys.
        return (*key[:-1], *waiting.place) if waiting.place else key

    def _new_queue(self) -> _ModelQueue:
        mode = self.rules.buckets
        if mode is Bucketing.OFF:
            return _ModelQueue()
        return _ModelQueue(buckets=BucketOrder(mode, self.rules.batch_order))

    def _buckets_of(self, waiting: Waiting) -> BucketOrder | None:
        """The buckets that order a request; None if none do."""
        # Resumed requests go before all others, by arrival.
        if waiting.ask.resumed or not self.rules.has_buckets(waiting.ask.service):
            return None
        queue = self._queues.get(waiting.ask.model)
        return queue.buckets if queue is not None else None

    def _band(self, waiting: Waiting) -> tuple[QueueKey, str]:
        """The priority band of a request, and its tenant ("" if the policy ignores classes)."""
        ask = waiting.ask
        if not self.rules.enabled:
            return (not ask.resumed, waiting.late), ""
        band = not ask.service.online, not ask.resumed, waiting.late, self._key(waiting)[0]
        return band, ask.service.tenant

    def _leave_stream(self, waiting: Waiting) -> None:
        ids = self._by_stream[waiting.stream_id]
        ids.discard(waiting.ask.request_id)
        if not ids:
            del self._by_stream[waiting.stream_id]
