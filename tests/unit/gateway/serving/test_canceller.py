"""Cancels forwarded to other gateways: an owner with many delays no other."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.gateway.serving import canceller as canceller_module
from services.gateway.serving.canceller import Canceller
from services.gateway.serving.running import RunningRequests
from services.gateway.vocabulary.errors import QueueFull
from tests.support.waiting import eventually


class Cluster:
    """Three gateways; queried gateways wait until the test lets them respond."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go = asyncio.Event()

    def instances(self) -> list[Any]:
        return [
            SimpleNamespace(name="gateway", incarnation=f"{n}" * 32, address=f"host:{n}")
            for n in range(3)
        ]

    async def forward(self, address: str, owner: str, request_id: str) -> bool:
        self.asked.append(owner)
        await self.go.wait()
        return True


async def test_an_owner_with_many_cancels_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(canceller_module, "FORWARDS_MAX", 4)
    monkeypatch.setattr(canceller_module, "ALL_FORWARDS_MAX", 6)
    cluster: Any = Cluster()
    canceller = Canceller(RunningRequests(), cluster, cluster, "0" * 32)
    monkeypatch.setattr(canceller, "_forward", cluster.forward)
    async with asyncio.TaskGroup() as tasks:
        # Ids that name no gateway: both others are asked.
        begun = [tasks.create_task(canceller.cancel("anna", f"mine-{n}")) for n in range(2)]
        await eventually(lambda: cluster.asked == ["anna"] * 4)
        with pytest.raises(QueueFull):
            await canceller.cancel("anna", "mine-3")
        begun += [tasks.create_task(canceller.cancel(owner, "x")) for owner in ("ben", "cleo")]
        await eventually(lambda: cluster.asked[4:] == ["ben", "ben", "cleo", "cleo"])
        with pytest.raises(QueueFull):
            await canceller.cancel("ben", "y")
        cluster.go.set()
    assert all(task.result() for task in begun)
    assert await canceller.cancel("anna", "mine-3")
