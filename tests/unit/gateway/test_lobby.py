"""Calls that are no requests: who makes too many is in nobody's way but its own."""

import asyncio
import contextlib

import pytest

from services.gateway.errors import QueueFull
from services.gateway.grpc import lobby
from services.gateway.grpc.lobby import Lobby, guest_of
from services.gateway.keys.principal import ANYONE, Principal
from services.gateway.line import Line


def test_guests_are_owners_or_addresses() -> None:
    assert guest_of(Principal("anna"), "ipv4:192.0.2.1:5000") == "owner anna"
    assert guest_of(ANYONE, "ipv4:192.0.2.1:5000") == guest_of(ANYONE, "ipv4:192.0.2.1:6000")
    assert guest_of(ANYONE, "ipv6:%5B::1%5D:5000") == "ipv6:%5B::1%5D"


def test_a_line_that_is_full_takes_those_who_have_none_in_it() -> None:
    line = Line(each_max=3, all_max=4)
    with contextlib.ExitStack() as stack:
        for guest in ("a", "a", "a", "b"):
            assert not line.full(guest)
            stack.enter_context(line.entered(guest))
        assert line.full("a") and line.full("b") and not line.full("c")
    assert not line.full("a") and not line.full("b")


async def test_calls_are_read_in_turn_and_one_guest_is_in_no_others_way() -> None:
    room = Lobby(reading_max=2, turn_timeout_s=0.05)
    async with room.waiting("a"), room.waiting("a"):
        with pytest.raises(QueueFull, match="send no message"):
            async with room.waiting("a"):
                pass
        async with room.waiting("b"):
            pass
    async with room.waiting("a"):
        pass


async def test_those_whose_turn_comes_begin() -> None:
    room = Lobby(reading_max=1, turn_timeout_s=60)
    began: list[int] = []

    async def call(number: int) -> None:
        async with room.waiting("a"):
            began.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*map(call, range(100)))
    assert began == list(range(100))


async def test_each_kind_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WAITING_MAX", "STREAMS_MAX", "PARKED_MAX"):
        monkeypatch.setattr(lobby, name, 1)
    room = Lobby()
    with room.stream("a"):
        room.check("a")
        with pytest.raises(QueueFull, match="streams"), room.stream("a"):
            pass
    with room.parked("a"):
        with pytest.raises(QueueFull, match="take nothing"):
            room.check("a")
        room.check("b")
    async with room.waiting("a"):
        with pytest.raises(QueueFull, match="no message"):
            async with room.waiting("a"):
                pass
    room.check("a")
