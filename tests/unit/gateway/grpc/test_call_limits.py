"""Auxiliary gRPC calls: a client with too many calls delays no other."""

import asyncio
import contextlib

import pytest
from prometheus_client import CollectorRegistry

from services.gateway.bounds.concurrency_limit import ConcurrencyLimit
from services.gateway.grpc import call_limits
from services.gateway.grpc.call_limits import PARKED_BYTES, PARKED_MAX, CallLimits
from services.gateway.keys.principal import Principal
from services.gateway.records.metrics import Metrics
from services.gateway.records.request_record import RequestRecord
from services.gateway.vocabulary.errors import QueueFull
from tests.support.exposition import samples, value


def test_guests_are_owners_or_addresses() -> None:
    anna = RequestRecord("r", 0.0, principal=Principal("anna"), address="192.0.2.1")
    anyone = RequestRecord("r", 0.0, address="192.0.2.1")
    assert (anna.limit_key, anyone.limit_key) == ("owner anna", "192.0.2.1")


def test_a_full_queue_admits_guests_without_a_queued_call() -> None:
    line = ConcurrencyLimit(each_max=3, all_max=4)
    with contextlib.ExitStack() as stack:
        for limit_key in ("a", "a", "a", "b"):
            assert not line.full(limit_key)
            stack.enter_context(line.entered(limit_key))
        assert line.full("a") and line.full("b") and not line.full("c")
    assert not line.full("a") and not line.full("b")


async def test_calls_are_read_in_turn_and_a_guest_delays_no_other() -> None:
    room = CallLimits(reading_max=2, slot_timeout_s=0.05)
    async with room.waiting("a"), room.waiting("a"):
        with pytest.raises(QueueFull, match="send no message"):
            async with room.waiting("a"):
                pass
        async with room.waiting("b"):
            pass
    async with room.waiting("a"):
        pass


async def test_calls_start_in_turn() -> None:
    room = CallLimits(reading_max=1, slot_timeout_s=60)
    began: list[int] = []

    async def call(number: int) -> None:
        async with room.waiting("a"):
            began.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*map(call, range(100)))
    assert began == list(range(100))


def test_unread_responses_count_in_bytes() -> None:
    room = CallLimits()
    with room.parked("a", PARKED_MAX * PARKED_BYTES // 2):
        room.check("a")
        with room.parked("a", PARKED_MAX * PARKED_BYTES // 2):
            with pytest.raises(QueueFull, match="unread responses"):
                room.check("a")
            room.check("b")
    room.check("a")


async def test_each_kind_of_call_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WAITING_MAX", "STREAMS_MAX", "PARKED_MAX"):
        monkeypatch.setattr(call_limits, name, 1)
    room = CallLimits()
    with room.stream("a"):
        room.check("a")
        with pytest.raises(QueueFull, match="streams"), room.stream("a"):
            pass
    with room.parked("a"):
        with pytest.raises(QueueFull, match="unread responses"):
            room.check("a")
        room.check("b")
    async with room.waiting("a"):
        with pytest.raises(QueueFull, match="no message"):
            async with room.waiting("a"):
                pass
    room.check("a")


async def test_calls_are_counted_in_metrics() -> None:
    metrics, here = Metrics(("m",), CollectorRegistry()), CallLimits()
    metrics.export_calls(here.by_kind)

    def exported() -> dict[str, float | None]:
        all_samples = samples(metrics.render().decode())
        return {
            state: value(all_samples, "tideserve_gateway_grpc_calls", state=state)
            for state in ("waiting", "streams", "parked")
        }

    async with here.waiting("a"), here.waiting("b"):
        with here.stream("a"), here.parked("a"):
            assert exported() == {"waiting": 2, "streams": 1, "parked": 1}
    assert exported() == {"waiting": 0, "streams": 0, "parked": 0}
