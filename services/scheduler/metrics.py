"""The scheduler's metrics, read from the driver's last snapshot."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.core.scheduler.vocabulary import Snapshot


class SchedulerCollector(Collector):
    """Computes metrics when they are asked for; a snapshot is safe to read from any thread."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        """All metrics of the scheduler."""
        now = self._snapshot()
        gauges = {
            "queued_requests": (now.queued, "Requests that wait for a group with room."),
            "oldest_wait_seconds": (now.oldest_wait_s, "Wait of the longest-waiting request."),
            "groups_known": (now.groups_known, "Stable groups in etcd."),
            "groups_serving": (now.groups_serving, "Groups with a fresh load report."),
            "reserved_blocks": (now.reserved_blocks, "KV blocks held for assignments on the way."),
            "dispatch_rate_per_second": (now.dispatch_rate_per_s, "Recent assignments a second."),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"tideserve_scheduler_{name}", text, value=value)
        yield CounterMetricFamily(
            "tideserve_scheduler_assigned_requests", "Requests assigned.", value=now.assigned_total
        )
        yield CounterMetricFamily(
            "tideserve_scheduler_withdrawn_requests",
            "Requests given up by clients or lost with their gateway while they waited.",
            value=now.withdrawn_total,
        )
        refused = CounterMetricFamily(
            "tideserve_scheduler_refused_requests", "Requests refused.", labels=["reason"]
        )
        for reason, count in now.refused_total.items():
            refused.add_metric([reason], count)
        yield refused


def registry(snapshot: Callable[[], Snapshot]) -> CollectorRegistry:
    """A registry with the scheduler's metrics."""
    result = CollectorRegistry()
    result.register(SchedulerCollector(snapshot))
    return result
