"""Load of the cluster by model, with vLLM's metric names, for scrapers that read a single port."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common.clock import monotonic_s
from services.common.vllm_names import LABELS, WAITING
from services.gateway.cluster.admission_client import AdmissionClient
from services.gateway.cluster.cluster_view import ClusterView
from services.gateway.vocabulary.message import ClusterStatus

CLUSTER_ENGINE = "cluster"
"""Value of the label `engine`."""
FRESH_S = 0.5
"""Seconds for which queried values are sent again."""


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """Sums over the workers of a model; `waiting` includes the scheduler's queue."""

    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_free: int
    block_size: int

    @property
    def kv_usage(self) -> float:
        """Fraction of KV blocks in use, 0 to 1."""
        return 1 - self.kv_blocks_free / self.kv_blocks_total if self.kv_blocks_total else 0.0


def cluster_load(
    cluster: ClusterStatus, models: Mapping[str, str], model: str, queued: int, block_size: int
) -> ClusterLoad:
    """The load of `model`, of which `queued` requests are in the scheduler's queue.

    `models`: name of the model by worker id.
    """
    loads = [
        worker.engine.load for worker in cluster.workers if models.get(worker.worker_id) == model
    ]
    return ClusterLoad(
        running=sum(load.running for load in loads),
        waiting=queued + sum(load.waiting for load in loads),
        kv_blocks_total=sum(load.kv_blocks_total for load in loads),
        kv_blocks_free=sum(load.kv_blocks_free for load in loads),
        block_size=block_size,
    )


class ClusterMetrics:
    """Renders the load of the cluster; empty if the memory manager does not answer."""

    def __init__(
        self,
        cluster: Callable[[], Awaitable[ClusterStatus | None]],
        view: ClusterView,
        admission: AdmissionClient,
        model_names: Sequence[str],
        clock: Callable[[], float] = monotonic_s,
    ) -> None:
        """`cluster` queries the memory manager within a deadline; None: it does not answer."""
        self._cluster = cluster
        self._view = view
        self._admission = admission
        self._views = [view.of(name) for name in model_names]
        self._clock = clock
        self._lock = asyncio.Lock()
        self._text = b""
        self._queried_s: float | None = None

    async def render(self) -> bytes:
        """The metrics in the Prometheus text format; scrapes at the same time share a query."""
        async with self._lock:
            now_s = self._clock()
            if self._queried_s is None or now_s - self._queried_s >= FRESH_S:
                cluster = await self._cluster()
                self._text = b"" if cluster is None else self._rendered(cluster)
                self._queried_s = self._clock()
            return self._text

    def _rendered(self, cluster: ClusterStatus) -> bytes:
        heartbeat = self._admission.heartbeat
        models = {worker.worker_id: worker.model for worker in self._view.workers()}
        loads = {}
        for view in self._views:
            queued = 0 if heartbeat is None else heartbeat.of(view.model).queued
            loads[view.model] = cluster_load(cluster, models, view.model, queued, view.block_size)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(families(loads)))
        return generate_latest(registry)


class _Families(Collector):
    """Collects given families."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = tuple(metrics)

    def collect(self) -> Iterable[Metric]:
        """The families."""
        return self._metrics


GAUGES = (
    ("vllm:num_requests_running", "Running requests of all workers.", attrgetter("running")),
    (
        WAITING,
        "Requests that wait in the scheduler's queue or at a worker.",
        attrgetter("waiting"),
    ),
    (
        "vllm:kv_cache_usage_perc",
        "Fraction of all KV blocks in use, 0 to 1.",
        attrgetter("kv_usage"),
    ),
)


def families(loads: Mapping[str, ClusterLoad]) -> Iterable[Metric]:
    """The metrics of the loads; keys are models."""
    for name, text, value in GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=LABELS)
        for model_name, load in loads.items():
            gauge.add_metric((model_name, CLUSTER_ENGINE), value(load))
        yield gauge
    cache = GaugeMetricFamily(
        "vllm:cache_config_info",
        "Sizes of the KV caches together, as labels; the value is always 1.",
        labels=(*LABELS, "block_size", "num_gpu_blocks"),
    )
    for model_name, load in loads.items():
        sizes = str(load.block_size), str(load.kv_blocks_total)
        cache.add_metric((model_name, CLUSTER_ENGINE, *sizes), 1)
    yield cache
