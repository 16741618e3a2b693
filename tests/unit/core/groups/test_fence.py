"""The fence of a member: requests and records that it accepts."""

from dataclasses import replace

import pytest

from services.core.groups.fence import (
    AbortCall,
    AbortPreparation,
    Answer,
    Apply,
    MemberState,
    PrepareCall,
    Verdict,
    is_removed,
    restored,
)
from services.core.groups.vocabulary import Assignment, Group, GroupPhase, Member, StoredGroup

ALONE = Group("group-w0", 3, GroupPhase.STABLE, (Member("w0", "a", 0, 4),), "m")
PAIR = Group(
    "group-w0", 4, GroupPhase.STABLE, (Member("w0", "a", 0, 2), Member("w1", "b", 2, 4)), "m"
)
ASKED = PrepareCall(7, "7-1", "a", "group-w0", 3, 20, PAIR)
MARKED = StoredGroup(replace(ALONE, attempt="7-1"), 20)


@pytest.fixture
def state() -> MemberState:
    state = MemberState("w0", "a")
    assert state.observe([StoredGroup(ALONE, 10)]) == [Apply(ALONE)]
    return state


def mark(call: PrepareCall) -> StoredGroup:
    """The record of the source group with the mark of the call's attempt."""
    return StoredGroup(replace(ALONE, attempt=call.attempt), call.mod_revision)


def prepare(state: MemberState, call: PrepareCall = ASKED) -> None:
    """Make the member read the mark and accept the call."""
    state.observe([mark(call)])
    assert state.judge(call) == Answer(Verdict.ACCEPTED)


def test_a_prepared_attempt_is_applied_once_committed(state: MemberState) -> None:
    prepare(state)
    assert state.observe([MARKED]) == []
    assert state.judge(ASKED).verdict is Verdict.REPLAYED
    assert state.observe([StoredGroup(PAIR, 30)]) == [Apply(PAIR, "7-1")]
    assert state.observe([StoredGroup(PAIR, 30)]) == []
    assert state.observe([StoredGroup(ALONE, 10)]) == []
    state.check_invariants()


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"incarnation": "z"}, Verdict.FOREIGN),
        ({"target": replace(PAIR, members=PAIR.members[1:])}, Verdict.FOREIGN),
        ({"target": replace(PAIR, epoch=3)}, Verdict.FOREIGN),
        ({"epoch": 2}, Verdict.STALE),
        ({"epoch": 4, "target": replace(PAIR, epoch=5)}, Verdict.FUTURE),
        ({"group_id": "group-w1"}, Verdict.STALE),
        ({"mod_revision": 10}, Verdict.STALE),
    ],
)
def test_stale_and_foreign_records_are_ignored(
    state: MemberState, changes: dict[str, object], verdict: Verdict
) -> None:
    before = replace(state)
    assert state.judge(replace(ASKED, **changes)).verdict is verdict
    assert (state.preparing, state.epoch) == (before.preparing, before.epoch)


def test_a_lower_token_is_refused_for_ever(state: MemberState) -> None:
    prepare(state)
    assert state.abort(AbortCall(6, "7-1", "a")) is None
    older = replace(ASKED, token=6, attempt="6-9", mod_revision=40)
    assert state.judge(older).verdict is Verdict.STALE


def test_an_order_of_an_earlier_coordinator_is_stale(state: MemberState) -> None:
    assert state.accepts_order(8, "a") and state.accepts_order(8, "a")
    assert not state.accepts_order(7, "a")
    assert not state.accepts_order(9, "z") and state.accepts_order(8, "a"), "of another process"
    prepare(state, replace(ASKED, token=9, attempt="9-1"))
    assert not state.accepts_order(8, "a")


def test_a_token_without_a_mark_blocks_no_preparation(state: MemberState) -> None:
    """An order from before a roll-back may have any token."""
    assert state.accepts_order(2**40, "a")
    prepare(state)
    assert not state.accepts_order(7, "a")
    state.observe([MARKED], rollbacks=1)
    assert state.accepts_order(7, "a")


def test_an_aborted_attempt_is_not_taken_up_again(state: MemberState) -> None:
    prepare(state)
    assert state.abort(AbortCall(8, "7-1", "a")) == AbortPreparation("7-1")
    assert state.judge(replace(ASKED, token=8)).verdict is Verdict.STALE


def test_a_later_attempt_ends_an_earlier_one(state: MemberState) -> None:
    prepare(state)
    later = replace(ASKED, attempt="7-2", mod_revision=25)
    assert state.judge(later).verdict is Verdict.FUTURE
    assert state.preparing == ASKED
    assert state.observe([mark(later)]) == [AbortPreparation("7-1")]
    assert state.judge(later).verdict is Verdict.ACCEPTED
    assert state.judge(ASKED).verdict is Verdict.STALE


def test_a_record_without_the_mark_ends_the_attempt(state: MemberState) -> None:
    prepare(state)
    assert state.observe([StoredGroup(ALONE, 10)]) == []
    assert state.observe([StoredGroup(ALONE, 21)]) == [AbortPreparation("7-1")]
    assert state.judge(ASKED).verdict is Verdict.STALE


def test_a_request_waits_for_the_record_that_bears_the_mark(state: MemberState) -> None:
    assert state.judge(ASKED).verdict is Verdict.FUTURE
    assert (state.token, state.preparing) == (0, None)
    assert state.observe([MARKED]) == []
    assert state.observe([StoredGroup(ALONE, 10)]) == [], "an outdated listing"
    assert state.judge(ASKED).verdict is Verdict.ACCEPTED


def test_layers_fetched_for_a_commit_that_was_not_seen_are_kept(state: MemberState) -> None:
    """The target may have been committed and superseded before the member read it."""
    prepare(state)
    later = replace(ALONE, epoch=6, phase=GroupPhase.DEGRADED)
    assert state.observe([StoredGroup(later, 50)]) == [Apply(later, superseded="7-1")]


def test_a_prepared_layer_is_kept_while_the_member_has_no_group(state: MemberState) -> None:
    """The target was committed, unseen, and dissolved when the member's lease had ended."""
    prepare(state)
    gone_on = Group("group-w0", 5, GroupPhase.DISSOLVED, (), "m")
    assert state.observe([StoredGroup(gone_on, 30)]) == []
    assert state.preparing == ASKED
    back = Group("group-w0", 6, GroupPhase.DEGRADED, (Member("w0", "a", 0, 2),), "m")
    assert state.observe([StoredGroup(back, 40)]) == [Apply(back, superseded="7-1")]


def test_a_tombstone_and_a_record_of_another_incarnation_have_no_effect(state: MemberState) -> None:
    gone = replace(ALONE, epoch=9, phase=GroupPhase.DISSOLVED, members=())
    other = replace(ALONE, epoch=9, members=(Member("w0", "z", 0, 4),))
    assert state.observe([StoredGroup(gone, 60)]) == []
    assert state.observe([StoredGroup(other, 61)]) == []
    assert state.epoch == 3


# --- a store that has lost writes

OWN = Assignment("w0", "a", "group-w0", 4, 0, 2)


@pytest.fixture
def merged(state: MemberState) -> MemberState:
    """A member that runs half of the layers, at epoch 4."""
    prepare(state)
    state.observe([StoredGroup(PAIR, 30)])
    assert state.assignment == OWN
    return state


def test_a_configuration_with_missing_layers_is_not_applied(merged: MemberState) -> None:
    """A coordinator that knows neither the group nor the assignment writes such a record."""
    whole = replace(ALONE, epoch=9)
    assert merged.observe([StoredGroup(whole, 40)]) == []
    half = replace(whole, phase=GroupPhase.DEGRADED, members=(Member("w0", "a", 0, 2),))
    assert merged.observe([StoredGroup(half, 41)]) == [Apply(half)]
    merged.check_invariants()


def test_tokens_and_revisions_of_a_lost_history_do_not_count(merged: MemberState) -> None:
    wider = replace(PAIR, epoch=5, members=(Member("w0", "a", 0, 4),))
    asked = replace(ASKED, attempt="7-2", epoch=4, mod_revision=35, target=wider)
    merged.observe([StoredGroup(replace(PAIR, attempt="7-2"), 35)])
    assert merged.judge(asked).verdict is Verdict.ACCEPTED
    # The same numbers again, from another leader, for something else.
    again = replace(asked, token=2, attempt="2-1", mod_revision=6)
    assert merged.judge(again).verdict is Verdict.STALE
    before = [StoredGroup(replace(PAIR, attempt="2-1"), 6)]
    assert merged.observe(before, rollbacks=1) == [AbortPreparation("7-2")]
    assert merged.judge(again).verdict is Verdict.ACCEPTED
    assert merged.observe(before, rollbacks=1) == []
    assert merged.epoch == 4
    merged.check_invariants()


@pytest.mark.parametrize("late", ["prepare", "abort"])
def test_a_late_call_of_a_lost_history_does_not_count(state: MemberState, late: str) -> None:
    """The member notices the roll-back before the coordinator, which has an attempt in flight."""
    lost = replace(ASKED, token=5000, attempt="5000-1", mod_revision=5020)
    if late == "abort":
        prepare(state, lost)
    state.observe([StoredGroup(ALONE, 12)], rollbacks=1)
    if late == "prepare":
        assert state.judge(lost).verdict is Verdict.FUTURE
    else:
        assert state.abort(AbortCall(lost.token, lost.attempt, "a")) is None
    # The restarted coordinator was elected at a lower revision.
    assert state.observe([MARKED], rollbacks=1) == []
    assert state.judge(ASKED).verdict is Verdict.ACCEPTED
    state.check_invariants()


def test_an_attempt_id_that_is_assigned_again_is_another_attempt(state: MemberState) -> None:
    prepare(state)
    other = replace(ASKED, target=replace(PAIR, epoch=5), mod_revision=21)
    assert state.observe([mark(other)]) == [AbortPreparation("7-1")]
    assert state.judge(other).verdict is Verdict.ACCEPTED


@pytest.mark.parametrize(
    ("stored", "agrees"),
    [
        (OWN, True),
        (replace(OWN, epoch=6, group_id="group-w1"), True),  # a later one, with the same layers
        (replace(OWN, epoch=6, end_layer=4), False),  # never prepared here
        (replace(OWN, epoch=3, end_layer=4), False),  # from a backup
        (replace(OWN, group_id="group-w9"), False),
        (replace(OWN, epoch=6, incarnation="z"), False),
    ],
)
def test_assignments_agree_with_epoch_and_layers(
    merged: MemberState, stored: Assignment, agrees: bool
) -> None:
    assert merged.agrees(stored) == agrees


def test_an_assignment_that_the_coordinator_removed_is_not_restored() -> None:
    assert not is_removed(OWN, None, epoch_floor=3)
    assert is_removed(OWN, None, epoch_floor=4)
    assert is_removed(OWN, replace(OWN, incarnation="z"), epoch_floor=0)
    assert not is_removed(OWN, replace(OWN, incarnation="z", epoch=3), epoch_floor=0)


def test_the_next_epoch_is_above_a_restored_assignment_and_the_replaced_one() -> None:
    assert restored(OWN, None) == OWN
    assert restored(OWN, replace(OWN, epoch=2, end_layer=4)) == OWN
    assert restored(OWN, replace(OWN, epoch=6, end_layer=4)) == replace(OWN, epoch=6)
