"""Requests move while groups change and workers die: the tokens are those of a calm run."""

import os

import pytest

from services.core.planner import pin_handlers
from services.core.planner.events import Command
from services.core.planner.pin_events import SequenceShipped
from services.core.planner.pin_handlers import PinHandlers
from services.core.planner.refusal import shipped
from services.core.shipments.shipping import Shipping
from tests.support.fake_stage import Violated
from tests.support.rebalanced_world import RebalancedWorld

RUNS = int(os.environ.get("TIDESERVE_REBALANCED_SEEDS", "500"))
STEPS = 25


def explore(seed: int) -> RebalancedWorld:
    world = RebalancedWorld(seed, classes=seed % 3 == 0, divides=seed % 4 == 0)
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


def test_a_shipment_that_outlives_its_group_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the end of all shipments at a change, blocks are kept or KV is wrong."""
    monkeypatch.setattr(Shipping, "end_all", lambda _self, _reason: None)
    with pytest.raises((Violated, AssertionError, KeyError, IndexError)):
        for seed in range(RUNS):
            explore(seed)


def test_a_request_that_runs_on_at_its_source_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """I15: the source ends the request before its gateway starts it elsewhere."""

    def return_only(_handlers: PinHandlers, event: SequenceShipped) -> list[Command]:
        return [shipped(event.seq_id, event.target)]

    monkeypatch.setitem(pin_handlers._HANDLERS, SequenceShipped, return_only)
    with pytest.raises((Violated, AssertionError, KeyError, IndexError)):
        for seed in range(RUNS):
            explore(seed)
