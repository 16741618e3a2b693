"""Simulated workers with prefix caches: exact hits, and more of them with dispatch `prefix`."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.prefix_count import CountedCache
from benchmarks.scenarios.prefix import serve
from services.core.cost.model import CostModel
from services.core.planner.config import IterationConfig
from services.core.scheduler.dispatch import PREFIX
from services.core.scheduler.state_config import StateConfig
from tideserve.sim.cluster import Cluster, ClusterSpec
from tideserve.sim.report import Outcome, Outcomes
from tideserve.sim.time_model import CostTimeModel
from tideserve.sim.workload import AGENTS, CHATS, Arrival, Conversations, Length, OpenLoop

COST = CostModel(alpha=1e-9, beta=5e-5, gamma=0.01, lam=0.0095)
SMALL_AGENTS = replace(
    AGENTS,
    opening=Length(600, 0.4, least=512, most=2000),
    question=Length(500, 1.0, least=32, most=3000),
)


def simulated(
    arrivals: Sequence[Arrival], dispatch: str, workers: int, blocks: int
) -> tuple[Cluster, Outcomes]:
    spec = ClusterSpec(
        instances=workers,
        iteration=IterationConfig(16, blocks, 2048, 256, 10_000, prefix_caching=True),
        max_model_len=blocks * 16,
        scheduler=StateConfig(
            *(100_000, 1e6, dispatch), ttft=COST if dispatch == PREFIX else None, lateness=0.0
        ),
    )
    cluster = Cluster(spec, CostTimeModel(COST), OpenLoop(arrivals))
    outcomes = cluster.run()
    assert all(record.outcome is Outcome.COMPLETED for record in outcomes.records)
    cluster.check_invariants()
    return cluster, outcomes


def counted(cluster: Cluster, outcomes: Outcomes, arrivals: Sequence[Arrival], blocks: int) -> int:
    """Independent count of the hits of the same requests at the same workers."""
    caches = {name: CountedCache(blocks) for name in cluster.instances}
    for number, (record, arrival) in enumerate(zip(outcomes.records, arrivals, strict=True)):
        output = (-1,) * arrival.output_tokens
        caches[record.worker_id].request(arrival.prompt_ids(number), output)
    assert sum(cache.queries for cache in caches.values()) == outcomes.prefix_queries
    return sum(cache.hits for cache in caches.values())


@pytest.mark.parametrize("dispatch", ["least_loaded", PREFIX])
@pytest.mark.parametrize(("kind", "blocks"), [(SMALL_AGENTS, 1500), (CHATS, 6000)])
def test_hits_are_those_of_an_independent_count(
    kind: Conversations, blocks: int, dispatch: str
) -> None:
    arrivals = kind.arrivals(0.3, 150, random.Random(7))
    cluster, outcomes = simulated(arrivals, dispatch, 3, blocks)
    expected = counted(cluster, outcomes, arrivals, blocks)
    assert expected > outcomes.prefix_queries / 20
    assert outcomes.prefix_hits == pytest.approx(expected, rel=0.05)


def test_dispatch_by_prefix_at_least_doubles_the_hits() -> None:
    """Eight busy workers, as idle ones would be picked in order of their names."""
    arrivals = AGENTS.arrivals(0.8, 150, random.Random(1))
    plain, aware = (
        serve("agents", arrivals, dispatch, 500_000) for dispatch in ("least_loaded", PREFIX)
    )
    assert plain.unfinished == aware.unfinished == 0
    assert aware.hit_share > 2 * plain.hit_share
    assert plain.ttft_p50_s is not None and aware.ttft_p50_s is not None
    assert aware.ttft_p50_s < plain.ttft_p50_s


def test_hits_are_as_predicted() -> None:
    arrivals = SMALL_AGENTS.arrivals(1.0, 80, random.Random(1))
    cluster, outcomes = simulated(arrivals, PREFIX, 8, 3000)
    predicted = cluster.scheduler.snapshot(outcomes.simulated_s).cached_tokens_total
    assert predicted == pytest.approx(outcomes.prefix_hits, rel=0.2)


def test_the_same_seed_gives_the_same_outcomes() -> None:
    snapshots = [
        simulated(CHATS.arrivals(0.3, 60, random.Random(seed)), PREFIX, 3, 5000)[1]
        for seed in (1, 1, 2)
    ]
    assert snapshots[0].records == snapshots[1].records != snapshots[2].records
    assert snapshots[0].prefix_hits == snapshots[1].prefix_hits
