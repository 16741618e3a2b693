"""Batches and lines follow their state tables."""

import pytest

from services.core.batches.vocabulary import (
    BATCH_TRANSITIONS,
    ENDED,
    LINE_TRANSITIONS,
    BatchState,
    LineState,
    check_batch_transition,
    check_line_transition,
    final_state,
)


def test_every_state_is_reached_and_final_states_are_not_left() -> None:
    assert {after for _, after in BATCH_TRANSITIONS} == set(BatchState) - {BatchState.VALIDATING}
    assert set(BatchState) - {before for before, _ in BATCH_TRANSITIONS} == ENDED
    assert {after for _, after in LINE_TRANSITIONS} == set(LineState)


@pytest.mark.parametrize(
    "state", [BatchState.FINALIZING, BatchState.CANCELLING, BatchState.IN_PROGRESS]
)
def test_a_batch_with_files_ends(state: BatchState) -> None:
    check_batch_transition(state, final_state(state))
    assert final_state(state) in ENDED


def test_other_transitions_are_refused() -> None:
    with pytest.raises(AssertionError, match="from completed to in_progress"):
        check_batch_transition(BatchState.COMPLETED, BatchState.IN_PROGRESS)
    with pytest.raises(AssertionError, match="from done to pending"):
        check_line_transition(LineState.DONE, LineState.PENDING)
