"""States of a batch and of its lines, with their transitions.

A *batch* is a file of requests; a *line* is one of them. The *leader* is the gateway that runs
lines; its *token* increases with each leadership. A batch ends with an output file of the answers
and an error file of the other lines, both in the order of the input.
"""

from enum import StrEnum


class BatchState(StrEnum):
    """State of a batch; the values are those of the OpenAI API."""

    VALIDATING = "validating"
    """The leader reads the whole file; no line runs yet."""
    FAILED = "failed"
    """The file is invalid; no line has run."""
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    """All lines have ended; the leader writes the files."""
    COMPLETED = "completed"
    CANCELLING = "cancelling"
    """Running lines are interrupted, then the leader writes the files."""
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """Its window ended before all lines had run; the files have those that had."""


class LineState(StrEnum):
    """State of a line."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    """The model answered."""
    FAILED = "failed"
    """The answer is an error that a repetition would not change."""
    EXPIRED = "expired"
    CANCELLED = "cancelled"


BATCH_TRANSITIONS = {
    (BatchState.VALIDATING, BatchState.FAILED),
    (BatchState.VALIDATING, BatchState.IN_PROGRESS),
    (BatchState.VALIDATING, BatchState.CANCELLING),
    (BatchState.IN_PROGRESS, BatchState.FINALIZING),
    (BatchState.IN_PROGRESS, BatchState.CANCELLING),
    (BatchState.IN_PROGRESS, BatchState.EXPIRED),
    (BatchState.FINALIZING, BatchState.COMPLETED),
    (BatchState.CANCELLING, BatchState.CANCELLED),
}
"""All allowed transitions of a batch. COMPLETED, CANCELLED and EXPIRED are entered in the
transaction that records the files."""

LINE_TRANSITIONS = {
    (LineState.PENDING, LineState.RUNNING),
    (LineState.PENDING, LineState.EXPIRED),
    (LineState.PENDING, LineState.CANCELLED),
    (LineState.RUNNING, LineState.DONE),
    (LineState.RUNNING, LineState.FAILED),
    (LineState.RUNNING, LineState.PENDING),
}
"""All allowed transitions of a line. An interrupted line goes back to PENDING, and from there ends
with its batch."""

ENDED = frozenset(
    {BatchState.FAILED, BatchState.COMPLETED, BatchState.CANCELLED, BatchState.EXPIRED}
)
"""The final states of a batch."""


def final_state(state: BatchState) -> BatchState:
    """The state in which a batch ends once its files are written; IN_PROGRESS: its window ended."""
    return {
        BatchState.FINALIZING: BatchState.COMPLETED,
        BatchState.CANCELLING: BatchState.CANCELLED,
        BatchState.IN_PROGRESS: BatchState.EXPIRED,
    }[state]


def check_batch_transition(before: BatchState, after: BatchState) -> None:
    """Raise AssertionError unless the transition is allowed."""
    assert (before, after) in BATCH_TRANSITIONS, f"a batch went from {before} to {after}"


def check_line_transition(before: LineState, after: LineState) -> None:
    """Raise AssertionError unless the transition is allowed."""
    assert (before, after) in LINE_TRANSITIONS, f"a line went from {before} to {after}"
