"""Requests move while groups change and workers die: the tokens are those of a calm run."""

import os

import pytest

from services.core.shipments.shipping import Shipping
from tests.support.fake_stage import Violated
from tests.support.rebalanced_world import RebalancedWorld

RUNS = int(os.environ.get("TIDESERVE_REBALANCED_SEEDS", "500"))
HANDED_RUNS = int(os.environ.get("TIDESERVE_HANDED_SEEDS", "40"))
STEPS = 25


def explore(seed: int, handed: float = 0.0) -> RebalancedWorld:
    world = RebalancedWorld(seed, handed, classes=seed % 3 == 0, divides=seed % 4 == 0)
    for _ in range(STEPS):
        world.step()
    world.settle()
    return world


def test_every_request_has_its_tokens_whatever_moves_and_changes() -> None:
    """At least 500 scenarios of moves, merges, splits, partial splits and losses."""
    worlds = [explore(seed) for seed in range(RUNS)]
    assert sum(world.resuming.shipped for world in worlds) > RUNS / 2
    assert sum(world.committed for world in worlds) > RUNS
    assert sum(world.moves for world in worlds) > RUNS
    lost = sum(world._workers - len(world.members) for world in worlds)
    assert lost > RUNS / 10
    members = [member for world in worlds for member in world.members.values()]
    counts = [member.machine.shipping.counts for member in members]
    assert sum(count.received_total for count in counts) > RUNS / 4
    assert sum(count.kept_total for count in counts) > 0


def test_every_request_has_its_tokens_if_prompts_are_computed_elsewhere() -> None:
    """The same with hand-overs; runs of `TIDESERVE_HANDED_SEEDS` seeds, 500 for a proof."""
    worlds = [explore(seed, handed=0.7) for seed in range(HANDED_RUNS)]
    members = [member for world in worlds for member in world.members.values()]
    counts = [member.machine.shipping.counts for member in members]
    assert sum(count.handed_over_total for count in counts) > HANDED_RUNS
    assert sum(count.hand_overs_kept_total for count in counts) > HANDED_RUNS / 4
    assert sum(count.received_total for count in counts) > HANDED_RUNS / 2
    assert sum(world.moves for world in worlds) > HANDED_RUNS
    assert sum(world.committed for world in worlds) > HANDED_RUNS
    lost = sum(world._workers - len(world.members) for world in worlds)
    assert lost > HANDED_RUNS / 10


def test_a_shipment_that_outlives_its_group_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the end of all shipments at a change, blocks are kept or KV is wrong."""
    monkeypatch.setattr(Shipping, "end_all", lambda _self, _reason: None)
    with pytest.raises((Violated, AssertionError, KeyError, IndexError)):
        for seed in range(RUNS):
            explore(seed)
