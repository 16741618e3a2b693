"""Simulated requests that move between workers with their KV: none is lost, fewer are preempted."""

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.core.overload.events import Action, OverloadConfig, OverloadPolicy, Rebalance
from services.core.scheduler.state_config import StateConfig
from tests.unit.tideserve.sim.test_changes import CHANGE, DEVICE, ITERATION, SHAPE
from tideserve.cli.simulate import simulate
from tideserve.cli.simulation_options import simulations_of
from tideserve.sim.change_spec import ChangeSpec
from tideserve.sim.cluster import Cluster, ClusterSpec
from tideserve.sim.report import Outcome, Outcomes, figures
from tideserve.sim.workload import Length, OpenLoop, gamma_times, with_lengths

BLOCKS = 300
CACHED = replace(ITERATION, num_blocks=BLOCKS, prefix_caching=True)
ROOMY = replace(CHANGE, arena_bytes=SHAPE.parameter_bytes(1) + BLOCKS * 16 * 4 * 400)
# Answers of very different lengths, so that workers fill up at different times.
LENGTHS = (Length(120, 0.5, most=300), Length(160, 1.5, most=1200))
INSTANCES, SECONDS = 4, 24.0
BUSY = 15.0
"""Requests per second that fill the workers."""
SPREAD: dict[str, Any] = {
    "instances": 8,
    "duration_s": 150,
    "profile": "A100-14B",
    "memory": "40GB",
    "lateness": 0,
    "queue_deadline_s": 3600,
    "prefix_caching": True,
    "workload": {
        "kind": "gamma",
        "rate_per_s": 6,
        "cv": 1.5,
        "prompt": {"mean": 500, "cv": 1.0, "most": 4000},
        "output": {"mean": 1500, "cv": 1.2, "most": 12000},
    },
}
"""A load that fits into all workers together, with answers of very different lengths."""


def spec_of(rebalance: Rebalance, policy: OverloadPolicy) -> ClusterSpec:
    monitor = OverloadConfig(policy=policy, rebalance=rebalance)
    change: ChangeSpec = replace(ROOMY, monitor=monitor)
    return ClusterSpec(INSTANCES, CACHED, 8192, StateConfig(lateness=0.0), change=change)


def uneven(seed: int, rate_per_s: float) -> OpenLoop:
    rng = random.Random(seed)
    times = gamma_times(rate_per_s, 1.0, SECONDS, rng)
    return OpenLoop(list(with_lengths(times, *LENGTHS, rng)))


def run(
    seed: int,
    rebalance: Rebalance,
    policy: OverloadPolicy = OverloadPolicy.RECOMPUTE,
    rate_per_s: float = BUSY,
) -> Outcomes:
    """Simulate with checks; every request must end, and no block may stay in use."""
    cluster = Cluster(spec_of(rebalance, policy), DEVICE, uneven(seed, rate_per_s))
    events = itertools.count()

    def check() -> None:
        if next(events) % 64 == 0:
            cluster.check_invariants()

    outcomes = cluster.run(check=check)
    assert {record.outcome for record in outcomes.records} == {Outcome.COMPLETED}
    for instance in cluster.instances.values():
        assert not instance.state.sequences and not instance.state.sequence_table.pins
        assert instance.state.pool.free_count == instance.state.pool.usable
    return outcomes


@pytest.mark.parametrize("policy", [OverloadPolicy.RECOMPUTE, OverloadPolicy.DROP])
def test_every_request_ends_while_others_move(policy: OverloadPolicy) -> None:
    moved = 0
    for seed in range(3):
        outcomes = run(seed, Rebalance.ALL, policy)
        changes = figures(outcomes)["changes"]
        moved += changes["moved_requests"]
        moves = [d for d in outcomes.changes.decisions if d.action is Action.MOVE]
        assert len(moves) >= changes["moves_of_none"]
    assert moved > 3


def spread(policy: OverloadPolicy, rebalance: Rebalance) -> dict[str, Any]:
    """The figures of `SPREAD`."""
    data = {**SPREAD, "overload_policy": policy.value, "rebalance": rebalance.value}
    (prepared,) = simulations_of(data, Path("spread.yaml")).values()
    result = figures(simulate(prepared, policy.value))
    assert result["completed"] == result["sent"] > 900
    return result


def test_moves_halve_the_preemptions() -> None:
    off = spread(OverloadPolicy.RECOMPUTE, Rebalance.OFF)
    stuck = spread(OverloadPolicy.RECOMPUTE, Rebalance.STUCK)
    assert off["preemptions"] > 100
    assert stuck["preemptions"] <= 0.5 * off["preemptions"]
    assert 0 < stuck["changes"]["moved_requests"] < 0.2 * stuck["sent"]


def test_the_policy_migrate_merges_nothing() -> None:
    outcomes = run(1, Rebalance.OFF, OverloadPolicy.MIGRATE)
    actions = {decision.action for decision in outcomes.changes.decisions}
    assert Action.MOVE in actions and Action.MERGE not in actions
    assert not outcomes.changes.changes and outcomes.changes.shipped


def test_moves_spare_a_merge() -> None:
    """A group that is full beside emptier ones merges less often if its requests may move."""
    merges = {
        rebalance: spread(OverloadPolicy.DROP, rebalance)["changes"]["merges"]
        for rebalance in (Rebalance.OFF, Rebalance.STUCK)
    }
    assert merges[Rebalance.STUCK] < merges[Rebalance.OFF]


def test_without_moves_nothing_changes() -> None:
    """Off is off: the same decisions and times as before moves existed."""
    off = run(2, Rebalance.OFF, OverloadPolicy.DROP)
    plain = Cluster(
        replace(spec_of(Rebalance.OFF, OverloadPolicy.DROP)), DEVICE, uneven(2, BUSY)
    ).run()
    assert [record.end_s for record in off.records] == [record.end_s for record in plain.records]
    assert off.changes.shipped == 0
    assert Action.MOVE not in {decision.action for decision in off.changes.decisions}
