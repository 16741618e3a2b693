"""The scheduler's metrics, read from the driver's last snapshot."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common.vllm_names import LABELS, QUEUE_ENGINE, WAITING, WAITING_HELP
from services.core.scheduler.vocabulary import Snapshot
from services.core.service import ServiceClass


class SchedulerCollector(Collector):
    """Computes metrics when they are asked for.

    Metrics of the whole cluster come only from the instance that leads, so that sums over all
    instances are right.
    """

    def __init__(self, snapshot: Callable[[], Snapshot], leads: Callable[[], bool]) -> None:
        """`leads`: whether gateways and workers turn to this instance, the newest one."""
        self._snapshot = snapshot
        self._leads = leads

    def collect(self) -> Iterable[Metric]:
        """All metrics of the scheduler."""
        now, leads = self._snapshot(), self._leads()
        yield GaugeMetricFamily(
            "tideserve_scheduler_leader",
            "1 for the instance that gateways ask, the newest; the others stand by.",
            value=leads,
        )
        yield from _queue(now)
        yield _waiting(now if leads else None)
        if leads:
            yield from _cluster(now)


def _queue(now: Snapshot) -> Iterable[Metric]:
    """Metrics of this instance; a standby has nothing."""
    gauges = {
        "queued_requests": (now.queued, "Requests that wait for a group with room."),
        "oldest_wait_seconds": (now.oldest_wait_s, "Longest wait that a deadline counts."),
        "queue_deadline_seconds": (now.queue_deadline_s, "Wait after which a request gets 504."),
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
    yield CounterMetricFamily(
        "tideserve_scheduler_returned_requests",
        "Requests that a worker gave back, since it had no room, for another one.",
        value=now.returned_total,
    )
    yield CounterMetricFamily(
        "tideserve_scheduler_prompt_tokens",
        "Prompt tokens of the requests assigned.",
        value=now.prompt_tokens_total,
    )
    yield CounterMetricFamily(
        "tideserve_scheduler_expected_cached_tokens",
        "Prompt tokens of the requests assigned that their group was expected to have cached.",
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
    """The queue by class."""
    queued = GaugeMetricFamily(
        "tideserve_scheduler_class_queued_requests",
        "Requests that wait for a group with room, by class.",
        labels=["class"],
    )
    oldest = GaugeMetricFamily(
        "tideserve_scheduler_class_oldest_wait_seconds",
        "Longest wait of the class that a deadline counts.",
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
    """The queue beside the workers, for dashboards and autoscalers that add them up."""
    waiting = GaugeMetricFamily(WAITING, WAITING_HELP, labels=LABELS)
    if now is not None:
        for model, count in now.queued_by_model.items():
            waiting.add_metric((model, QUEUE_ENGINE), count)
    return waiting


def _cluster(now: Snapshot) -> Iterable[Metric]:
    """Metrics of the groups, from the leader."""
    yield GaugeMetricFamily(
        "tideserve_scheduler_groups_known", "Stable groups in etcd.", value=now.groups_known
    )
    yield GaugeMetricFamily(
        "tideserve_scheduler_groups_serving",
        "Groups with a fresh load report.",
        value=now.groups_serving,
    )
