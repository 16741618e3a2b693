"""The scheduler's Prometheus metrics, computed from the driver's latest snapshot."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common.vllm_names import LABELS, QUEUE_ENGINE, WAITING, WAITING_HELP
from services.core.scheduler.vocabulary import Snapshot
from services.core.service import ServiceClass


class SchedulerCollector(Collector):
    """Computes the metrics at each scrape.

    Only the leading instance exports metrics of the whole cluster, so that sums over instances are
    correct.
    """

    def __init__(self, snapshot: Callable[[], Snapshot], leads: Callable[[], bool]) -> None:
        """`leads`: whether this is the active instance, the newest."""
        self._snapshot = snapshot
        self._leads = leads

    def collect(self) -> Iterable[Metric]:
        """All metrics of the scheduler."""
        now, leads = self._snapshot(), self._leads()
        yield GaugeMetricFamily(
            "tideserve_scheduler_leader",
            "1 for the active instance (the newest), 0 for standbys.",
            value=leads,
        )
        yield from _queue(now)
        yield _waiting(now if leads else None)
        if leads:
            yield from _cluster(now)


def _queue(now: Snapshot) -> Iterable[Metric]:
    """Metrics of this instance's queue; a standby has no queued requests."""
    gauges = {
        "queued_requests": (now.queued, "Requests waiting for a group with room."),
        "oldest_wait_seconds": (now.oldest_wait_s, "Longest wait that counts against a deadline."),
        "queue_deadline_seconds": (now.queue_deadline_s, "Wait after which a request gets 504."),
        "reserved_blocks": (now.reserved_blocks, "KV blocks reserved for pending assignments."),
        "dispatch_rate_per_second": (now.dispatch_rate_per_s, "Recent assignments per second."),
    }
    for name, (value, text) in gauges.items():
        yield GaugeMetricFamily(f"tideserve_scheduler_{name}", text, value=value)
    yield CounterMetricFamily(
        "tideserve_scheduler_assigned_requests", "Requests assigned.", value=now.assigned_total
    )
    yield CounterMetricFamily(
        "tideserve_scheduler_withdrawn_requests",
        "Requests cancelled by clients, or lost with their gateway, while waiting.",
        value=now.withdrawn_total,
    )
    yield CounterMetricFamily(
        "tideserve_scheduler_returned_requests",
        "Requests that a worker without room returned to the queue.",
        value=now.returned_total,
    )
    yield CounterMetricFamily(
        "tideserve_scheduler_prompt_tokens",
        "Prompt tokens of the requests assigned.",
        value=now.prompt_tokens_total,
    )
    yield CounterMetricFamily(
        "tideserve_scheduler_expected_cached_tokens",
        "Prompt tokens of assigned requests that the group was expected to have cached.",
        value=now.cached_tokens_total,
    )
    yield from _classes(now)
    refused = CounterMetricFamily(
        "tideserve_scheduler_refused_requests", "Requests refused.", labels=["reason"]
    )
    for reason, count in now.refused_total.items():
        refused.add_metric([reason], count)
    yield refused


def _classes(now: Snapshot) -> Iterable[Metric]:
    """Metrics of the queue by service class."""
    queued = GaugeMetricFamily(
        "tideserve_scheduler_class_queued_requests",
        "Requests waiting for a group with room, by class.",
        labels=["class"],
    )
    oldest = GaugeMetricFamily(
        "tideserve_scheduler_class_oldest_wait_seconds",
        "Longest wait of the class that counts against a deadline.",
        labels=["class"],
    )
    refused = CounterMetricFamily(
        "tideserve_scheduler_class_refused_requests",
        "Requests refused, by class.",
        labels=["class"],
    )
    for name in ServiceClass:
        queued.add_metric([name], now.queued_by_class[name])
        oldest.add_metric([name], now.oldest_wait_s_by_class[name])
        refused.add_metric([name], now.refused_total_by_class[name])
    yield from (queued, oldest, refused)


def _waiting(now: Snapshot | None) -> Metric:
    """Queued requests under vLLM's metric name, beside the workers', for existing dashboards."""
    waiting = GaugeMetricFamily(WAITING, WAITING_HELP, labels=LABELS)
    if now is not None:
        for model, count in now.queued_by_model.items():
            waiting.add_metric((model, QUEUE_ENGINE), count)
    return waiting


def _cluster(now: Snapshot) -> Iterable[Metric]:
    """Metrics of the groups, from the leading instance."""
    yield GaugeMetricFamily(
        "tideserve_scheduler_groups_known", "Stable groups in etcd.", value=now.groups_known
    )
    yield GaugeMetricFamily(
        "tideserve_scheduler_groups_serving",
        "Groups with a fresh load report.",
        value=now.groups_serving,
    )
