"""The scheduler's Prometheus metrics, computed from the driver's latest snapshot."""

from collections.abc import Callable, Iterable
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from services.common.vllm_names import LABELS, QUEUE_ENGINE, WAITING, WAITING_HELP
from services.core.scheduler.buckets import BucketStats
from services.core.scheduler.calendar import BookingEnd
from services.core.scheduler.prediction import BUCKETS
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
        if now.predicts:
            yield from _predictions(now)
        yield from _buckets(now)


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


def _predictions(now: Snapshot) -> Iterable[Metric]:
    """Metrics of predicted waits and refusals for lateness."""
    predicted = GaugeMetricFamily(
        "tideserve_scheduler_predicted_wait_seconds",
        "Predicted time to the first token of a new request with a short prompt (median).",
        labels=["model_name", "class"],
    )
    for wait in now.class_waits:
        predicted.add_metric([wait.model, wait.service_class], wait.likely_s)
    ratio = HistogramMetricFamily(
        "tideserve_scheduler_wait_ratio",
        "Measured over predicted times to the first token, 0.5 s added to both.",
        labels=["model_name", "class"],
    )
    for (model, service_class), (counts, total) in now.wait_ratios.items():
        bounds = [*map(str, BUCKETS), "+Inf"]
        buckets = list(zip(bounds, accumulate(counts), strict=True))
        ratio.add_metric([model, service_class], buckets, total)
    refused = CounterMetricFamily(
        "tideserve_scheduler_refused_late",
        "Requests refused because of their predicted wait, by what it is limited by.",
        labels=["model_name", "class", "by"],
    )
    for (model, service_class, limit), count in now.refused_late_total.items():
        refused.add_metric([model, service_class, limit], count)
    yield from (predicted, ratio, refused)
    yield GaugeMetricFamily(
        "tideserve_scheduler_bookings",
        "Refused requests for whose retry time is booked.",
        value=now.bookings,
    )
    ended = CounterMetricFamily(
        "tideserve_scheduler_bookings_ended", "Bookings that have ended.", labels=["state"]
    )
    for state in BookingEnd:
        ended.add_metric([state], now.bookings_ended_total.get(state, 0))
    yield ended
    yield CounterMetricFamily(
        "tideserve_scheduler_retry_after_broken",
        "Retries at their booked time that were refused as late again.",
        value=now.retries_broken_total,
    )


def _buckets(now: Snapshot) -> Iterable[Metric]:
    """Metrics of the buckets of waiting requests."""
    texts: dict[str, tuple[str, Callable[[BucketStats], float]]] = {
        "buckets": ("Buckets of waiting requests.", lambda stats: len(stats.buckets)),
        "bucket_padding_share": (
            "Share of padding if waiting requests were padded to the longest of their bucket.",
            lambda stats: stats.padding_share,
        ),
        "bucket_arrivals_per_second": (
            "Recent arrivals per second of requests that buckets order.",
            lambda stats: stats.arrivals_per_s,
        ),
        "bucket_mean_tokens": (
            "Mean prompt and expected output tokens of the waiting requests in buckets.",
            lambda stats: stats.mean_tokens,
        ),
    }
    for name, (text, value_of) in texts.items():
        family = GaugeMetricFamily(f"tideserve_scheduler_{name}", text, labels=["model_name"])
        for stats in now.buckets:
            family.add_metric([stats.model], value_of(stats))
        yield family


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
