"""Reports of load: when they are made."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.core.report import EngineReport, Load
from services.worker import reporter
from services.worker.reporter import Reporter

DEADLINE_S = 20.0


def make_reporter(load: Load) -> Reporter:
    """One that tells of `load`; what is told to the memory manager is not asked for here."""
    unused = cast(Any, None)
    return Reporter(
        "worker",
        "first",
        facts=unused,
        services=unused,
        engine=cast(Any, SimpleNamespace(report=EngineReport(load, epoch=6), responsive=True)),
        epoch=lambda: 7,
        pids=unused,
        dial=unused,
    )


async def test_a_change_is_told_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = asyncio.Event()

    async def wait(event: asyncio.Event, timeout_s: float) -> None:
        waiting.set()
        await event.wait()

    monkeypatch.setattr(reporter, "wait_set", wait)
    monkeypatch.setattr(reporter, "LOAD_PAUSE_S", 0.0)
    busy = make_reporter(Load(1, 0, 9, 0, 0, 10))
    reports = busy.load_reports()
    first = await anext(reports)
    assert (first.load.epoch, first.load.running, first.load.kv_blocks_total) == (7, 1, 10)
    following = asyncio.ensure_future(anext(reports))
    await asyncio.wait_for(waiting.wait(), DEADLINE_S)
    # The pause that comes after a report is over; one before the next would be this long.
    monkeypatch.setattr(reporter, "LOAD_PAUSE_S", 10 * DEADLINE_S)
    busy.note_received("request")
    report = await asyncio.wait_for(following, DEADLINE_S)
    assert list(report.load.received_request_ids) == ["request"]


async def test_what_is_told_beside_a_report_makes_up_for_it() -> None:
    busy = make_reporter(Load(1, 0, 9, 0, 0, 10))
    reports = busy.load_reports()
    busy.note_received("a")
    told = [busy.load_now(), (await anext(reports)).load, busy.load_now()]
    busy.note_received("b")
    told += [busy.load_now(), (await anext(reports)).load, (await anext(reports)).load]
    assert [list(load.received_request_ids) for load in told] == [
        *(["a"], ["a"], ["a"]),
        *(["a", "b"], ["a", "b"], ["b"]),
    ]
    assert [load.number for load in told] == [1, 2, 3, 4, 5, 6]
