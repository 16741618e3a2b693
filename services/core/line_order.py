"""The order in which requests wait: a policy gives each a key, and the smallest key is first."""

from collections.abc import Callable, Mapping
from enum import StrEnum

from services.core.service import Service, ServiceClass

LineKey = tuple[float, ...]
LineOrder = Callable[[Service, float], LineKey]
"""The key of a request, from what it is promised and from when it arrived (seconds)."""


class Scheduling(StrEnum):
    """First come, first served, whatever was promised; or class before class, `batch` last."""

    FCFS = "fcfs"
    PRIORITY = "priority"


def by_arrival(_service: Service, arrival_s: float) -> LineKey:
    """First come, first served, whatever was promised."""
    return (arrival_s,)


_PLACES = {kind: float(place) for place, kind in enumerate(ServiceClass)}


def by_class(service: Service, arrival_s: float) -> LineKey:
    """Interactive before standard before batch; within a class by rank, then by arrival."""
    return _PLACES[service.service_class], float(service.rank), arrival_s


LINES: Mapping[Scheduling, LineOrder] = {
    Scheduling.FCFS: by_arrival,
    Scheduling.PRIORITY: by_class,
}
