"""A configuration ends once nothing of it is in flight and no stage holds its blocks."""

import pytest

from services.core.changeover import vocabulary
from services.core.changeover.configuration import GroupStages
from services.core.changeover.frames import Activations, Adopt, AllAdopted, Drained, activations
from services.core.changeover.state import (
    DRAIN_TIMEOUT_S,
    DRAINED_TIMEOUT_S,
    Changeover,
    MemberPhase,
)
from services.core.groups.layer_map import Stage
from services.core.planner.config import IterationConfig
from services.core.planner.events import IterationFinished, RequestArrived
from services.core.planner.state import PlannerState
from services.core.request import Limits, Request, Sampling

LAYERS = 4
TOGETHER = (Stage("a", 0, 2), Stage("b", 2, 4))


def groups(epoch: int, *stages: tuple[Stage, ...]) -> tuple[GroupStages, ...]:
    return tuple(GroupStages(f"g-{members[0].worker_id}", epoch, members) for members in stages)


APART = groups(2, (Stage("a", 0, LAYERS),), (Stage("b", 0, LAYERS),))
LEFT = groups(2, (Stage("b", 2, LAYERS),))


class Member:
    """A machine whose memory always has 16 blocks."""

    def __init__(self, name: str) -> None:
        config = IterationConfig(4, 16, max_batch_tokens=32, max_running=4, max_waiting=4)
        self.name = name
        self.machine = Changeover(name, LAYERS, PlannerState(config))
        self.switches = 0

    def do(self, event: vocabulary.Event) -> list[vocabulary.SendFrame]:
        """Make it handle an event; returns the frames that it sends."""
        sent = []
        for command in self.machine.handle(event):
            if isinstance(command, vocabulary.SendFrame):
                sent.append(command)
            elif isinstance(command, vocabulary.SwitchStage):
                self.switches += 1
                sent += self.do(vocabulary.StageSwitched(16, departed=False))
        return sent

    def turn(self, now_s: float = 0.2) -> list[vocabulary.SendFrame]:
        return self.do(vocabulary.TurnTaken(now_s))

    def switched(self) -> int:
        """The number of switches after its turn."""
        self.turn()
        return self.switches

    def hear(self, new: tuple[GroupStages, ...]) -> None:
        self.do(vocabulary.ConfigurationCommitted(0.0, new))


class Pair:
    """ "a" leads a pipeline with "b", in which "r" has begun to run."""

    def __init__(self) -> None:
        self.a, self.b = Member("a"), Member("b")
        for member in (self.a, self.b):
            member.hear(groups(1, TOGETHER))
        for sent in self.b.turn() + self.a.turn():
            self.bring(sent, {"a": "b", "b": "a"}[sent.peer])
        self.a.turn()
        assert self.a.machine.settled and self.b.machine.settled
        self.arrive("r", 6)
        self.number = self.launch()

    def bring(self, sent: vocabulary.SendFrame, peer: str) -> list[vocabulary.SendFrame]:
        to = self.a if sent.peer == "a" else self.b
        return to.do(vocabulary.FrameReceived(0.1, peer, sent.frame))

    def arrive(self, name: str, tokens: int) -> None:
        request = Request(name, (5,) * tokens, Sampling(), Limits(4), 0.0)
        self.a.do(RequestArrived(0.0, request))

    def launch(self) -> int:
        """Plan a microbatch, which reaches "b"."""
        microbatch = self.a.machine.plan(0.1)
        assert microbatch is not None
        self.bring(vocabulary.SendFrame("b", activations(microbatch, 0.0)), "a")
        return microbatch.number

    def part(self) -> None:
        self.a.hear(APART)
        self.b.hear(APART)


def drained(sent: list[vocabulary.SendFrame]) -> list[vocabulary.SendFrame]:
    return [frame for frame in sent if isinstance(frame.frame, Drained)]


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_a_leader_waits_for_microbatches_in_flight(pair: Pair) -> None:
    pair.part()
    pair.a.turn()
    pair.b.turn()
    assert pair.a.machine.phase is pair.b.machine.phase is MemberPhase.DRAINING
    pair.a.do(IterationFinished(0.1, {"r": 7}, pair.number))
    (notice,) = drained(pair.a.turn())
    assert notice.frame == Drained(())
    assert pair.a.switches == 2 and pair.b.switches == 1
    pair.bring(notice, "a")
    assert pair.b.switched() == 2
    assert pair.b.machine.planner.table.seq_ids == ("r",)


def test_blocks_of_discarded_microbatches_are_free_at_every_stage(pair: Pair) -> None:
    pair.part()
    sent = pair.a.turn(DRAIN_TIMEOUT_S + 0.1)
    pair.b.turn(DRAIN_TIMEOUT_S + 0.1)
    assert pair.b.switches == 1, "only the leader knows what is to be freed"
    (notice,) = drained(sent)
    assert notice.frame == Drained(("r",))
    pair.bring(notice, "a")
    assert pair.b.switched() == 2
    for member in (pair.a, pair.b):
        assert member.machine.planner.table.seq_ids == ()
        assert member.machine.planner.pool.taken_count == 0
    assert "r" in pair.a.machine.planner.sequences


def test_blocks_of_a_request_that_never_ran_are_free_before_the_next_leader_counts(
    pair: Pair,
) -> None:
    """Requests are divided by the blocks that they hold then."""
    pair.arrive("long", 40)
    pair.arrive("late", 8)
    number = pair.launch()
    pair.part()
    pair.a.do(IterationFinished(0.1, {"r": 7}, pair.number))
    pair.a.do(IterationFinished(0.1, {}, number))
    late = pair.a.machine.planner.sequences["late"]
    assert late.blocks and not late.computed
    (notice,) = drained(pair.a.turn())
    assert notice.frame == Drained(("late",))
    assert pair.a.machine.planner.table.seq_ids == ("r", "long")
    assert not late.blocks
    pair.bring(notice, "a")
    assert pair.b.machine.planner.table.seq_ids == ("r", "long")


def test_a_stage_switches_without_its_leader_after_a_deadline(pair: Pair) -> None:
    pair.part()
    pair.b.turn(DRAINED_TIMEOUT_S)
    assert pair.b.switches == 1
    pair.b.turn(DRAINED_TIMEOUT_S + 0.1)
    assert pair.b.switches == 2


def test_a_stage_does_not_wait_for_a_lost_leader_of_another_group(pair: Pair) -> None:
    pair.part()
    assert pair.b.switched() == 1
    pair.b.do(vocabulary.PeersLost(0.2, frozenset({"a"})))
    assert pair.b.switched() == 2


def test_a_stage_waits_for_a_lost_leader_of_its_new_group(pair: Pair) -> None:
    pair.b.do(vocabulary.PeersLost(0.2, frozenset({"a"})))
    pair.b.hear(groups(2, TOGETHER))
    assert pair.b.switched() == 1
    pair.b.do(vocabulary.FrameReceived(0.3, "a", Drained(())))
    assert pair.b.switched() == 2


def test_a_lost_member_is_not_waited_for(pair: Pair) -> None:
    pair.b.hear(LEFT)
    assert pair.b.switched() == 2
    assert pair.b.machine.planner.pool.taken_count == 0


def test_nothing_runs_after_the_departure_of_its_leader(pair: Pair) -> None:
    pair.part()
    pair.bring(vocabulary.SendFrame("b", Drained(())), "a")
    frame = Activations(pair.number + 1, (), ())
    assert pair.b.machine.handle(vocabulary.FrameReceived(0.1, "a", frame)) == []


def test_a_stage_does_not_wait_for_a_leader_that_has_left_to_adopt(pair: Pair) -> None:
    """A request reached the stage, and its leader left while the request was in flight."""
    request = Request("late", (5,) * 6, Sampling(), Limits(4), 0.0)
    (sent,) = pair.b.do(RequestArrived(0.1, request))
    assert isinstance(sent.frame, Adopt)
    pair.part()
    pair.a.do(IterationFinished(0.1, {"r": 7}, pair.number))
    frames = [frame for frame in pair.a.turn() if frame.peer == "b"]
    (first,) = drained(frames)
    pair.bring(first, "a")
    assert pair.b.switched() == 1, "word that the leader has adopted it may be on its way"
    for notice in frames:
        if isinstance(notice.frame, AllAdopted):
            pair.bring(notice, "a")
    assert pair.b.switched() == 2
    assert "late" in pair.b.machine.planner.sequences
