"""The driver: commands to the copier, results as events, growth, and copier failures."""

from dataclasses import dataclass, field
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.core.host.vocabulary import (
    BlocksRecalled,
    BlocksSaved,
    CancelHostJob,
    HostCounts,
    HostGrown,
    HostLooked,
    RecallBlocks,
    RecalledBlock,
    SaveBlocks,
    SavedBlock,
)
from services.core.report import HostReport
from services.worker.engine.host.copier import JobEnd, StepEnd
from services.worker.engine.host.driver import HostDriver, wait_ms
from services.worker.engine.host.lane import HostLane

SAVE = SaveBlocks(1, (SavedBlock(b"a", 0), SavedBlock(b"b", 1)))
RECALL = RecallBlocks(2, "@recall.2", (RecalledBlock(b"a", 0, 0),))


@dataclass
class FakeCopier:
    """Records the calls of the driver."""

    calls: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    has_room: bool = True
    is_busy: bool = False
    is_alive: bool = True

    def submit(self, command: Any, due_s: float) -> bool:
        self.calls.append((command, due_s))
        return self.has_room

    def grow(self) -> None:
        self.calls.append("grow")

    def start(self) -> None:
        self.calls.append("start")

    def cancel(self, job: int) -> None:
        self.calls.append(job)

    def ends(self) -> list[Any]:
        results, self.results = self.results, []
        return results


@dataclass
class FakeStore:
    slots: int = 0
    slots_max: int = 30
    step_slots: int = 10
    slot_bytes: int = 100

    @property
    def backed_bytes(self) -> int:
        return self.slots * self.slot_bytes


@dataclass
class FakeCache:
    empty: int = 0
    owed: int = 2


class Place:
    def __init__(self, paced: bool = False) -> None:
        self.copier, self.store, self.cache = FakeCopier(), FakeStore(), FakeCache()
        self.lane = HostLane(0.5, paced)
        tier = SimpleNamespace(cache=self.cache, counts=HostCounts(3, 4, 5, 6, 7))
        self.driver = HostDriver(*cast(Any, (self.store, self.copier, self.lane, tier)))


def test_commands_reach_the_copier_and_results_the_planner() -> None:
    place = Place()
    assert place.driver.copy(SAVE, 3.0) is None
    assert place.driver.copy(RECALL, 3.0) is None
    place.driver.cancel(CancelHostJob(2))
    assert place.copier.calls == [(SAVE, 3.0), (RECALL, 3.0), 2]
    assert place.driver.look(3.0) == HostLooked(3.0, 4.5)
    place.cache.empty = 10
    place.copier.is_busy = True
    place.copier.results = [JobEnd(SAVE, (True, False)), JobEnd(RECALL, (True,))]
    assert place.driver.events(4.0) == [
        BlocksSaved(4.0, 1, (True, False)),
        BlocksRecalled(4.0, 2, (True,)),
    ]
    assert place.driver.look(4.0) == HostLooked(4.0, 4.5)
    place.copier.is_busy = False
    assert place.driver.events(4.0) == []
    assert place.driver.look(4.0) == HostLooked(4.0, 4.0)


def test_paced_jobs_end_at_the_time_of_the_modelled_link() -> None:
    place = Place(paced=True)
    place.driver.copy(SAVE, 3.0)
    assert place.copier.calls == [(SAVE, 4.0)]


def test_a_job_without_room_in_the_queue_has_failed() -> None:
    place = Place()
    place.copier.has_room = False
    assert place.driver.copy(SAVE, 3.0) == BlocksSaved(3.0, 1, (False, False))


def test_the_store_grows_step_by_step_while_few_slots_are_empty() -> None:
    place = Place()
    place.driver.start()
    assert place.copier.calls == ["start", "grow"]
    place.driver.events(1.0)
    assert place.copier.calls == ["start", "grow"], "one step at a time"
    place.store.slots, place.cache.empty = 10, 10
    place.copier.results = [StepEnd(10)]
    assert place.driver.events(2.0) == [HostGrown(2.0, 10)]
    place.cache.empty = 4
    place.driver.events(3.0)
    assert place.copier.calls == ["start", "grow", "grow"]
    place.store.slots = 30
    place.copier.results = [StepEnd(30)]
    place.driver.events(4.0)
    assert place.copier.calls == ["start", "grow", "grow"], "it has all slots"


def test_the_store_and_the_planner_are_unchanged_without_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = Place()
    place.driver.start()
    place.copier.results = [StepEnd(0, "there is no memory")]
    assert place.driver.events(2.0) == []
    assert "there is no memory" in caplog.text
    place.driver.events(3.0)
    assert place.copier.calls == ["start", "grow"]


def test_a_copier_that_fails_loses_all_copies_once(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    place.cache.empty = 10
    place.copier.results, place.copier.is_alive = [JobEnd(SAVE, (True, True))], False
    assert place.driver.events(2.0) == [BlocksSaved(2.0, 1, (True, True)), HostGrown(2.0, 0)]
    assert caplog.text.count("host copies of KV are lost") == 1
    assert place.driver.events(3.0) == []
    assert place.driver.copy(RECALL, 3.0) == BlocksRecalled(3.0, 2, ())
    assert place.copier.calls == []


def test_the_report_counts_copied_blocks() -> None:
    place = Place()
    place.store.slots = 10
    assert place.driver.report == HostReport(1000, 2, 3, 300, 4, 5, 6, 7)


@pytest.mark.parametrize(
    ("due_s", "expected"), [(inf, 500), (1.0, 1), (1.25, 250), (9.0, 500), (-inf, 1)]
)
def test_an_idle_engine_waits_until_host_copies_are_due(due_s: float, expected: int) -> None:
    assert wait_ms(due_s, 1.0, 500) == expected
