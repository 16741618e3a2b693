"""The memory manager's metrics, read from what it knows at the time of the question."""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common.worker_times import WORKER_TIMES
from services.memmgr.worker_memory import WorkerMemory

_GAUGES = {
    "budget_bytes": "Device memory budget.",
    "parameter_bytes": "Bytes that parameters occupy.",
    "staging_bytes": "Bytes kept for staging.",
    "kv_blocks_total": "KV blocks in all.",
    "kv_blocks_free": "KV blocks that are free.",
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
        for name, (metric, text) in WORKER_TIMES.items():
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
