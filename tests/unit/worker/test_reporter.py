"""Times and content of load and memory reports. See also `test_reporting`."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.core.report import EngineReport, Load
from services.core.reporting import ReportUrgency, memory_report_urgency
from services.worker import reporter
from services.worker.ipc import EngineReady
from services.worker.reporter import ReportSender

DEADLINE_S = 20.0
FACTS = EngineReady(1024, 100, 16, 40, 4096, 10_000, 3000, 500)


def make_reporter(responsive: bool = True) -> ReportSender:
    """A reporter whose engine runs a request at epoch 6; the worker is at epoch 7."""
    report = EngineReport(Load(1, 0, 9, 0, 3, 10), 6, unsettled=True, parameter_bytes=2000)
    engine = SimpleNamespace(report=report, responsive=responsive, hung=not responsive)
    unused = cast(Any, None)
    return ReportSender(
        "w", "i", FACTS, unused, cast(Any, engine), lambda: 7, lambda: [11, 12], unused
    )


def change_load(sender: ReportSender) -> None:
    """The engine reports a block less."""
    engine = cast(Any, sender)._engine
    load = replace(engine.report.load, kv_blocks_free=engine.report.load.kv_blocks_free - 1)
    engine.report = replace(engine.report, load=load)
    sender.note_change()


@pytest.fixture(autouse=True)
def only_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable heartbeats and pauses."""
    for name in ("LOAD", "MEMORY"):
        monkeypatch.setattr(reporter, f"{name}_PAUSE_S", 0.0)
        monkeypatch.setattr(reporter, f"{name}_MINOR_PAUSE_S", 0.0)
        monkeypatch.setattr(reporter, f"{name}_INTERVAL_S", 10 * DEADLINE_S)


async def test_a_change_is_reported_to_both_services_before_the_heartbeat() -> None:
    busy = make_reporter()
    loads, memories = busy.load_reports(), busy.memory_reports()
    first = (await anext(loads)).load
    assert (first.epoch, first.running, first.kv_blocks_total, first.number) == (7, 1, 10, 1)
    memory = (await anext(memories)).memory
    assert (memory.epoch, memory.unsettled, memory.preemptions_total) == (6, True, 3)
    assert (memory.budget_bytes, memory.staging_bytes, memory.kv_block_bytes) == (10_000, 500, 4096)
    assert (memory.parameter_bytes, list(memory.pids)) == (2000, [11, 12])
    following = [asyncio.ensure_future(anext(reports)) for reports in (loads, memories)]
    await asyncio.sleep(0)
    assert not any(report.done() for report in following)
    change_load(busy)
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*following)


async def test_an_unchanged_load_is_not_reported() -> None:
    busy = make_reporter()
    loads = busy.load_reports()
    await anext(loads)
    following = asyncio.ensure_future(anext(loads))
    for _ in range(3):
        busy.note_change()
        await asyncio.sleep(0.001)
    assert not following.done()
    change_load(busy)
    async with asyncio.timeout(DEADLINE_S):
        assert (await following).load.number == 2


async def test_another_stream_begins_with_a_report() -> None:
    busy = make_reporter()
    await anext(busy.load_reports())
    async with asyncio.timeout(DEADLINE_S):
        assert (await anext(busy.load_reports())).load.number == 2


async def test_a_recovered_engine_is_reported_with_an_unchanged_load() -> None:
    frozen = make_reporter()
    loads = frozen.load_reports()
    await anext(loads)
    engine = cast(Any, frozen)._engine
    before, engine.hung = engine.report, True
    following = asyncio.ensure_future(anext(loads))
    change_load(frozen)
    await asyncio.sleep(0.001)
    engine.report, engine.hung = before, False
    frozen.note_change()
    async with asyncio.timeout(DEADLINE_S):
        assert (await following).load.number == 2


async def test_dropped_prefixes_are_reported_to_the_scheduler() -> None:
    busy = make_reporter()
    busy.note_evicted((7, 2**64 - 1))
    assert list((await anext(busy.load_reports())).load.dropped_prefixes) == [7, 2**64 - 1]


async def test_a_received_request_is_reported_to_the_scheduler() -> None:
    busy = make_reporter()
    loads = busy.load_reports()
    await anext(loads)
    following = asyncio.ensure_future(anext(loads))
    await asyncio.sleep(0)
    busy.note_received("request")
    async with asyncio.timeout(DEADLINE_S):
        report = (await following).load
    assert list(report.received_request_ids) == ["request"]
    beside = busy.load_for_gateways()
    assert (beside.number, list(beside.received_request_ids)) == (3, ["request"])


async def test_a_frozen_engine_is_not_reported_until_it_responds() -> None:
    frozen = make_reporter(responsive=False)
    first = [
        asyncio.ensure_future(anext(reports))
        for reports in (frozen.load_reports(), frozen.memory_reports())
    ]
    for _ in range(3):
        await asyncio.sleep(0)
        frozen.note_change()
    assert not any(report.done() for report in first)
    engine = cast(Any, frozen)._engine
    engine.responsive, engine.hung = True, False
    frozen.note_change()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*first)


@pytest.mark.parametrize(("hung", "responsive"), [(True, True), (False, False)])
async def test_an_engine_that_may_not_serve_is_not_reported_to_the_scheduler(
    hung: bool, responsive: bool
) -> None:
    """An engine that was slow lately counts as hung later than as unresponsive."""
    silent = make_reporter(responsive)
    cast(Any, silent)._engine.hung = hung
    first = asyncio.ensure_future(anext(silent.load_reports()))
    for _ in range(3):
        await asyncio.sleep(0)
        silent.note_change()
    assert not first.done()
    first.cancel()


async def test_a_frozen_engine_is_reported_to_the_memory_manager() -> None:
    still = make_reporter()
    memories = still.memory_reports()
    assert not (await anext(memories)).memory.engine_hung
    cast(Any, still)._engine.hung = True
    still.note_change()
    memory = (await anext(memories)).memory
    assert (memory.engine_hung, memory.epoch) == (True, 6)


async def test_an_ended_stream_takes_no_reports_from_its_successor() -> None:
    busy = make_reporter()
    ended = busy.load_reports(), busy.memory_reports()
    await asyncio.gather(*map(anext, ended))
    read_on = [asyncio.ensure_future(anext(reports)) for reports in ended]
    await asyncio.sleep(0)
    streams = busy.load_reports(), busy.memory_reports()
    await asyncio.gather(*map(anext, streams))
    change_load(busy)
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*map(anext, streams))
        for pending in read_on:
            with pytest.raises(StopAsyncIteration):
                await pending


async def test_an_engine_that_responds_again_is_reported_at_once() -> None:
    still = make_reporter()
    memories = still.memory_reports()
    await anext(memories)
    engine = cast(Any, still)._engine
    engine.responsive = False
    following = asyncio.ensure_future(anext(memories))
    change_load(still)
    await asyncio.sleep(0.001)
    engine.responsive = True
    assert (
        memory_report_urgency(cast(Any, still)._memory_sent, cast(Any, still)._memory())
        is ReportUrgency.MAJOR
    )
    still.note_change()
    async with asyncio.timeout(DEADLINE_S):
        await following
