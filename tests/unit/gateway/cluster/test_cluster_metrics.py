"""The cluster's sums are those of the model's workers, and scrapes share a query."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from services.core.report import EngineReport, Load, MemoryReport
from services.gateway.cluster.cluster_metrics import FRESH_S, ClusterMetrics, cluster_load
from services.gateway.vocabulary.message import ClusterStatus, Heartbeat

LOAD = Load(running=2, waiting=1, kv_blocks_free=30, kv_blocks_wanted=0, kv_blocks_total=40)


def worker(name: str, load: Load = LOAD) -> MemoryReport:
    """A worker's report."""
    return MemoryReport(name, f"{name}-a", (1,), 0, 0, 0, EngineReport(load))


CLUSTER = ClusterStatus(
    (worker("w0"), worker("w1", replace(LOAD, running=5, kv_blocks_free=10)), worker("other")), ()
)
MODELS = {"w0": "m", "w1": "m", "other": "n"}


class Memmgr:
    """Responds after a moment and counts the queries."""

    def __init__(self, answer: ClusterStatus | None) -> None:
        self.answer = answer
        self.queries = 0

    async def __call__(self) -> ClusterStatus | None:
        self.queries += 1
        await asyncio.sleep(0)
        return self.answer


def metrics(memmgr: Memmgr, clock: list[float], heartbeat: Heartbeat | None) -> ClusterMetrics:
    """The metrics of model m."""
    rows = [SimpleNamespace(worker_id=name, model=model) for name, model in MODELS.items()]
    view = SimpleNamespace(
        workers=lambda: rows, of=lambda model: SimpleNamespace(model=model, block_size=16)
    )
    admission = SimpleNamespace(heartbeat=heartbeat)
    return ClusterMetrics(
        memmgr, cast(Any, view), cast(Any, admission), ["m"], clock=lambda: clock[0]
    )


def test_sums_are_those_of_the_model() -> None:
    load = cluster_load(CLUSTER, MODELS, "m", 7, 16)

    assert (load.running, load.waiting, load.kv_blocks_total) == (7, 9, 80)
    assert load.kv_usage == 0.5
    assert cluster_load(ClusterStatus((), ()), MODELS, "m", 0, 16).kv_usage == 0


async def test_metrics_have_the_names_of_vllm() -> None:
    text = (await metrics(Memmgr(CLUSTER), [0.0], Heartbeat(2, 7)).render()).decode()

    labels = 'engine="cluster",model_name="m"'
    assert [line for line in text.splitlines() if line[0] != "#"] == [
        f"vllm:num_requests_running{{{labels}}} 7.0",
        f"vllm:num_requests_waiting{{{labels}}} 9.0",
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.5",
        'vllm:cache_config_info{block_size="16",engine="cluster",model_name="m",'
        'num_gpu_blocks="80"} 1.0',
    ]


async def test_without_a_scheduler_the_queue_is_left_out() -> None:
    text = await metrics(Memmgr(CLUSTER), [0.0], None).render()

    assert b'vllm:num_requests_waiting{engine="cluster",model_name="m"} 2.0' in text


async def test_scrapes_share_a_query() -> None:
    memmgr, clock = Memmgr(CLUSTER), [0.0]
    made = metrics(memmgr, clock, None)

    texts = await asyncio.gather(*(made.render() for _ in range(5)))
    assert len(set(texts)) == 1 and memmgr.queries == 1
    clock[0] += FRESH_S
    await made.render()
    assert memmgr.queries == 2


async def test_unknown_values_are_not_exported() -> None:
    memmgr, clock = Memmgr(CLUSTER), [0.0]
    made = metrics(memmgr, clock, None)
    assert await made.render()

    memmgr.answer = None
    clock[0] += FRESH_S
    assert await made.render() == b""
