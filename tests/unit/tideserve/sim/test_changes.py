"""Simulated groups that merge in a flood and split after it lose no request."""

import itertools
import random
from dataclasses import replace

import pytest

from services.core.cost.model import CostModel
from services.core.groups.layer_map import ModelShape
from services.core.overload.actions import LOAD_IS_BACK
from services.core.overload.events import Action, OverloadConfig, OverloadPolicy
from services.core.planner.config import IterationConfig
from tideserve.sim.change_spec import ChangeCosts, ChangeSpec
from tideserve.sim.cluster import Cluster, ClusterSpec
from tideserve.sim.report import Outcome, figures
from tideserve.sim.time_model import CostTimeModel
from tideserve.sim.workload import Length, OpenLoop, gamma_times, with_lengths

DEVICE = CostTimeModel(CostModel(alpha=1e-8, beta=1e-4, gamma=0.02, lam=0.0195))
BLOCKS = 150
# Parameters take 60 % of the memory, as in KunServe Table 1.
SHAPE = ModelShape(
    num_layers=4,
    layer_bytes=1_440_000,
    embedding_bytes=0,
    head_bytes=0,
    tied_embeddings=False,
    kv_bytes=400,
)
CHANGE = ChangeSpec(
    SHAPE, arena_bytes=SHAPE.parameter_bytes(1) + BLOCKS * 16 * 4 * 400, hidden_bytes=1000
)
FLOOD_S, TRICKLE_S = 12.0, 25.0
ITERATION = IterationConfig(
    block_size=16, num_blocks=BLOCKS, max_batch_tokens=512, max_running=64, max_waiting=1000
)
LENGTHS = (Length(120, 0.5, most=400), Length(120, 0.5, most=400))


def flood_and_trickle(seed: int, instances: int) -> OpenLoop:
    rng = random.Random(seed)
    flood = list(gamma_times(4.5 * instances, 1.0, FLOOD_S, rng))
    trickle = [FLOOD_S + time_s for time_s in gamma_times(0.5, 1.0, TRICKLE_S, rng)]
    return OpenLoop(list(with_lengths(flood + trickle, *LENGTHS, rng)))


@pytest.mark.parametrize(("seed", "instances"), [(0, 2), (1, 2), (2, 3), (3, 4)])
def test_groups_merge_in_a_flood_and_split_after_it(seed: int, instances: int) -> None:
    spec = ClusterSpec(instances, ITERATION, 8192, change=CHANGE)
    workload = flood_and_trickle(seed, instances)
    cluster = Cluster(spec, DEVICE, workload)
    events = itertools.count()

    def check() -> None:
        if next(events) % 8 == 0:  # after each, it takes longer than all the rest
            cluster.check_invariants()

    outcomes = cluster.run(check=check)
    assert {record.outcome for record in outcomes.records} == {Outcome.COMPLETED}
    assert len(outcomes.records) == len(workload.arrivals)
    changes = figures(outcomes)["changes"]
    assert changes["merges"] >= 1 and changes["splits"] >= 1
    for instance in cluster.instances.values():
        assert instance.state.stages == 1
        assert not instance.state.sequences
        assert instance.state.pool.free_count == instance.state.pool.usable == BLOCKS


@pytest.mark.parametrize(("seed", "instances"), [(0, 2), (1, 3), (2, 4)])
def test_static_pipelines_are_merged_at_the_start_and_never_split(
    seed: int, instances: int
) -> None:
    monitor = OverloadConfig(policy=OverloadPolicy.STATIC_PIPELINE)
    spec = ClusterSpec(instances, ITERATION, 8192, change=replace(CHANGE, monitor=monitor))
    cluster = Cluster(spec, DEVICE, flood_and_trickle(seed, instances))
    outcomes = cluster.run()
    cluster.check_invariants()
    assert {record.outcome for record in outcomes.records} == {Outcome.COMPLETED}
    assert [len(change.workers) for change in outcomes.changes.changes] == [2] * (instances // 2)
    assert all(change.decided_s < 3.0 for change in outcomes.changes.changes)


@pytest.mark.parametrize("seed", range(4))
def test_a_restore_is_cancelled_when_the_flood_returns(seed: int) -> None:
    rng = random.Random(seed)
    floods = [
        start_s + time_s
        for start_s in (0.0, FLOOD_S + 15.0)
        for time_s in gamma_times(9.0, 1.0, FLOOD_S, rng)
    ]
    trickle = [FLOOD_S + time_s for time_s in gamma_times(0.5, 1.0, 15.0, rng)]
    workload = OpenLoop(list(with_lengths(sorted(floods + trickle), *LENGTHS, rng)))
    slow = replace(CHANGE, costs=ChangeCosts(verify_bytes_per_s=SHAPE.layer_bytes / 15))
    cluster = Cluster(ClusterSpec(2, ITERATION, 8192, change=slow), DEVICE, workload)
    outcomes = cluster.run()
    cluster.check_invariants()
    assert {record.outcome for record in outcomes.records} == {Outcome.COMPLETED}
    actions = [decision.action for decision in outcomes.changes.decisions]
    assert Action.CALL_OFF in actions
    assert LOAD_IS_BACK in outcomes.changes.failed
    call_off = actions.index(Action.CALL_OFF)
    assert Action.SPLIT in actions[:call_off]
    back_s = outcomes.changes.decisions[call_off].now_s
    assert not any(
        change.decided_s < back_s < change.committed_s for change in outcomes.changes.changes
    )
