"""A member that leaves a change early notifies the members that wait for it."""

import pytest

from services.core.changeover import vocabulary
from services.core.changeover.configuration import GroupStages
from services.core.changeover.frames import (
    Activations,
    Adopt,
    AllAdopted,
    Drained,
    EpochAbandoned,
    FreeKv,
    Joined,
    KvEnded,
    SendKv,
    StageChunk,
)
from services.core.changeover.route import Transfer
from services.core.changeover.state import Changeover, MemberConfig
from services.core.groups.layer_map import Stage
from services.core.planner.config import IterationConfig
from services.core.planner.events import RequestArrived
from services.core.request import Limits, Request, Sampling

LAYERS = 4
BOTH = (GroupStages("g-a", 1, (Stage("a", 0, 2), Stage("b", 2, 4))),)
APART = (
    GroupStages("g-a", 2, (Stage("a", 0, LAYERS),)),
    GroupStages("g-b", 2, (Stage("b", 0, 2), Stage("c", 2, LAYERS))),
)
LOST = (GroupStages("g-b", 3, (Stage("b", 0, 2),)),)


def member(name: str) -> Changeover:
    planner = IterationConfig(4, 16, 32, 4, 10)
    return Changeover.of(MemberConfig(name, LAYERS, tied_embeddings=False, planner=planner))


def enter(machine: Changeover, groups: tuple[GroupStages, ...]) -> list[vocabulary.Command]:
    """Commit, drain and switch; returns all commands."""
    commands = machine.handle(vocabulary.ConfigurationCommitted(0.0, groups))
    commands += machine.handle(vocabulary.TurnTaken(0.0))
    assert isinstance(commands[-1], vocabulary.SwitchStage)
    return [*commands, *machine.handle(vocabulary.StageSwitched(16, departed=False))]


def received(machine: Changeover, peer: str, frame: object) -> list[vocabulary.Command]:
    return machine.handle(vocabulary.FrameReceived(0.0, peer, frame))  # type: ignore[arg-type]


def frames_to(peer: str, commands: list[vocabulary.Command]) -> list[object]:
    return [c.frame for c in commands if isinstance(c, vocabulary.SendFrame) and c.peer == peer]


def take_own(machine: Changeover, commands: list[vocabulary.Command]) -> None:
    """Deliver the frames that "a" sends to itself."""
    for frame in frames_to("a", commands):
        take_own(machine, received(machine, "a", frame))


def test_a_member_that_expects_requests_announces_its_departure() -> None:
    b = member("b")
    enter(b, APART)
    assert not b.settled, "a has not said that it hands over no more"
    assert frames_to("a", enter(b, LOST)) == [EpochAbandoned()]


def test_a_settled_member_does_not_announce_its_departure() -> None:
    b = member("b")
    enter(b, APART)
    received(b, "c", Joined(16, 0))
    for peer in "ac":
        received(b, peer, AllAdopted())
    b.handle(vocabulary.TurnTaken(0.0))
    assert b.settled
    assert frames_to("a", enter(b, LOST)) == []


@pytest.mark.parametrize("entered", [True, False])
def test_requests_handed_to_a_member_that_left_come_back(entered: bool) -> None:
    """Whether or not the peer had entered the epoch: a request without KV runs at once."""
    a = member("a")
    enter(a, BOTH)
    received(a, "b", Joined(16, 0))
    for name in ("r", "s"):
        request = Request(name, (5,) * 4, Sampling(), Limits(4), 0.0)
        a.handle(RequestArrived(0.0, request))
    received(a, "b", AllAdopted())
    commands = enter(a, APART)
    (adopt,) = [frame for frame in frames_to("b", commands) if isinstance(frame, Adopt)]
    if entered:
        received(a, "b", AllAdopted())
    received(a, "c", AllAdopted())
    a.handle(vocabulary.TurnTaken(0.0))
    assert not a.settled
    take_own(a, received(a, "b", EpochAbandoned()))
    a.handle(vocabulary.TurnTaken(0.0))
    assert a.settled
    assert adopt.sequence.request.request_id in {sequence.seq_id for sequence in a.planner.waiting}
    a.check_invariants()


def test_kv_of_a_stage_that_keeps_its_layers_is_sent() -> None:
    """After a split "b" runs all layers, of which "a" wants some: nothing departs from "b"."""
    b = member("b")
    enter(b, BOTH)
    chunk = StageChunk("r", 0, 4, 1, None)
    received(b, "a", Activations(1, (), (chunk,)))
    apart = tuple(GroupStages(f"g-{name}", 2, (Stage(name, 0, LAYERS),)) for name in "ab")
    received(b, "a", Drained(()))
    enter(b, apart)
    wanted = SendKv("r", "2/r/b>a", Transfer("b", "a", 2, LAYERS), 1)
    (sent,) = received(b, "a", wanted)
    assert isinstance(sent, vocabulary.SendBlocks)
    received(b, "a", FreeKv("r", whole_table=True))
    again = SendKv("r", "2/r/b>a again", Transfer("b", "a", 2, LAYERS), 1)
    assert frames_to("a", received(b, "a", again)) == [
        KvEnded("r", again.transfer_id, intact=False)
    ]
