"""The order in which requests wait: a policy gives each a key, and the smallest key is first."""

from collections.abc import Callable

from services.core.service import Service

LineKey = tuple[float, ...]
LineOrder = Callable[[Service, float], LineKey]
"""The key of a request, from what it is promised and from when it arrived (seconds)."""


def by_arrival(_service: Service, arrival_s: float) -> LineKey:
    """First come, first served, whatever was promised."""
    return (arrival_s,)
