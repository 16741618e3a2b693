"""Only registered workers are shown, under their registered incarnation."""

import asyncio
from dataclasses import replace

from services.common.clock import monotonic_s
from services.core.report import EngineReport, Load
from services.memmgr.worker_memory import REPORT_FRESH_S, LatestReport, MemoryView
from tests.support.reports import memory_report

LOAD = Load(1, 0, 4, 0, kv_blocks_total=9)
MEMORY = memory_report("w0", EngineReport(LOAD, epoch=3), "a")


def test_reports_of_unregistered_workers_are_ignored() -> None:
    view = MemoryView(asyncio.Event())
    view.report(MEMORY)
    assert view.workers() == []
    view.set_registered({"w0": "b"})
    view.report(MEMORY)
    assert view.workers() == []


def test_the_latest_report_is_shown_until_the_registration_ends() -> None:
    view = MemoryView(asyncio.Event())
    view.set_registered({"w1": "a", "w0": "a"})
    other = replace(MEMORY, worker_id="w1")
    view.report(other)
    view.report(replace(MEMORY, budget_bytes=1))
    view.report(MEMORY)
    assert view.workers() == [MEMORY, other]
    view.set_registered({"w0": "b", "w1": "a"})
    assert view.workers() == [other]
    view.set_registered({})
    assert view.workers() == []


def test_a_silent_worker_is_shown_but_not_fresh() -> None:
    view = MemoryView(asyncio.Event())
    view.set_registered({"w0": "a"})
    view.report(MEMORY)
    now_s = monotonic_s()
    assert view.fresh(now_s) == {"w0": MEMORY}
    assert view.engines(now_s) == {"w0": MEMORY.engine}
    assert view.fresh(now_s + REPORT_FRESH_S + 1) == {} and view.workers() == [MEMORY]


def test_times_of_serving_and_settling_an_epoch_are_kept() -> None:
    view = MemoryView(asyncio.Event())
    view.set_registered({"w0": "a"})
    assert view.latest("w0") is None

    def report(epoch: int, unsettled: bool) -> LatestReport:
        engine = replace(MEMORY.engine, epoch=epoch, unsettled=unsettled)
        view.report(replace(MEMORY, engine=engine))
        latest = view.latest("w0")
        assert latest is not None and latest.report.engine == engine
        return latest

    first = report(3, unsettled=True)
    assert (
        first.settled_s is None and view.latest("w0", 3) == first and view.latest("w0", 4) is None
    )
    second = report(3, unsettled=False)
    assert second.served_s == first.served_s and second.settled_s == second.received_s
    third = report(3, unsettled=True)
    assert (third.served_s, third.settled_s) == (first.served_s, second.settled_s)
    later = report(5, unsettled=True)
    assert later.served_s == later.received_s and later.settled_s is None
    assert view.latest("w0", 4) == later
