"""Requests move while groups change and workers die: tokens equal an undisturbed run."""

import os
from collections.abc import Callable
from contextlib import suppress

import pytest

from services.core.changeover.state import Changeover
from services.core.changeover.vocabulary import Command, Event
from services.core.planner import pin_handlers
from services.core.planner.events import EmitToken, RefuseRequest
from services.core.planner.pin_events import SequenceShipped
from services.core.planner.pin_handlers import PinHandlers
from services.core.planner.refusal import shipped
from services.core.shipments.shipping import Shipping
from tests.support.changeover_clients import Stream
from tests.support.fake_stage import Violated
from tests.support.rebalanced_world import RebalancedWorld

RUNS = int(os.environ.get("TIDESERVE_REBALANCED_SEEDS", "500"))
HANDED_RUNS = int(os.environ.get("TIDESERVE_HANDED_SEEDS", "30"))
STEPS = 25


def world_of(seed: int, handed: float = 0.0) -> RebalancedWorld:
    return RebalancedWorld(seed, handed, classes=seed % 3 == 0, divides=seed % 4 == 0)


def explore(world: RebalancedWorld) -> RebalancedWorld:
    for _ in range(STEPS):
        world.step()
    world.settle()
    return world


def test_random_moves_and_changes_preserve_tokens() -> None:
    """At least 500 scenarios of moves, merges, splits, partial splits and losses; each is audited:
    a request runs at one worker at a time.
    """
    worlds = [explore(world_of(seed)) for seed in range(RUNS)]
    assert sum(world.resuming.shipped for world in worlds) > RUNS / 2
    assert sum(world.committed for world in worlds) > RUNS
    assert sum(world.moves for world in worlds) > RUNS
    lost = sum(world._workers - len(world.members) for world in worlds)
    assert lost > RUNS / 10
    members = [member for world in worlds for member in world.members.values()]
    counts = [member.machine.shipping.counts for member in members]
    assert sum(count.received_total for count in counts) > RUNS / 4
    assert sum(count.kept_total for count in counts) > 0
    assert sum(world.checks["I15"] for world in worlds) > RUNS / 2
    assert all(world.checks["I5"] for world in worlds)


def test_random_hand_overs_and_changes_preserve_tokens() -> None:
    """The same with hand-overs; runs of `TIDESERVE_HANDED_SEEDS` seeds, 500 for a proof."""
    worlds = [explore(world_of(seed, handed=0.7)) for seed in range(HANDED_RUNS)]
    members = [member for world in worlds for member in world.members.values()]
    counts = [member.machine.shipping.counts for member in members]
    assert sum(count.handed_over_total for count in counts) > HANDED_RUNS
    assert sum(count.hand_overs_kept_total for count in counts) > HANDED_RUNS / 4
    assert sum(count.received_total for count in counts) > HANDED_RUNS / 2
    assert sum(world.moves for world in worlds) > HANDED_RUNS
    assert sum(world.committed for world in worlds) > HANDED_RUNS
    lost = sum(world._workers - len(world.members) for world in worlds)
    assert lost > HANDED_RUNS / 10
    assert sum(world.checks["I15"] for world in worlds) > HANDED_RUNS


def test_a_shipment_that_outlives_its_group_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless all shipments end at a change, blocks leak or KV is wrong."""
    monkeypatch.setattr(Shipping, "end_all", lambda _self, _reason: None)
    with pytest.raises((Violated, AssertionError, KeyError, IndexError)):
        for seed in range(RUNS):
            explore(world_of(seed))


def runs_on(patch: pytest.MonkeyPatch) -> None:
    """A worker returns a request whose KV it has sent, and continues it."""

    def ship(self: PinHandlers, event: SequenceShipped) -> list[RefuseRequest]:
        sequence = self.sequence_table.sequences[event.seq_id]
        self.sequence_table.pins.share(event.pin, sequence)
        return [shipped(sequence.seq_id, event.target)]

    patch.setitem(pin_handlers._HANDLERS, SequenceShipped, ship)


def runs_on_in_silence(patch: pytest.MonkeyPatch) -> None:
    """The same, without sending its tokens."""
    runs_on(patch)
    handle, returned = Changeover.handle, set[str]()

    def hush(self: Changeover, event: Event) -> list[Command]:
        commands = handle(self, event)
        returned.update(c.request_id for c in commands if isinstance(c, RefuseRequest))
        return [
            command
            for command in commands
            if not (isinstance(command, EmitToken) and command.request_id in returned)
        ]

    patch.setattr(Changeover, "handle", hush)


def starts_twice(patch: pytest.MonkeyPatch) -> None:
    """A gateway resumes a request at two workers, and reads from the first."""
    ask_again = RebalancedWorld._ask_again

    def ask_two(self: RebalancedWorld, stream: Stream) -> None:
        ask_again(self, stream)
        leaders = [group[0].worker_id for group in self.groups if self._serves(group)]
        for other in leaders if stream.owner else ():
            if other != stream.owner:
                self._moving(other).resume(stream)
                return

    patch.setattr(RebalancedWorld, "_ask_again", ask_two)


@pytest.mark.parametrize("mutate", [runs_on, runs_on_in_silence, starts_twice])
def test_a_request_at_two_workers_is_noticed_by_the_audit(
    mutate: Callable[[pytest.MonkeyPatch], None],
) -> None:
    assert any(_breaks_i15(seed, mutate) for seed in range(RUNS))


def _breaks_i15(seed: int, mutate: Callable[[pytest.MonkeyPatch], None]) -> bool:
    world = world_of(seed)
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        # Whatever else it breaks, the logs show it.
        with suppress(Violated, AssertionError, KeyError, IndexError):
            explore(world)
    return any(text.startswith("I15: ") for text in world.logs.audit().violations)
