"""A group that has lost a member during an etcd outage ends its requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from services.common.errors import StoreError
from services.core.report import EngineReport, Load
from services.worker import serving
from services.worker.serving import SILENCE_MAX_S, StrandedGroupWatch
from tests.support.waiting import eventually

LOST = "the connection to worker-1 is lost"


class Records:
    """A fake of etcd that responds or fails."""

    def __init__(self, answers: bool) -> None:
        self.answers = answers
        self.asked = 0

    async def snapshot(self, prefix: str) -> None:
        self.asked += 1
        if not self.answers:
            raise StoreError("etcd does not answer")


class World:
    def __init__(self, answers: bool) -> None:
        self.now_s = 0.0
        self.notified_count = 0
        self.records = Records(answers)
        self.watch = StrandedGroupWatch(cast(Any, self.records), self._note)

    def _note(self) -> None:
        self.notified_count += 1

    def report(self, trouble: str, epoch: int = 1) -> None:
        self.watch.note(EngineReport(Load(0, 0, 0, 0), epoch, trouble=trouble))

    async def wait_for_next_query(self) -> None:
        """Return once the records were queried and the answer was handled."""
        before = self.records.asked
        await eventually(lambda: self.records.asked >= before + 2)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "RETRY_S", 0.0)


@asynccontextmanager
async def world(monkeypatch: pytest.MonkeyPatch, answers: bool) -> AsyncIterator[World]:
    made = World(answers)
    monkeypatch.setattr(serving, "monotonic_s", lambda: made.now_s)
    running = asyncio.ensure_future(made.watch.run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_requests_end_once_when_etcd_stays_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, answers=False) as stranded_world:
        stranded_world.report(LOST)
        await stranded_world.wait_for_next_query()
        stranded_world.now_s = SILENCE_MAX_S - 0.1
        await stranded_world.wait_for_next_query()
        assert not stranded_world.watch.stranded
        stranded_world.now_s = SILENCE_MAX_S
        await eventually(lambda: stranded_world.watch.stranded)
        stranded_world.report(LOST)  # it is repeated with each report
        stranded_world.now_s = 100.0
        for _ in range(10):
            await asyncio.sleep(0)
        assert stranded_world.watch.stranded
        assert stranded_world.notified_count == 1


async def test_a_stranded_group_recovers_while_etcd_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, answers=True) as stranded_world:
        stranded_world.report(LOST)
        for now_s in (1.0, 5.0, 20.0):
            stranded_world.now_s = now_s
            await stranded_world.wait_for_next_query()
        assert not stranded_world.watch.stranded
        stranded_world.records.answers = False  # it goes away before the group has changed
        stranded_world.now_s = 24.0
        await eventually(lambda: stranded_world.watch.stranded)


@pytest.mark.parametrize(("trouble", "epoch"), [("", 1), (LOST, 2)])
async def test_the_timer_ends_with_recovery_or_a_new_epoch(
    monkeypatch: pytest.MonkeyPatch, trouble: str, epoch: int
) -> None:
    async with world(monkeypatch, answers=False) as stranded_world:
        stranded_world.report(LOST)
        await stranded_world.wait_for_next_query()
        stranded_world.now_s = SILENCE_MAX_S
        await eventually(lambda: stranded_world.watch.stranded)
        stranded_world.report(trouble, epoch)
        assert not stranded_world.watch.stranded
        await asyncio.sleep(0)
        assert not stranded_world.watch.stranded


async def test_a_healthy_group_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, answers=False) as stranded_world:
        stranded_world.report("")
        stranded_world.now_s = 100.0
        await asyncio.sleep(0)
        assert (
            stranded_world.records.asked,
            stranded_world.watch.stranded,
            stranded_world.notified_count,
        ) == (0, False, 0)
