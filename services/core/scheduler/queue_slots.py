"""Fair shares of the slots of the scheduler's queue: which request a new one displaces."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.core.scheduler.class_rules import ALL, ONLINE
from services.core.service import Service, ServiceClass

Slot = tuple[float, int, str]
"""A time in seconds (arrival or deadline start), arrival number and id of a request."""


@dataclass(slots=True)
class QueueSlots:
    """Requests that use queue slots, because they were never assigned: by class and tenant.

    Tenants get fair shares of a full queue by number of requests: a new request displaces a
    request of another tenant only if that tenant has at least two more than the new request's
    tenant. So a burst of a tenant displaces no request of a tenant with fewer requests.
    """

    _held: dict[ServiceClass, dict[str, list[Slot]]] = field(
        default_factory=lambda: {cls: {} for cls in ALL}
    )

    def add(self, service: Service, slot: Slot) -> None:
        """Add a request. O(log n)."""
        insort(self._held[service.service_class].setdefault(service.tenant, []), slot)

    def remove(self, service: Service, slot: Slot) -> None:
        """Remove a request. O(log n)."""
        of_class = self._held[service.service_class]
        slots = of_class[service.tenant]
        del slots[bisect_left(slots, slot)]
        if not slots:
            del of_class[service.tenant]

    def victim_for(self, service: Service, below: Iterable[ServiceClass]) -> str | None:
        """Id of the request that a new request of `service` displaces from a full queue, or None.

        Classes are searched in the order of `below` (those that the new request may displace),
        then its own class; the victim is the newest request of the tenant with the most slots.
        Online requests displace batch requests of any tenant. A tenant's request also displaces
        its own requests of lower classes. O(tenants).
        """
        for cls in (*below, service.service_class):
            of_class = self._held[cls]
            if not of_class:
                continue
            # Count the online classes together, so that a tenant gains nothing by mixing them.
            kind = ONLINE if cls in ONLINE else (cls,)
            counts = {tenant: self._count(kind, tenant) for tenant in of_class}
            most = max(of_class, key=lambda tenant: (counts[tenant], of_class[tenant][-1]))
            is_preemptible = service.online and cls is ServiceClass.BATCH
            # "+ 1": after the exchange the new tenant must not have more slots than the other.
            if is_preemptible or counts[most] > self._count(kind, service.tenant) + 1:
                return of_class[most][-1][-1]
            if cls is not service.service_class and service.tenant in of_class:
                return of_class[service.tenant][-1][-1]
        return None

    def check_invariants(self, expected: Iterable[tuple[Service, Slot]]) -> None:
        """Raise AssertionError if the slots differ from `expected`."""
        held: dict[ServiceClass, dict[str, list[Slot]]] = {cls: {} for cls in ALL}
        for service, slot in expected:
            held[service.service_class].setdefault(service.tenant, []).append(slot)
        for of_class in held.values():
            for slots in of_class.values():
                slots.sort()
        assert held == self._held

    def _count(self, classes: Iterable[ServiceClass], tenant: str) -> int:
        return sum(len(self._held[cls].get(tenant, ())) for cls in classes)
