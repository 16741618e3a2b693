"""Rules that keep survivors from waiting for dead workers: without them, they wait longer."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from services.core.groups import holders
from services.core.groups.layer_map import Stage
from services.core.groups.vocabulary import Group, GroupPhase, Member
from services.core.ids import group_id_of
from services.worker.engine.pipeline.connections import ANSWER_SHARE, Connections
from services.worker.ipc import MemberPlan
from tests.support.engine_group import EngineGroup
from tests.support.engine_networks import QueueNetwork
from tests.support.fake_model import LAYERS
from tests.support.integer_group import member
from tests.unit.core.groups.test_holders import records, worker
from tests.unit.worker.engine.pipeline.conftest import MakeGroup
from tests.unit.worker.engine.pipeline.test_holders import (
    LIMIT_S,
    PAIRS,
    SURVIVOR,
    check_restored,
    lose_of_pairs,
    prepare,
    restored,
)

Patch = pytest.MonkeyPatch
SEEDS = range(3)
TURN_S = 0.002


def broken_pairs(make_group: MakeGroup, seed: int) -> tuple[EngineGroup, MemberPlan]:
    return lose_of_pairs(make_group(workers=4, seed=seed, network=QueueNetwork(TURN_S)))


def check_ready_at_once(group: EngineGroup, attempt: str) -> None:
    """The survivor waits for no timeout."""
    since_s = group.network.now_s()
    assert group.await_answers(attempt, SURVIVOR)
    assert group.network.now_s() - since_s < ANSWER_SHARE * LIMIT_S / 2
    check_restored(group, attempt)


def stable_groups(group: EngineGroup, dead: MemberPlan) -> None:
    """The dead worker's lease has not ended, so it has a DEGRADED group."""

    def group_of(*stages: Stage, phase: GroupPhase = GroupPhase.STABLE, attempt: str = "") -> Group:
        members = tuple(
            Member(s.worker_id, f"{s.worker_id}-1", s.first_layer, s.end_layer) for s in stages
        )
        return Group(group_id_of(stages[0].worker_id), 7, phase, members, "m", attempt)

    left, lost = PAIRS[0]
    source = group_of(left, phase=GroupPhase.DEGRADED, attempt="t")
    workers = [replace(worker(f"w{number}"), num_layers=LAYERS) for number in range(4)]
    known = records(
        [source, group_of(lost, phase=GroupPhase.DEGRADED), group_of(*PAIRS[1])], *workers
    )
    chosen = holders.holders_for(known, [source], [group_of(*SURVIVOR[0])])
    stages = [Stage(m.worker_id, m.first_layer, m.end_layer) for m in chosen]
    plans = [dead if stage == lost else group._plan_of(stage) for stage in stages]
    check_ready_at_once(group, prepare(group, SURVIVOR, plans))
    assert restored(group, "w0") == {"peer": 3}


def ended_connections(group: EngineGroup, _dead: MemberPlan) -> None:
    """The holder dies after it was asked for slabs."""
    attempt = prepare(group, SURVIVOR, [PAIRS[1][1]])
    group.run_until(lambda: member(group, "w0")._restoring._fetches)
    group.lose("w3")
    group.run_until(lambda: member(group, "w2").links.epoch == group.epoch)
    check_ready_at_once(group, attempt)


def _any_group(patch: Patch) -> None:
    patch.setattr(holders, "_keeps_layers", lambda _group: True)


def _connected_for_ever(patch: Patch) -> None:
    has, known = Connections.has, set[tuple[int, str]]()

    def once(self: Connections, peer: MemberPlan) -> bool:
        key = id(self), peer.incarnation
        if has(self, peer):
            known.add(key)
        return key in known

    patch.setattr(Connections, "has", once)


Scenario = Callable[[EngineGroup, MemberPlan], None]
RULES: dict[str, tuple[Scenario, Callable[[Patch], None]]] = {
    "only stable groups have holders": (stable_groups, _any_group),
    "the end of a connection is that of its fetches": (ended_connections, _connected_for_ever),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(
    rule: str, seed: int, make_group: MakeGroup, monkeypatch: Patch
) -> None:
    scenario, take_out = RULES[rule]
    scenario(*broken_pairs(make_group, seed))
    group, dead = broken_pairs(make_group, seed)
    take_out(monkeypatch)
    with pytest.raises(AssertionError):
        scenario(group, dead)
