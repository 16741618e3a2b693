"""Simulated workers with roles: no request is lost, and answers do not wait for prompts.

`TIDESERVE_ROLE_SEEDS=500 make test TESTS=tests/unit/tideserve/sim/test_roles.py` runs more worlds.
"""

import itertools
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.core.overload.events import OverloadConfig, OverloadPolicy, Rebalance
from services.core.overload.roles import RoleSetting
from services.core.queue_order import Scheduling
from services.core.role import Role
from services.core.scheduler.class_rules import ClassRules
from services.core.scheduler.state_config import StateConfig
from services.core.service import Service
from tests.unit.tideserve.sim.test_changes import DEVICE
from tests.unit.tideserve.sim.test_moves import CACHED, INSTANCES, ROOMY
from tideserve.cli.simulate import simulate
from tideserve.cli.simulation_options import simulations_of
from tideserve.sim.cluster import Cluster, ClusterSpec
from tideserve.sim.report import Outcome, Outcomes, figures
from tideserve.sim.workload import Length, OpenLoop, gamma_times, with_lengths

SEEDS = range(int(os.environ.get("TIDESERVE_ROLE_SEEDS", "8")))
SECONDS = 20.0
PROMPTS, ANSWERS = Length(120, 0.9, most=300), Length(60, 1.2, most=600)
SETTINGS = (
    RoleSetting(prefill=1, decode=1),
    RoleSetting(prefill=2, decode=2),
    RoleSetting(prefill=1, decode=3),
    RoleSetting(auto=True),
)


class _Roles(Cluster):
    """Records all roles that the memory manager writes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.written: list[dict[str, Role]] = []

    def _note_roles(self, roles: dict[str, Role]) -> None:
        self.written.append(roles)
        super()._note_roles(roles)


def spec_of(rng: random.Random, roles: RoleSetting) -> ClusterSpec:
    policy = rng.choice([OverloadPolicy.DROP, OverloadPolicy.DROP, OverloadPolicy.RECOMPUTE])
    rebalance = rng.choice(list(Rebalance))
    change = replace(ROOMY, monitor=OverloadConfig(policy=policy, rebalance=rebalance), roles=roles)
    scheduling = rng.choice([Scheduling.FCFS, Scheduling.SLO, Scheduling.PREFILL_FIRST])
    iteration = replace(
        CACHED,
        scheduling=scheduling,
        cost_model=DEVICE.model,
        max_batch_tokens=rng.choice([64, 512]),
    )
    scheduler = StateConfig(
        lateness=0.0,
        ttft=DEVICE.model,
        rules=ClassRules(scheduling),
        hand_over_min_tokens=rng.choice([1, 64, 128]),
    )
    return ClusterSpec(INSTANCES, iteration, 8192, scheduler, change=change)


def load_of(rng: random.Random) -> OpenLoop:
    """Requests, some of them with tight targets; a burst in some worlds."""
    rate = rng.choice([4.0, 10.0, 25.0])
    times = list(gamma_times(rate, rng.choice([1.0, 3.0]), SECONDS, rng))
    service = Service(ttft_s=1.0, tpot_s=rng.choice([0.03, 0.1]))
    arrivals = with_lengths(times, PROMPTS, ANSWERS, rng)
    return OpenLoop([arrival._replace(service=service) for arrival in arrivals])


def run(seed: int, roles: RoleSetting) -> tuple[_Roles, Outcomes]:
    """Simulate with checks; every request must end, and no block may stay in use."""
    rng = random.Random(seed)
    cluster = _Roles(spec_of(rng, roles), DEVICE, load_of(rng))
    events = itertools.count()

    def check() -> None:
        if next(events) % 64 == 0:
            cluster.check_invariants()

    outcomes = cluster.run(check=check)
    assert {record.outcome for record in outcomes.records} == {Outcome.COMPLETED}, seed
    for instance in cluster.instances.values():
        assert not instance.state.sequences and not instance.state.sequence_table.pins
        assert instance.state.pool.free_count == instance.state.pool.usable
    return cluster, outcomes


@pytest.mark.timeout(300 + 10 * len(SEEDS))
def test_requests_complete_with_any_roles() -> None:
    """Hand-overs, moves, merges, splits, overloads and changes of roles under load."""
    moved = changes = 0
    for seed in SEEDS:
        cluster, outcomes = run(seed, SETTINGS[seed % len(SETTINGS)])
        moved += outcomes.changes.shipped
        changes += len(cluster.written)
        for roles in cluster.written:
            assert not roles or set(roles.values()) == {Role.PREFILL, Role.DECODE}
    assert moved > 10 * len(SEEDS) and changes >= len(SEEDS) // 2


HEAVY: dict[str, Any] = {
    "instances": 2,
    "duration_s": 60,
    "profile": "A100-14B",
    "lateness": 0,
    "queue_deadline_s": 3600,
    "prefix_caching": True,
    "hand_over_min_tokens": 256,
    "service": {"ttft_s": 2.0, "tpot_s": 0.1},
    "batch": {"clients": 0, "prompt": 100, "output": 100},
    "workload": {
        "kind": "gamma",
        "rate_per_s": 3,
        "prompt": {"mean": 1000, "cv": 1.0, "most": 8000},
        "output": {"mean": 250, "cv": 0.8, "most": 1500},
    },
}
"""Long prompts beside long answers, as in chats about documents."""


def heavy_figures(**changes: Any) -> dict[str, Any]:
    """The figures of `HEAVY` with other options."""
    (prepared,) = simulations_of({**HEAVY, **changes}, Path("roles.yaml")).values()
    (system,) = prepared.systems
    result = figures(simulate(prepared, system))
    assert result["completed"] == result["sent"] > 150
    return result


def p99_gap(result: dict[str, Any]) -> float:
    gap: float = result["classes"]["online"]["inter_token_s"]["p99"]
    return gap


def test_answers_do_not_wait_for_prompts_of_other_workers() -> None:
    mixed, split = heavy_figures(), heavy_figures(roles="prefill=1,decode=1")
    assert mixed["changes"]["moved_requests"] == 0
    assert split["changes"]["moved_requests"] > 0.6 * split["sent"]
    assert p99_gap(split) <= 0.4 * p99_gap(mixed)
    for result in (mixed, split):
        assert result["classes"]["online"]["slo_attainment"]["ttft"] > 0.97


def test_auto_matches_the_better_setting() -> None:
    """Roles where whole prompts delay output; mixed where chunks keep the targets."""
    chunked = heavy_figures(roles="auto", max_batch_tokens=256)
    assert chunked["changes"]["moved_requests"] == 0
    whole = heavy_figures(roles="auto")
    assert whole["changes"]["moved_requests"] > 0.5 * whole["sent"]
    assert p99_gap(whole) <= 0.5 * p99_gap(heavy_figures())


def test_off_equals_mixed_workers() -> None:
    """Without roles, nothing that belongs to them has an effect."""
    rng = random.Random(3)
    spec = spec_of(rng, RoleSetting())
    load = load_of(rng)
    plain = Cluster(spec, DEVICE, load).run()
    scheduler = replace(spec.scheduler, hand_over_min_tokens=1)
    other = Cluster(replace(spec, scheduler=scheduler), DEVICE, load).run()
    ends = [[record.end_s for record in outcomes.records] for outcomes in (plain, other)]
    assert ends[0] == ends[1] and len(ends[0]) > 50


@pytest.mark.parametrize("setting", ["", "auto,mixed", "prefill=1"])
def test_invalid_roles_are_refused(setting: str) -> None:
    with pytest.raises(Exception, match=r"'roles' in roles\.yaml"):
        heavy_figures(roles=setting)
