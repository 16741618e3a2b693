import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from services.core.groups.coordinator import CoordinatorState
from services.core.groups.vocabulary import EngineHung, Event
from services.core.report import EngineReport, Load
from services.memmgr.driver import Driver
from services.memmgr.member_client import ShippingFailed
from services.memmgr.worker_memory import MemoryView
from tests.support.reports import memory_report

UNUSED = cast(Any, None)


class Heard(CoordinatorState):
    """Records events and decides nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def handle(self, event: Event) -> list[Any]:
        self.events.append(event)
        return []


class Worker:
    """Reports of one worker to a memory manager."""

    def __init__(self) -> None:
        self.memory, self.state = MemoryView(asyncio.Event()), Heard()
        self.driver = Driver(self.state, UNUSED, UNUSED, self.memory)
        self.register("i1")

    def register(self, incarnation: str) -> None:
        """Register this process alone; none for ""."""
        self.memory.set_registered({"w": incarnation} if incarnation else {})

    def tell(self, hung: bool, incarnation: str = "i1") -> list[tuple[str, bool]]:
        """The events caused by a report."""
        self.state.events.clear()
        report = memory_report("w", EngineReport(Load(0, 0, 4, 0)), incarnation)
        self.driver.note_report(replace(report, engine_hung=hung))
        events = [event for event in self.state.events if isinstance(event, EngineHung)]
        return [(event.incarnation, event.hung) for event in events]


def test_a_frozen_engine_is_reported_at_start_and_end() -> None:
    worker = Worker()
    assert worker.tell(False) == [("i1", False)]
    assert [worker.tell(hung) for hung in (False, True, True, False, False)] == [
        [],
        [("i1", True)],
        [],
        [("i1", False)],
        [],
    ]


def test_a_reregistered_worker_reports_its_engine_again() -> None:
    """Its lease expired while its engine was frozen, and the engine has resumed."""
    worker = Worker()
    worker.tell(True)
    worker.register("")
    worker.register("i1")
    assert worker.tell(False) == [("i1", False)]


def test_a_report_of_an_unregistered_worker_is_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker()
    worker.register("")
    assert worker.tell(True) == worker.tell(True) == []
    assert not caplog.records


def test_a_late_report_of_a_former_process_is_ignored() -> None:
    worker = Worker()
    worker.register("i2")
    assert worker.tell(True, "i2") == [("i2", True)]
    assert worker.tell(False, "i1") == []
    assert worker.tell(True, "i2") == []


async def test_requests_do_not_move_once_another_process_leads() -> None:
    with pytest.raises(ShippingFailed, match="another memory manager leads"):
        await Worker().driver.ship(UNUSED)
