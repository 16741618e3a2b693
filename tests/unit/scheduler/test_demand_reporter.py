"""Times of demand reports to the memory manager. See also `test_demand` of core."""

import asyncio
from typing import Any, cast

import pytest

from services.core.demand import ModelDemand
from services.scheduler import demand_reporter
from services.scheduler.demand_reporter import DemandReporter
from tests.support.waiting import DEADLINE_S, eventually


async def test_urgent_changes_are_reported_at_once_and_others_with_the_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demand_reporter, "INTERVAL_S", 10 * DEADLINE_S)
    monkeypatch.setattr(demand_reporter, "PAUSE_S", 0.0)
    unused, changed = cast(Any, None), asyncio.Event()
    demands: list[ModelDemand] = []
    reports = DemandReporter(unused, lambda: tuple(demands), changed, unused).reports()

    async def next_report() -> list[tuple[int, float]]:
        report = await anext(reports)
        return [(demand.queued, demand.arriving_tokens_per_s) for demand in report.demands]

    async with asyncio.timeout(DEADLINE_S):
        assert await next_report() == []
        demands[:] = [ModelDemand("m", 1, 100, arriving_tokens_per_s=50.0)]
        changed.set()
        assert await next_report() == [(1, 50.0)]
        following = asyncio.ensure_future(next_report())
        demands[:] = [ModelDemand("m", 1, 100, arriving_tokens_per_s=40.0)]
        changed.set()
        await eventually(lambda: not changed.is_set(), interval_s=0.001)
        await asyncio.sleep(0.001)
        assert not following.done()
        demands[:] = [ModelDemand("m", 2, 200, arriving_tokens_per_s=41.0)]
        changed.set()
        assert await following == [(2, 41.0)]
        monkeypatch.setattr(demand_reporter, "INTERVAL_S", 0.001)
        changed.set()
        demands[:] = [ModelDemand("m", 3, 300)]
        assert await next_report() == [(3, 0.0)]
        assert await next_report() == [(3, 0.0)]
