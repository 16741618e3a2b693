"""The memory manager's metrics, read from what it knows at the time of the question."""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.memmgr.worker_memory import WorkerMemory

_GAUGES = {
    "budget_bytes": "Device memory budget.",
    "parameter_bytes": "Bytes that parameters occupy.",
    "staging_bytes": "Bytes kept for staging.",
    "kv_blocks_total": "KV blocks in all.",
    "kv_blocks_free": "KV blocks that are free.",
}
_COUNTERS = {
    "pipeline_busy_s": (
        "pipeline_busy_seconds",
        "Time in which the worker, as a stage of a pipeline, ran microbatches.",
    ),
    "pipeline_bubble_s": (
        "pipeline_bubble_seconds",
        "Time in which it was idle while a microbatch was anywhere in its pipeline.",
    ),
    "prefill_s": ("prefill_seconds", "Time of iterations with a chunk of more than one token."),
    "prefill_predicted_s": (
        "prefill_predicted_seconds",
        "Time of the same iterations as the cost model predicted it.",
    ),
    "decode_s": ("decode_seconds", "Time of all other iterations."),
    "decode_predicted_s": (
        "decode_predicted_seconds",
        "Time of all other iterations as the cost model predicted it.",
    ),
}


class MemmgrCollector(Collector):
    """Computes metrics when they are asked for."""

    def __init__(
        self, workers: Callable[[], Sequence[WorkerMemory]], groups: Callable[[], int]
    ) -> None:
        """Both are called from the exposition's thread, so they only read."""
        self._workers = workers
        self._groups = groups

    def collect(self) -> Iterable[Metric]:
        """All metrics of the memory manager."""
        workers = self._workers()
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"tideserve_memmgr_worker_{name}", text, labels=["worker"])
            for memory in workers:
                gauge.add_metric([memory.worker_id], getattr(memory, name))
            yield gauge
        for name, (metric, text) in _COUNTERS.items():
            counter = CounterMetricFamily(
                f"tideserve_memmgr_worker_{metric}", text, labels=["worker"]
            )
            for memory in workers:
                counter.add_metric([memory.worker_id], getattr(memory, name))
            yield counter
        yield GaugeMetricFamily(
            "tideserve_memmgr_stable_groups", "Groups that serve.", value=self._groups()
        )


def registry(
    workers: Callable[[], Sequence[WorkerMemory]], groups: Callable[[], int]
) -> CollectorRegistry:
    """A registry with the memory manager's metrics."""
    result = CollectorRegistry()
    result.register(MemmgrCollector(workers, groups))
    return result
