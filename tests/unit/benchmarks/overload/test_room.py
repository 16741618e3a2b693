"""Refusals in a scheduler log that happened while a group had room."""

from pathlib import Path

from benchmarks.overload.room import refused_with_room_s
from services.common.event_log import EventLog
from services.core.audit.record import COMMAND, EVENT
from services.core.report import Load, LoadReport
from services.core.scheduler.state_config import StateConfig
from services.core.scheduler.vocabulary import (
    Asked,
    Event,
    GroupJoined,
    LoadReported,
    SendRefusal,
    ServingGroup,
)

BLOCKS = 400


def refusals(folder: Path, free: int, *asks: Asked) -> list[float]:
    """Times of refusals with room at a group with `free` blocks, if one request may wait."""
    config = StateConfig(queue_limit=1)
    state, log = config.state(), EventLog(folder, "scheduler-1", config)
    load = LoadReport("g", "i", 1, 1, Load(0, 0, free, 0, kv_blocks_total=BLOCKS))
    group = ServingGroup("g", 1, "g", "i", "g", "m", BLOCKS, 16, 100_000)
    events: list[Event] = [GroupJoined(group=group, now_s=0.0), LoadReported(0.0, load), *asks]
    refused = 0
    for event in events:
        commands = state.handle(event)
        refused += sum(isinstance(command, SendRefusal) for command in commands)
        log.append(EVENT, [event])
        log.append(COMMAND, commands)
    log.close()
    assert refused == 1
    return refused_with_room_s(folder)


def test_a_refusal_counts_if_a_group_has_room_for_the_request(tmp_path: Path) -> None:
    # The first request waits for more blocks than are free, and takes the only place in the queue.
    large = Asked("large", "m", 3000, 16, now_s=0.0, stream_id=1)
    small, medium = (Asked("second", "m", n, 16, now_s=0.5, stream_id=1) for n in (32, 2000))
    for number, (second, expected) in enumerate(((small, [0.5]), (medium, []))):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert refusals(folder, 60, large, second) == expected


def test_without_a_log_there_is_no_refusal(tmp_path: Path) -> None:
    assert refused_with_room_s(tmp_path) == []
