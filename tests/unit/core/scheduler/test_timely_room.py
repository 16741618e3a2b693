"""From which prefill backlog requests wait in the queue instead of at a group."""

import pytest

from services.core.report import Load, LoadReport
from services.core.scheduler.group_load import GroupLoad
from services.core.scheduler.group_table import timely_room
from services.core.scheduler.vocabulary import LoadReported, ServingGroup

HELD = 512


def load_with(running: int, prefill_tokens: int) -> GroupLoad:
    """A group with free blocks, `running` requests and a prefill backlog."""
    group = ServingGroup("g", 1, "w", "i", "w", "m", 1000, 16, 100_000)
    load = GroupLoad(group, held_tokens=HELD)
    reported = Load(running, 0, 900, 0, kv_blocks_total=1000, prefill_tokens=prefill_tokens)
    load.note_report(LoadReported(0.0, LoadReport("w", "i", 1, 1, reported, ())))
    return load


@pytest.mark.parametrize(
    ("running", "prefill_tokens", "waits"),
    [
        (2, HELD - 1, False),
        (2, HELD, True),
        (1, HELD, False),  # so that the next request does not go to a group with more requests
        (1, 2 * HELD, True),
        (0, 2 * HELD - 1, False),
    ],
)
def test_requests_wait_for_groups_with_a_backlog(
    running: int, prefill_tokens: int, waits: bool
) -> None:
    assert (timely_room(load_with(running, prefill_tokens)) == 0) == waits


def test_reservations_count_as_requests() -> None:
    load = load_with(1, HELD)
    load.reserve("r", 1, 0.0)
    assert timely_room(load) == 0
