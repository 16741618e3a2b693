"""Sequences reach their new leader or return, despite losses on either side."""

from dataclasses import replace

import pytest

from services.core.changeover import vocabulary
from services.core.changeover.configuration import GroupStages
from services.core.changeover.frames import Adopt, Adopted, FreeKv
from services.core.changeover.state import DRAIN_TIMEOUT_S, DRAINED_TIMEOUT_S, MemberPhase
from services.core.changeover.transfer_outcome import TransferOutcome, TransferStatus
from services.core.groups.layer_map import Stage
from services.core.planner.events import RefuseRequest, RequestAborted
from services.core.planner.sequence import Phase
from services.core.request import Limits
from tests.support.changeover_scenes import APART, part, pipeline
from tests.support.changeover_script import Script, groups, kinds

LEFT = (GroupStages("g-b", 3, (Stage("b", 2, 4),)),)


def adopting() -> Script:
    """ "a" has handed "s" to "b", where it has just arrived; the notice is in flight."""
    script = pipeline("r", "s")
    part(script)
    script.stopped = {("b", "a")}
    script.settle()
    assert script.members["a"].phase is MemberPhase.ADOPTING
    assert script.names_at("b") == ["s"]
    return script


def handed(script: Script) -> Adopt:
    """The frames in flight from "a" to "b"."""
    (adopt,) = [frame for _, frame in script.ways["a", "b"] if isinstance(frame, Adopt)]
    return adopt


def frames(script: Script, source: str, peer: str, kind: type) -> list[object]:
    return [frame for _, frame in script.ways[source, peer] if isinstance(frame, kind)]


def test_an_abort_does_not_overtake_the_sequence() -> None:
    script = adopting()
    script.do("a", RequestAborted(0.0, "s"))
    assert "s" in script.names_at("a"), "b is not known to have it"
    script.reconnect()
    assert script.names_at("a") == ["r"] and script.names_at("b") == []
    assert script.members["a"].settled and script.members["b"].settled


def test_an_aborted_sequence_does_not_come_back_from_a_lost_leader() -> None:
    script = adopting()
    script.do("a", RequestAborted(0.0, "s"))
    script.lose("b")
    script.settle()
    assert script.members["a"].settled
    assert script.names_at("a") == ["r"]
    assert script.members["a"].planner.table.seq_ids == ("r",)


def test_an_aborted_sequence_ends_with_the_change() -> None:
    script = adopting()
    script.do("a", RequestAborted(0.0, "s"))
    del script.members["b"]  # without an event
    script.now_s = 10.0
    script.hear(groups(3, "a"))
    script.now_s = 20.0
    script.settle()
    assert script.names_at("a") == ["r"]


def test_a_sequence_returned_to_a_stage_goes_to_its_leader() -> None:
    """ "a" no longer leads; "b" never enters the change in which it was to lead "s"."""
    script = pipeline("r", "s")
    script.hear(groups(2, "ca", "b"))
    script.turn("a")
    script.settle()
    assert script.names_at("c") == ["s"] and script.names_at("b") == ["r"]
    script = pipeline("r", "s")
    script.hear(groups(2, "ca", "b"))
    script.stopped = {("a", "b")}
    script.settle()
    script.hear(LEFT)
    script.turn("b")
    script.reconnect()
    assert sorted(script.names_at("c")) == ["r", "s"]
    assert script.names_at("a") == []


def test_a_sequence_that_is_too_large_is_refused_and_its_kv_freed() -> None:
    script = pipeline("r", "s")
    part(script)
    adopt = handed(script)
    state = adopt.sequence
    long = replace(state, request=replace(state.request, limits=Limits(1000)))
    script.ways["a", "b"].clear()
    commands = script.receive("a", "b", replace(adopt, sequence=long))
    assert [command.request_id for command in commands if isinstance(command, RefuseRequest)] == [
        "s"
    ]
    assert frames(script, "b", "a", Adopted) == [Adopted("s", 1)]
    for peer in "ab":
        assert frames(script, "b", peer, FreeKv) == [FreeKv("s", whole_table=True)]
    script.stopped = {("b", "c")}
    script.settle()
    assert script.names_at("b") == [] and script.names_at("a") == ["r"]
    assert script.taken_at("b") == 0


def test_kv_of_a_superseded_sequence_is_freed() -> None:
    script = pipeline("r#g.1", "s#g.1")
    part(script)
    script.ask("b", "s#g.2", 8)
    script.settle()
    assert script.names_at("b") == ["s#g.2"]
    assert script.members["a"].settled and script.members["b"].settled
    assert script.taken_at("b") == 0


def test_a_former_leader_adopts_no_sequence() -> None:
    script = pipeline("r", "s")
    part(script)
    adopt = handed(script)
    script.settle()
    script.change(groups(3, "cb"))
    assert script.receive("a", "b", adopt) == []
    assert not frames(script, "b", "a", Adopted)


@pytest.mark.parametrize("adopted", [True, False])
def test_a_request_restarts_only_if_its_sequence_was_adopted(adopted: bool) -> None:
    """Its gateway has lost the worker that started it and does not know the new one."""
    script = pipeline("r#g.1", "s#g.1")
    part(script)
    script.settle()
    leader, name = ("b", "s") if adopted else ("a", "r")
    assert script.names_at(leader) == [f"{name}#g.1"]
    commands = script.ask(leader, f"{name}#g.2", 8)
    assert (RefuseRequest in kinds(commands)) is not adopted
    assert script.names_at(leader) == [f"{name}#g.{2 if adopted else 1}"]


def test_a_late_sequence_at_a_stage_goes_to_its_leader() -> None:
    script = pipeline("r")
    script.ask("b", "late", 8)
    assert script.names_at("b") == ["late"]
    script.settle()
    assert script.names_at("b") == [] and script.names_at("a") == ["r", "late"]


def test_kv_left_to_lost_leaders_is_freed() -> None:
    """ "b" holds KV of "r", which "a" leads now; the KV is useless once "a" is lost."""
    script = pipeline("r")
    script.transfers_run = False
    script.change(APART)
    assert script.taken_at("b") == 2 and script.members["b"].phase is MemberPhase.MIGRATING
    script.lose("a")
    script.settle()
    assert script.taken_at("b") == 0 and script.members["b"].settled


def test_a_failed_transfer_is_recomputed() -> None:
    script = pipeline("r")
    script.transfers_run = False
    script.change(APART)
    ((transfer_id, _),) = script.sending.items()
    script.do("a", TransferOutcome(transfer_id, TransferStatus.FAILED))
    script.do("b", TransferOutcome(transfer_id, TransferStatus.FAILED))
    script.settle()
    assert [sequence.seq_id for sequence in script.members["a"].planner.waiting] == ["r"]
    assert script.taken_at("b") == 0


def test_a_returned_sequence_does_not_wait_for_a_lost_stage() -> None:
    script = Script("abc").change(groups(1, "abc"))
    for name in "rst":
        script.ask("a", name, 8)
    script.advance("a")
    script.stopped = {("b", "a")}
    script.change(groups(2, "a", "b", "c"))
    assert script.names_at("a") == ["r", "s"] and script.names_at("c") == ["t"]
    script.stopped = {("c", "a")}
    script.lose("b")
    script.settle()
    assert script.members["a"].planner.sequences["s"].phase is Phase.HELD, "c may have KV of it"
    script.lose("c")
    script.settle()
    assert script.members["a"].settled
    assert [sequence.seq_id for sequence in script.members["a"].planner.waiting] == ["s"]


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_stale_configuration_is_ignored(epoch: int) -> None:
    script = Script("ab").change(groups(2, "ab"))
    script.hear(groups(epoch, "a", "b"))
    assert all(member.settled for member in script.members.values())
    assert not any(script.ways.values())


def test_a_lost_connection_to_a_new_leader_keeps_its_sequences() -> None:
    """Both are alive, and "c" is a stage of "b" now."""
    script = Script("abc").change(groups(1, "abc"))
    for name in ("r", "s"):
        script.ask("a", name, 8)
    script.advance("a")
    script.change(groups(2, "a", "bc"))
    assert script.names_at("b") and all(member.settled for member in script.members.values())
    taken = script.taken_at("c")
    script.do("a", vocabulary.PeersLost(0.0, frozenset({"b"})))
    script.settle()
    assert script.taken_at("c") == taken > 0
    assert script.names_at("b")


def test_a_hand_over_from_a_lost_peer_is_ignored() -> None:
    """One lane between the two is lost, and frames still arrive over the other."""
    script = pipeline(waiting=("r", "s"))
    script.advance("a")
    script.stopped = {("a", "b")}
    script.hear(APART)
    script.turn("a")
    script.now_s = DRAINED_TIMEOUT_S + 0.1
    script.turn("b")
    script.do("b", vocabulary.PeersLost(script.now_s, frozenset({"a"})))
    script.reconnect()
    assert not script.names_at("b") and script.taken_at("b") == 0
    script.do("a", vocabulary.PeersLost(script.now_s, frozenset({"b"})))
    script.settle()
    assert script.names_at("a") == ["r", "s"]
    assert all(member.settled for member in script.members.values())


def test_a_stage_frees_everything_of_an_abandoned_leader() -> None:
    """The leader is alive and learns of the change after its stage has left."""
    script = pipeline(waiting=("r",))
    script.stopped = {("b", "a")}
    script.advance("a")
    assert script.taken_at("b") > 0
    script.hear(APART, "b")
    script.now_s = DRAINED_TIMEOUT_S + 0.1
    script.turn("b")
    script.hear(APART, "a")
    script.now_s += DRAIN_TIMEOUT_S + 0.1
    script.turn("a")
    script.reconnect()
    assert script.members["a"].settled and script.members["b"].settled
    assert script.names_at("a") == ["r"] and script.taken_at("b") == 0
