"""Requests that wait: a line for each model, in the order that a policy gives.

Requests that have run go before all others, and have no deadline here. Where classes count, that
holds among online requests, and among batch requests, which come after all of those; and within a
band of the order, such as a class, tenants take turns. See `tenant_turns`.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from services.core.line_order import LineKey
from services.core.scheduler.class_rules import ALL, NO_CLASSES, ONLINE, ClassRules
from services.core.scheduler.dispatch import NOBODY
from services.core.scheduler.tenant_turns import TenantTurns
from services.core.scheduler.vocabulary import Asked
from services.core.service import Service, ServiceClass

Place = tuple[float, int, str]
"""Arrival (seconds), number and id of a request that was never assigned."""


@dataclass(slots=True)
class Places:
    """The requests that were never assigned, by class and tenant, the oldest first.

    Owners of keys (tenants) have fair shares of the places of a full queue, by count: a newcomer
    takes the place of another tenant's request only while that tenant has at least two more than
    its own. So a flood of one tenant displaces no tenant that has fewer requests.
    """

    _held: dict[ServiceClass, dict[str, list[Place]]] = field(
        default_factory=lambda: {one: {} for one in ALL}
    )

    def add(self, service: Service, place: Place) -> None:
        """A request has got a place. O(log n)."""
        insort(self._held[service.service_class].setdefault(service.tenant, []), place)

    def remove(self, service: Service, place: Place) -> None:
        """A request has left its place. O(log n)."""
        of_class = self._held[service.service_class]
        places = of_class[service.tenant]
        del places[bisect_left(places, place)]
        if not places:
            del of_class[service.tenant]

    def giving_way(self, service: Service, below: Iterable[ServiceClass]) -> str | None:
        """Id of the request whose place a newcomer takes, None if there is none.

        It is the newest one of the tenant with the most places, of the lowest class in `below`,
        which are the classes that give way to the newcomer's, or else of its own class. Batch
        requests give way to online ones whoever sent them, and a tenant's own lower classes to its
        higher ones. O(tenants).
        """
        for one in (*below, service.service_class):
            of_class = self._held[one]
            if not of_class:
                continue
            kind = ONLINE if one in ONLINE else (one,)
            counts = {tenant: self._count(kind, tenant) for tenant in of_class}
            most = max(of_class, key=lambda tenant: (counts[tenant], of_class[tenant][-1]))
            yields = service.online and one is ServiceClass.BATCH
            if yields or counts[most] > self._count(kind, service.tenant) + 1:
                return of_class[most][-1][-1]
            if one is not service.service_class and service.tenant in of_class:
                return of_class[service.tenant][-1][-1]
        return None

    def check_invariants(self, expected: Iterable[tuple[Service, Place]]) -> None:
        """Raise AssertionError if it does not hold just these."""
        held: dict[ServiceClass, dict[str, list[Place]]] = {one: {} for one in ALL}
        for service, place in expected:
            held[service.service_class].setdefault(service.tenant, []).append(place)
        for of_class in held.values():
            for places in of_class.values():
                places.sort()
        assert held == self._held

    def _count(self, classes: Iterable[ServiceClass], tenant: str) -> int:
        return sum(len(self._held[one].get(tenant, ())) for one in classes)


@dataclass(slots=True)
class Waiting:
    """A request in the queue.

    `stream_id` is where its answer goes: that of the latest ask. `start_tokens` of KV must be free
    before it can run. `overtaken` counts requests behind it in the line that were assigned before
    it; `returns` counts workers that have given it back. Its deadline counts from `counted_s`: its
    arrival, or when a worker failed under it. One that is `placed` was assigned before:
    by a return, a change of groups or the loss of a worker, it is here again. Until `alone_until_s`
    it may start only where nothing else runs, until `spread_until_s` only where few prompts wait.
    """

    ask: Asked
    stream_id: int
    arrival_s: float
    counted_s: float
    start_tokens: int = 0
    overtaken: int = 0
    returns: int = 0
    placed: bool = False
    alone_until_s: float = -inf
    spread_until_s: float = -inf

    def avoided(self, now_s: float) -> frozenset[str]:
        """Addresses of workers that its gateway does not want now."""
        if not self.ask.avoided or now_s >= self.ask.now_s + self.ask.avoided_s:
            return NOBODY
        return frozenset(self.ask.avoided)


@dataclass(slots=True)
class _OfClass:
    """The requests of one class in a line; `expiring` are those that have not run."""

    requests: int = 0
    start_tokens: int = 0
    expiring: list[Place] = field(default_factory=list)


@dataclass(slots=True)
class _Line:
    """The requests of one model."""

    turns: TenantTurns = field(default_factory=TenantTurns)
    by_class: dict[ServiceClass, _OfClass] = field(
        default_factory=lambda: {one: _OfClass() for one in ALL}
    )


@dataclass(slots=True)
class WaitQueue:
    """The lines of all models; a change looks at O(log n) entries."""

    rules: ClassRules = NO_CLASSES
    _live: dict[str, tuple[int, Waiting]] = field(default_factory=dict)
    _lines: dict[str, _Line] = field(default_factory=dict)
    _by_stream: dict[int, set[str]] = field(default_factory=dict)
    _places: Places = field(default_factory=Places)
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

    def wanted(self, model: str, classes: Collection[ServiceClass] = ALL) -> tuple[int, int]:
        """How many requests of `classes` wait for `model`, and the KV tokens that they need."""
        line = self._lines.get(model)
        if line is None:
            return 0, 0
        of = [line.by_class[one] for one in classes]
        return sum(one.requests for one in of), sum(one.start_tokens for one in of)

    def count(self, classes: Collection[ServiceClass]) -> int:
        """How many requests of `classes` wait, for whatever model."""
        return sum(self.wanted(model, classes)[0] for model in self._lines)

    def of_stream(self, stream_id: int) -> list[str]:
        """Ids of the requests whose answers go to this stream."""
        return list(self._by_stream.get(stream_id, ()))

    def line(self, model: str) -> Iterator[Waiting]:
        """The requests for `model` in order; do not change the queue while you iterate."""
        line = self._lines.get(model)
        return (self._live[one][1] for one in (line.turns if line is not None else ()))

    def oldest(self, model: str) -> list[Waiting]:
        """The request for `model` of each class whose deadline is next, by their `counted_s`.

        Those that have run have none.
        """
        line = self._lines.get(model)
        of = line.by_class.values() if line is not None else ()
        return [
            self._live[entry[-1]][1] for entry in sorted(o.expiring[0] for o in of if o.expiring)
        ]

    def oldest_counted_s(self, classes: Collection[ServiceClass] = ALL) -> float | None:
        """The least `counted_s` of the requests of `classes` that can expire, or None."""
        of = (line.by_class[one].expiring for line in self._lines.values() for one in classes)
        return min((expiring[0][0] for expiring in of if expiring), default=None)

    def giving_way(self, service: Service) -> Waiting | None:
        """The request, for whatever model, whose place in a full queue a newcomer takes, or None.

        See Places.
        """
        if not self.rules.on:
            return None
        found = self._places.giving_way(service, self.rules.below(service))
        return None if found is None else self._live[found][1]

    def push(self, waiting: Waiting) -> None:
        """Add a request whose id is not in the queue."""
        ask, number = waiting.ask, self._next_number
        assert ask.request_id not in self._live
        self._next_number += 1
        self._live[ask.request_id] = (number, waiting)
        line = self._lines.setdefault(ask.model, _Line())
        entry = self._key(waiting), number, ask.request_id
        line.turns.add(*self._place(waiting), entry, waiting.start_tokens)
        of_class = line.by_class[ask.service.service_class]
        if not ask.resumed:
            insort(of_class.expiring, (waiting.counted_s, number, ask.request_id))
        if not waiting.placed:
            self._places.add(ask.service, (waiting.arrival_s, number, ask.request_id))
        of_class.requests += 1
        of_class.start_tokens += waiting.start_tokens
        self._by_stream.setdefault(waiting.stream_id, set()).add(ask.request_id)

    def move(self, request_id: str, stream_id: int) -> None:
        """Send the answer to another stream."""
        _, waiting = self._live[request_id]
        self._leave_stream(waiting)
        waiting.stream_id = stream_id
        self._by_stream.setdefault(stream_id, set()).add(request_id)

    def start(self, request_id: str) -> Waiting:
        """Take out a request that has got a group: its tenant's next one comes after others'."""
        waiting = self._live[request_id][1]
        self._lines[waiting.ask.model].turns.charge(*self._place(waiting), waiting.start_tokens)
        return self.remove(request_id)

    def remove(self, request_id: str) -> Waiting:
        """Take a request out, wherever it stands."""
        number, waiting = self._live.pop(request_id)
        self._leave_stream(waiting)
        ask = waiting.ask
        line = self._lines[ask.model]
        line.turns.remove(*self._place(waiting), (self._key(waiting), number, request_id))
        of_class = line.by_class[ask.service.service_class]
        if not ask.resumed:
            place = waiting.counted_s, number, request_id
            del of_class.expiring[bisect_left(of_class.expiring, place)]
        if not waiting.placed:
            self._places.remove(ask.service, (waiting.arrival_s, number, request_id))
        of_class.requests -= 1
        of_class.start_tokens -= waiting.start_tokens
        if not any(one.requests for one in line.by_class.values()):
            del self._lines[ask.model]
        return waiting

    def check_invariants(self) -> None:
        """Raise AssertionError if an index disagrees with the others."""
        assert sum(map(len, self._by_stream.values())) == len(self._live)
        for request_id, (_, waiting) in self._live.items():
            assert request_id == waiting.ask.request_id
            assert request_id in self._by_stream[waiting.stream_id]
        self._places.check_invariants(
            (one.ask.service, (one.arrival_s, number, one.ask.request_id))
            for number, one in self._live.values()
            if not one.placed
        )
        everyone = [one for _, one in self._live.values()]
        for model, line in self._lines.items():
            line.turns.check_invariants()
            of_model = [one for one in everyone if one.ask.model == model]
            names = sorted(one.ask.request_id for one in of_model)
            assert names and sorted(line.turns) == names
            for service_class, of_class in line.by_class.items():
                alike = [one for one in of_model if one.ask.service.service_class is service_class]
                assert of_class.requests == len(alike)
                assert of_class.start_tokens == sum(one.start_tokens for one in alike)
                assert of_class.expiring == sorted(
                    (one.counted_s, self._live[one.ask.request_id][0], one.ask.request_id)
                    for one in alike
                    if not one.ask.resumed
                )
        assert {one.ask.model for one in everyone} == self._lines.keys()

    def _key(self, waiting: Waiting) -> LineKey:
        return self.rules.line(waiting.ask.service, waiting.arrival_s)

    def _place(self, waiting: Waiting) -> tuple[LineKey, str]:
        """The band of the line in which a request stands, and its tenant if that counts."""
        ask = waiting.ask
        if not self.rules.on:
            return (not ask.resumed,), ""
        return (not ask.service.online, not ask.resumed, self._key(waiting)[0]), ask.service.tenant

    def _leave_stream(self, waiting: Waiting) -> None:
        ids = self._by_stream[waiting.stream_id]
        ids.discard(waiting.ask.request_id)
        if not ids:
            del self._by_stream[waiting.stream_id]
