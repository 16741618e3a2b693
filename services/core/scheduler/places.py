"""The places of a full queue: which request leaves it, so that another one gets its place.

Owners of keys (tenants) have fair shares of the places, by count: a newcomer takes the place of
another tenant's request only while that tenant has at least two more than its own. So a flood of
one tenant displaces nobody who has no more than it has, and never keeps the others out.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.core.scheduler.class_rules import ALL, ONLINE
from services.core.service import Service, ServiceClass

Place = tuple[float, int, str]
"""Arrival (seconds), number and id of a request that was never assigned."""


@dataclass(slots=True)
class Places:
    """The requests that were never assigned, by class and tenant, the oldest first."""

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
