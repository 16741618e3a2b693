"""Each rule of slabs from other workers is needed: without it, a scenario goes wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from services.core.groups import holders
from services.core.groups.layer_map import Stage
from services.core.groups.vocabulary import Group, GroupPhase, Member
from services.core.ids import group_id_of
from services.worker.engine.memory.layer_slab import LayerSlab, SlabState
from services.worker.engine.pipeline.connections import Connections
from services.worker.engine.pipeline.restoring import ParameterSource
from services.worker.engine.transfer.mover import PATIENCE_MIN_S
from services.worker.ipc import MemberPlan
from tests.support.engine_group import EngineGroup
from tests.support.engine_networks import QueueNetwork
from tests.support.fake_model import LAYERS
from tests.support.integer_group import member, memory
from tests.unit.core.groups.test_holders import records, worker
from tests.unit.worker.engine.pipeline.conftest import MakeGroup
from tests.unit.worker.engine.pipeline.test_holders import (
    MISSING,
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
    assert group.network.now_s() - since_s < PATIENCE_MIN_S
    check_restored(group, attempt)


def stable_groups(group: EngineGroup, dead: MemberPlan, _patch: Patch) -> None:
    """The dead worker's lease has not ended, so it has a DEGRADED group."""

    def one(*stages: Stage, phase: GroupPhase = GroupPhase.STABLE, attempt: str = "") -> Group:
        members = tuple(
            Member(s.worker_id, f"{s.worker_id}-1", s.first_layer, s.end_layer) for s in stages
        )
        return Group(group_id_of(stages[0].worker_id), 7, phase, members, "m", attempt)

    left, lost = PAIRS[0]
    source = one(left, phase=GroupPhase.DEGRADED, attempt="t")
    workers = [replace(worker(f"w{number}"), num_layers=LAYERS) for number in range(4)]
    known = records([source, one(lost, phase=GroupPhase.DEGRADED), one(*PAIRS[1])], *workers)
    chosen = holders.holders_for(known, [source], [one(*SURVIVOR[0])])
    stages = [Stage(m.worker_id, m.first_layer, m.end_layer) for m in chosen]
    plans = [dead if stage == lost else group._plan_of(stage) for stage in stages]
    check_ready_at_once(group, prepare(group, SURVIVOR, plans))
    assert restored(group, "w0") == {"peer": 3}


def verified_digests(group: EngineGroup, _dead: MemberPlan, patch: Patch) -> None:
    """A byte of each piece is changed on its way."""
    pack, rng = ParameterSource._pack, group.rng

    def changed(self: ParameterSource, slab: str, offset_bytes: int, target: Any) -> None:
        pack(self, slab, offset_bytes, target)
        target[rng.randrange(len(target))] ^= 1 << rng.randrange(8)

    patch.setattr(ParameterSource, "_pack", changed)
    check_restored(group, prepare(group, SURVIVOR, [PAIRS[1][1]]))
    for slab in MISSING:
        ours, theirs = (memory(group, name).slabs[slab].bytes_to_read() for name in ("w0", "w3"))
        assert torch.equal(ours, theirs)


def ended_connections(group: EngineGroup, _dead: MemberPlan, _patch: Patch) -> None:
    """The holder dies after it was asked for slabs."""
    attempt = prepare(group, SURVIVOR, [PAIRS[1][1]])
    group.run_until(lambda: member(group, "w0")._restoring._fetches)
    group.lose("w3")
    group.run_until(lambda: member(group, "w2").links.epoch == group.epoch)
    check_ready_at_once(group, attempt)


def _any_group(patch: Patch) -> None:
    patch.setattr(holders, "_is_stable", lambda _group: True)


def _any_bytes(patch: Patch) -> None:
    def finish(self: LayerSlab, _max_bytes: int | None = None) -> bool:
        self._state = SlabState.RESIDENT
        return True

    patch.setattr(LayerSlab, "finish", finish)


def _connected_for_ever(patch: Patch) -> None:
    has, known = Connections.has, set[tuple[int, str]]()

    def once(self: Connections, peer: MemberPlan) -> bool:
        key = id(self), peer.incarnation
        if has(self, peer):
            known.add(key)
        return key in known

    patch.setattr(Connections, "has", once)


Scenario = Callable[[EngineGroup, MemberPlan, Patch], None]
RULES: dict[str, tuple[Scenario, Callable[[Patch], None]]] = {
    "only stable groups have holders": (stable_groups, _any_group),
    "the digest of each slab is verified": (verified_digests, _any_bytes),
    "the end of a connection is that of its fetches": (ended_connections, _connected_for_ever),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(
    rule: str, seed: int, make_group: MakeGroup, monkeypatch: Patch
) -> None:
    scenario, take_out = RULES[rule]
    with monkeypatch.context() as patch:
        scenario(*broken_pairs(make_group, seed), patch)
    group, dead = broken_pairs(make_group, seed)
    take_out(monkeypatch)
    with pytest.raises(AssertionError):
        scenario(group, dead, monkeypatch)
