"""Batch work is parked while its worker does not lead, and resumes afterwards or at the leader."""

import pytest

from services.core.changeover import vocabulary
from services.core.changeover.configuration import GroupStages
from services.core.changeover.frames import Adopt
from services.core.changeover.state import MemberPhase
from services.core.groups.layer_map import Stage
from services.core.planner.events import (
    RefuseRequest,
    RequestAborted,
    RequestArrived,
    RequeueChecked,
)
from services.core.planner.requeue import REQUEUE_AFTER_S
from services.core.planner.sequence import Phase
from services.core.queue_order import Scheduling
from services.core.request import Limits, Request, Sampling
from services.core.service import Service, ServiceClass
from tests.support.changeover_script import LAYERS, Groups, Script, groups

BATCH = Service(ServiceClass.BATCH)
APART, MERGED, SPLIT = groups(1, "a", "b"), groups(2, "ab"), groups(3, "a", "b")


def merged(scheduling: Scheduling = Scheduling.PRIORITY, shelf_max_s: float = 60.0) -> Script:
    """ "b" had an online request "o" and batch work, and follows "a" now; the KV of "o" has moved.
    "m" and "n" have had KV, "w" waits for a place.
    """
    script = Script("ab", scheduling=scheduling, shelf_max_s=shelf_max_s).change(APART)
    script.ask("b", "o", 8, most=20)
    for name in "mn":
        script.ask("b", name, 8, service=BATCH)
    script.launch("b")
    script.ask("b", "w", 8, service=BATCH)
    script.change(MERGED)
    return script


def leaving(epoch: int, name: str) -> Groups:
    """Both lead their own groups, and one of them is about to leave."""
    stages = {name: (Stage(name, 0, LAYERS),) for name in "ab"}
    left = frozenset({name})
    return tuple(GroupStages(f"g-{name}", epoch, stages[name], left & {name}) for name in "ab")


@pytest.mark.parametrize("scheduling", [Scheduling.PRIORITY, Scheduling.SLO])
def test_batch_work_is_parked_without_kv_and_online_work_moves(scheduling: Scheduling) -> None:
    script = merged(scheduling)
    assert script.names_at("a") == ["o"] and sorted(script.names_at("b")) == ["m", "n", "w"]
    follower = script.members["b"]
    assert follower.settled and not follower.busy, "it needs no turns until they are due"
    resting = follower.planner.sequences.values()
    assert all(sequence.phase is Phase.WAITING and not sequence.blocks for sequence in resting)
    assert all(sequence.output_count == 1 for sequence in resting if sequence.seq_id != "w")
    assert follower.plan(1.0) is None
    load = follower.planner.load()
    assert (load.batch_waiting, load.waiting_demand, load.kv_blocks_wanted) == (3, 0, 0)
    script.run("a")
    assert script.names_at("a") == [] and len(script.names_at("b")) == 3


def test_fcfs_parks_no_batch_work() -> None:
    script = merged(Scheduling.FCFS)
    assert sorted(script.names_at("a")) == ["m", "n", "o", "w"] and not script.names_at("b")


def test_without_parking_time_batch_work_moves_at_once() -> None:
    assert sorted(merged(shelf_max_s=0.0).names_at("a")) == ["m", "n", "o", "w"]


def test_parked_work_resumes_when_its_worker_leads_again() -> None:
    script = merged()
    script.change(SPLIT)
    assert sorted(script.names_at("b")) == ["m", "n", "w"]
    script.run("b")
    assert script.names_at("b") == [] and script.members["b"].parked_due_s is None


def test_a_group_that_stays_merged_takes_parked_work() -> None:
    script = merged()
    due_s = script.members["b"].parked_due_s
    assert due_s == pytest.approx(60.0, abs=1.0)
    script.now_s = due_s - 0.1
    assert not script.members["b"].needs_turn(script.now_s)
    script.settle()
    assert len(script.names_at("b")) == 3
    script.now_s = due_s
    commands = script.turn("b")
    assert not commands and script.members["b"].phase is MemberPhase.ADOPTING
    sent = [frame for _, frame in script.ways["b", "a"] if isinstance(frame, Adopt)]
    assert [frame.sequence.request.request_id for frame in sent] == ["m", "n", "w"], "oldest first"
    script.settle()
    assert script.names_at("b") == [] and script.members["b"].parked_due_s is None
    assert sorted(script.names_at("a")) == ["m", "n", "o", "w"]
    script.run("a")
    assert script.names_at("a") == []


def test_parking_time_continues_through_a_change_of_the_same_leader() -> None:
    script = Script("abc", scheduling=Scheduling.PRIORITY).change(groups(1, "a", "b", "c"))
    script.ask("b", "m", 8, service=BATCH)
    script.change(groups(2, "ab"))
    due_s = script.members["b"].parked_due_s
    script.now_s = 30.0
    script.change(groups(3, "abc"))
    assert script.names_at("b") == ["m"] and script.members["b"].parked_due_s == due_s


def test_a_continuing_leader_keeps_batch_work_until_a_split() -> None:
    script = Script("ab", scheduling=Scheduling.PRIORITY).change(APART)
    for name in "mn":
        script.ask("a", name, 8, service=BATCH)
    script.change(MERGED)
    assert script.names_at("a") == ["m", "n"] and script.members["a"].parked_due_s is None
    script.change(SPLIT)
    assert (script.names_at("a"), script.names_at("b")) == (["m"], ["n"])


def test_a_leaving_worker_hands_over_parked_work() -> None:
    script = merged()
    script.change(leaving(3, "b"))
    assert script.names_at("b") == [] and sorted(script.names_at("a")) == ["m", "n", "o", "w"]


def test_parked_work_can_be_aborted() -> None:
    script = merged()
    script.do("b", RequestAborted(1.0, "m"))
    assert sorted(script.names_at("b")) == ["n", "w"]
    for name in "nw":
        script.do("b", RequestAborted(1.0, name))
    assert script.members["b"].parked_due_s is None


def park_returnable() -> Script:
    """ "r" is returnable and not started when "b" stops leading; "w" is not started either."""
    script = Script("ab", scheduling=Scheduling.SLO, shelf_max_s=60.0).change(APART)
    script.ask("b", "m", 8, service=BATCH)
    script.launch("b")
    script.ask("b", "w", 8, service=BATCH)
    request = Request("r", (5,) * 8, Sampling(), Limits(4), 0.0, service=BATCH, returnable=True)
    script.do("b", RequestArrived(script.now_s, request))
    assert script.members["b"].requeue_due_s == 60.0, "it has room, and waits for its turn"
    script.change(MERGED)
    return script


def test_unstarted_work_returns_to_the_scheduler() -> None:
    """Its worker has room but plans nothing; another group may have time for it."""
    script = park_returnable()
    member = script.members["b"]
    assert sorted(script.names_at("b")) == ["m", "r", "w"]
    assert member.requeue_due_s == REQUEUE_AFTER_S
    assert script.do("b", RequeueChecked(REQUEUE_AFTER_S - 0.01)) == []
    (refusal,) = script.do("b", RequeueChecked(REQUEUE_AFTER_S))
    assert isinstance(refusal, RefuseRequest) and (refusal.request_id, refusal.returned) == (
        "r",
        True,
    )
    assert sorted(script.names_at("b")) == ["m", "w"] and member.requeue_due_s is None
    script.change(SPLIT)
    script.run("b")
    assert script.names_at("b") == []


def test_work_taken_by_the_leader_is_not_returned() -> None:
    script = park_returnable()
    script.now_s = script.members["b"].parked_due_s
    script.settle()
    assert script.names_at("b") == [] and sorted(script.names_at("a")) == ["m", "r", "w"]
    for name in "ab":
        assert script.members[name].requeue_due_s is None


def test_parked_work_resumes_at_its_worker_when_the_leader_is_lost() -> None:
    script = merged()
    script.lose("a")
    script.hear(groups(3, "b"))
    script.now_s = 30.0
    script.settle()
    assert sorted(script.names_at("b")) == ["m", "n", "w"]
    script.run("b")
    assert script.names_at("b") == []


def test_nothing_is_sent_to_a_leader_that_is_lost() -> None:
    script = merged(shelf_max_s=5.0)
    script.do("b", vocabulary.PeersLost(1.0, frozenset("a")))
    script.now_s = 6.0
    script.turn("b")
    assert len(script.names_at("b")) == 3
    assert not any(isinstance(frame, Adopt) for _, frame in script.ways["b", "a"])
