"""What owners with limits use of them, as metrics."""

from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.core.quota.limits import Limit

Owned = tuple[str, Limit]
"""An owner and one of its limits."""


class QuotaMetrics:
    """Metrics of the owners that have limits now; other owners are dropped."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """The metrics are added to `registry`."""
        gauge, counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
        self._limits = gauge(
            "tideserve_gateway_quota_limit",
            "What an owner of keys may use: requests or tokens a minute, or requests at once"
            " (concurrent).",
            ["owner", "limit"],
        )
        self._used = counter(
            "tideserve_gateway_quota_used",
            "Requests and tokens that count against the limits of their owner, told when they end.",
            ["owner", "limit"],
        )
        self._running = gauge(
            "tideserve_gateway_quota_running",
            "Requests at this gateway now of owners with a limit of requests at once.",
            ["owner"],
        )
        self._refusals = counter(
            "tideserve_gateway_quota_refusals",
            "Requests refused because the owner of their key had used a limit: requests, tokens or"
            " concurrent.",
            ["owner", "limit"],
        )
        self._limited: set[Owned] = set()

    def limit_owners(self, limits: Mapping[Owned, int]) -> None:
        """Count for these owners and limits from now on."""
        for owned in self._limited - limits.keys():
            self._forget(*owned)
        for (owner, limit), value in limits.items():
            self._limits.labels(owner, limit).set(value)
            self._refusals.labels(owner, limit)
            if limit is Limit.CONCURRENT:
                self._running.labels(owner)
            else:
                self._used.labels(owner, limit)
        self._limited = set(limits)

    def refused(self, owner: str, limit: Limit) -> None:
        """Count a request that an owner's limit has refused."""
        if (owner, limit) in self._limited:
            self._refusals.labels(owner, limit).inc()

    def used(self, owner: str, limit: Limit, amount: int) -> None:
        """Count what a request that is over has used of a limit."""
        if (owner, limit) in self._limited:
            self._used.labels(owner, limit).inc(amount)

    def running(self, owner: str, count: int) -> None:
        """Tell how many requests of an owner run."""
        if (owner, Limit.CONCURRENT) in self._limited:
            self._running.labels(owner).set(count)

    def _forget(self, owner: str, limit: Limit) -> None:
        self._limits.remove(owner, limit)
        self._refusals.remove(owner, limit)
        if limit is Limit.CONCURRENT:
            self._running.remove(owner)
        else:
            self._used.remove(owner, limit)
