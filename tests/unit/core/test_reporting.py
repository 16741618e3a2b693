"""Times of a worker's reports, and their numbering."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from services.core.histogram import Histogram
from services.core.prefix.cached_blocks import EVICTED_MAX
from services.core.report import EngineReport, Load, MemoryReport
from services.core.reporting import (
    RECEIVED_IDS_MAX,
    LoadReporting,
    ReportSchedule,
    ReportUrgency,
    memory_report_urgency,
)
from tests.support.reports import memory_report

IDLE = Load(0, 0, 9, 0)


def test_the_first_report_is_due_at_once_and_the_next_after_the_heartbeat() -> None:
    schedule = ReportSchedule(0.5, 4.0)
    assert schedule.due_s == -math.inf
    schedule.note_sent(1.0)
    assert schedule.due_s == schedule.heartbeat_due_s == 5.0


def test_changes_soon_after_a_report_are_joined_in_the_next() -> None:
    schedule = ReportSchedule(0.5, 4.0)
    schedule.note_sent(1.0)
    assert schedule.note_change() and not schedule.note_change()
    assert (schedule.due_s, schedule.heartbeat_due_s) == (1.5, 5.0)
    schedule.note_sent(1.5)
    assert schedule.due_s == 5.5
    assert schedule.note_change() and schedule.due_s == 2.0


def test_minor_news_waits_for_longer_unless_there_is_other_news() -> None:
    schedule = ReportSchedule(0.5, 4.0, 2.0)
    schedule.note_sent(1.0)
    assert schedule.note_change(ReportUrgency.MINOR) and schedule.due_s == 3.0
    assert not schedule.note_change(ReportUrgency.MINOR) and not schedule.note_change(
        ReportUrgency.NONE
    )
    assert schedule.note_change(ReportUrgency.MAJOR) and schedule.due_s == 1.5
    assert not schedule.note_change(ReportUrgency.MINOR) and schedule.due_s == 1.5
    schedule.note_sent(1.5)
    assert not schedule.note_change(ReportUrgency.NONE) and schedule.due_s == 5.5


@pytest.mark.parametrize("seed", range(20))
def test_every_change_is_reported_within_the_pause(seed: int) -> None:
    rng, pause_s, heartbeat_s = random.Random(seed), 0.5, 2.0
    schedule, sent, changed = ReportSchedule(pause_s, heartbeat_s), list[float](), list[float]()
    now_s = 0.0
    while now_s < 50.0:
        next_s = now_s + rng.randrange(1 + rng.choice((0, 6, 40, 190))) / 64
        while schedule.due_s <= next_s:
            now_s = max(now_s, schedule.due_s)
            assert not sent or pause_s <= now_s - sent[-1] <= heartbeat_s
            assert all(now_s - change_s <= pause_s for change_s in changed)
            schedule.note_sent(now_s)
            sent.append(now_s)
            changed.clear()
        now_s = next_s
        schedule.note_change()
        changed.append(now_s)
    assert len(sent) > 20


def test_a_report_outside_the_stream_replaces_its_last() -> None:
    loads = LoadReporting("w", "i", ReportSchedule(0.5, 4.0))
    loads.note_received("a")
    reports = [
        loads.create_out_of_band(7, IDLE),
        loads.create_next(7, IDLE, 0.0),
        loads.create_out_of_band(7, IDLE),
    ]
    loads.note_received("b")
    reports += [
        loads.create_out_of_band(7, IDLE),
        loads.create_next(7, IDLE, 1.0),
        loads.create_next(8, IDLE, 2.0),
    ]
    assert [report.received_request_ids for report in reports] == [
        *(("a",), ("a",), ("a",)),
        *(("a", "b"), ("a", "b"), ("b",)),
    ]
    assert [report.number for report in reports] == [1, 2, 3, 4, 5, 6]
    assert (reports[-1].worker_id, reports[-1].incarnation, reports[-1].epoch) == ("w", "i", 8)
    assert loads.schedule.heartbeat_due_s == 6.0


def test_received_requests_are_bounded() -> None:
    loads = LoadReporting("w", "i", ReportSchedule(0.5, 4.0))
    loads.note_received(*map(str, range(RECEIVED_IDS_MAX)))
    loads.note_received("one more")
    assert len(loads.create_next(1, IDLE, 0.0).received_request_ids) == RECEIVED_IDS_MAX


def test_dropped_prefixes_are_reported_twice_and_bounded() -> None:
    loads = LoadReporting("w", "i", ReportSchedule(0.5, 4.0))
    loads.note_evicted((1, 2))
    assert loads.create_out_of_band(1, IDLE).dropped_prefixes == (1, 2)
    assert loads.create_next(1, IDLE, 0.0).dropped_prefixes == (1, 2)
    loads.note_evicted((3,))
    assert loads.create_next(1, IDLE, 1.0).dropped_prefixes == (1, 2, 3)
    loads.note_evicted(range(2 * EVICTED_MAX))
    newest = tuple(range(EVICTED_MAX, 2 * EVICTED_MAX))
    assert loads.create_next(1, IDLE, 2.0).dropped_prefixes == newest
    assert loads.create_next(1, IDLE, 3.0).dropped_prefixes == newest
    assert loads.create_next(1, IDLE, 4.0).dropped_prefixes == ()


def test_dropped_prefixes_are_numbered_by_reported_count() -> None:
    loads = LoadReporting("w", "i", ReportSchedule(0.5, 4.0))
    assert loads.create_next(1, IDLE, 0.0).dropped_total == 0
    loads.note_evicted((1, 2))
    reports = [
        loads.create_out_of_band(1, IDLE),
        loads.create_next(1, IDLE, 1.0),
        loads.create_next(1, IDLE, 2.0),
    ]
    assert [report.dropped_total for report in reports] == [2, 2, 2]
    loads.note_evicted(iter(range(2 * EVICTED_MAX)))
    report = loads.create_next(1, IDLE, 3.0)
    assert report.dropped_total == 2 + 2 * EVICTED_MAX
    assert loads.create_next(1, IDLE, 4.0).dropped_total == report.dropped_total


def test_an_unchanged_report_is_skipped_until_the_heartbeat() -> None:
    loads, busy = LoadReporting("w", "i", ReportSchedule(0.5, 4.0)), Load(1, 0, 8, 0)

    def is_sent(epoch: int, load: Load, now_s: float) -> bool:
        loads.schedule.note_change()
        return loads.create_if_due(epoch, load, now_s) is not None

    assert is_sent(7, IDLE, 0.0)
    assert not is_sent(7, IDLE, 1.0) and loads.schedule.due_s == 4.0
    assert is_sent(7, busy, 1.5) and is_sent(8, busy, 2.0) and not is_sent(8, busy, 5.0)
    assert is_sent(8, busy, 6.0), "the heartbeat"
    loads.note_received("a")
    assert is_sent(8, busy, 7.0) and not is_sent(8, busy, 7.5)
    loads.note_evicted([1])
    assert is_sent(8, busy, 8.0)
    loads.force_next()
    assert is_sent(8, busy, 8.5)


def test_the_stream_corrects_reports_sent_outside_it() -> None:
    loads, busy = LoadReporting("w", "i", ReportSchedule(0.5, 4.0)), Load(1, 0, 8, 0)
    loads.create_next(7, IDLE, 0.0)
    loads.create_out_of_band(7, IDLE)
    assert loads.create_if_due(7, IDLE, 1.0) is None
    loads.create_out_of_band(7, busy)
    assert loads.create_if_due(7, IDLE, 2.0) is not None, "the reader may have the other report"


def test_use_of_blocks_is_minor_to_the_memory_manager_until_they_are_scarce() -> None:
    def report(free: int, waiting: int = 0, **changes: Any) -> MemoryReport:
        load = Load(2, waiting, free, 0, kv_blocks_total=100)
        return memory_report("w", replace(EngineReport(load, 1), **changes))

    sent = report(80)
    assert memory_report_urgency(None, sent) is ReportUrgency.MAJOR
    assert (
        memory_report_urgency(sent, report(70, iteration_tokens=Histogram((1,), 1)))
        is ReportUrgency.MINOR
    )
    assert memory_report_urgency(sent, report(24)) is ReportUrgency.MAJOR
    assert memory_report_urgency(sent, report(80)) is ReportUrgency.NONE
    assert memory_report_urgency(report(80, 1), report(79, 1)) is ReportUrgency.MAJOR
    lost, lost_on = report(80, trouble="lost"), report(79, trouble="lost")
    assert memory_report_urgency(lost, lost_on) is ReportUrgency.MAJOR
    assert memory_report_urgency(sent, report(80, 1)) is ReportUrgency.MAJOR
    changes = {"epoch": 2, "unsettled": True, "trouble": "lost", "parameter_bytes": 1}
    for name, value in changes.items():
        assert memory_report_urgency(sent, report(80, **{name: value})) is ReportUrgency.MAJOR, name
    assert memory_report_urgency(sent, replace(sent, engine_hung=True)) is ReportUrgency.MAJOR
    assert memory_report_urgency(sent, replace(sent, incarnation="another")) is ReportUrgency.MAJOR


def test_waiting_batch_work_that_yields_is_not_urgent() -> None:
    def report(free: int) -> MemoryReport:
        load = Load(2, 3, free, 0, kv_blocks_total=100, batch_waiting=3, batch_yields=True)
        return memory_report("w", EngineReport(load, 1))

    assert memory_report_urgency(report(80), report(79)) is ReportUrgency.MINOR
