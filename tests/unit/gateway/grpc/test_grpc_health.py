"""Health checks without a key: their memory is bounded."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from services.common.health import HealthServicer
from services.gateway.grpc.health import (
    BYTES_MAX,
    READING_MAX,
    SERVICE,
    WATCHING_MAX,
    health_methods,
)
from services.gateway.grpc.interceptors import Method
from services.gateway.vocabulary.errors import BodyTooLarge, QueueFull
from tests.support.waiting import eventually


class FakeCall:
    """A call of `limit_key` whose message comes when `sent` is set."""

    def __init__(self, limit_key: str, service: str = "") -> None:
        self.limit_key = limit_key
        self.sent = asyncio.Event()
        self.reads = False
        self.answers: list[Any] = []
        self.client = SimpleNamespace(send=self._send)
        self._data = health_pb2.HealthCheckRequest(service=service).SerializeToString()

    async def read(self, timeout_s: float) -> bytes:
        self.reads = True
        await self.sent.wait()
        return self._data

    async def _send(self, message: Any) -> None:
        self.answers.append(message)


@pytest.fixture
def methods() -> dict[str, Method]:
    return health_methods(HealthServicer((), lambda: True))


def run(methods: dict[str, Method], name: str, call: FakeCall) -> asyncio.Task[None]:
    made: Any = call
    return asyncio.ensure_future(methods[f"/{SERVICE}/{name}"].run(made))


async def test_concurrent_reads_of_an_address_are_bounded(methods: dict[str, Method]) -> None:
    loud = [FakeCall("10.0.0.1") for _ in range(READING_MAX + 3)]
    tasks = [run(methods, "Check", call) for call in loud]
    quiet = FakeCall("10.0.0.2")
    quiet.sent.set()
    await run(methods, "Check", quiet)
    assert len(quiet.answers) == 1
    assert sum(call.reads for call in loud) == READING_MAX
    for call in loud:
        call.sent.set()
    await asyncio.gather(*tasks)
    assert all(len(call.answers) == 1 for call in loud)


async def test_a_large_message_is_refused(methods: dict[str, Method]) -> None:
    call = FakeCall("10.0.0.1", "x" * BYTES_MAX)
    call.sent.set()
    with pytest.raises(BodyTooLarge):
        await run(methods, "Check", call)


async def test_watches_are_counted_by_address(methods: dict[str, Method]) -> None:
    calls = [FakeCall("10.0.0.1") for _ in range(WATCHING_MAX)]
    one_more, other = FakeCall("10.0.0.1"), FakeCall("10.0.0.2")
    for call in (*calls, one_more, other):
        call.sent.set()
    tasks = [run(methods, "Watch", call) for call in calls]
    await eventually(lambda: all(call.answers for call in calls))
    with pytest.raises(QueueFull, match="your address already has"):
        await run(methods, "Watch", one_more)
    tasks.append(run(methods, "Watch", other))
    await eventually(lambda: other.answers)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
