"""Streams whose request changes hands: the gateway's client and real worker servicers over gRPC."""

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random

import pytest

from services.core.request import Limits, Sampling
from services.gateway.errors import EngineFailed, GatewayError, WorkerLost
from services.gateway.message import Assignment, Finish, Job
from services.gateway.token_stream import StaleEpoch, TokenStream
from services.gateway.worker_client import WorkerClient
from services.worker.arrivals import ATTACH_TIMEOUT_S
from tests.support.owner import Owner
from tests.support.waiting import eventually

TOKENS = [11, 12, 13, 14, 15]
N = len(TOKENS)


@dataclass
class Bench:
    """A gateway's end, and workers that requests move between."""

    client: WorkerClient
    owners: list[Owner]
    moves: list[None] = field(default_factory=list)
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    def place(self, request_id: str) -> Assignment:
        """The first worker."""
        owner = self.owners[0]
        group_id, epoch, _ = owner.place
        return Assignment(request_id, group_id, epoch, owner.worker_id, owner.address)

    def open(self, request_id: str) -> contextlib.AbstractAsyncContextManager[TokenStream]:
        """Start a request at the first worker."""
        job = Job(request_id, "m", (1, 2), Sampling(), Limits(max_tokens=N))
        return self.client.open(job, self.place(request_id))

    async def all_idle(self) -> None:
        """Wait until no worker has a request."""
        for owner in self.owners:
            await asyncio.wait_for(owner.servicer.wait_idle(), 20)
            owner.servicer._arrivals.check_invariants()
        assert self.client.running == 0


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    moves: list[None] = []
    async with contextlib.AsyncExitStack() as stack:
        owners = [
            await stack.enter_async_context(Owner(f"w{number}", 7 + number).serving())
            for number in range(3)
        ]
        known = frozenset(owner.address for owner in owners)
        client = WorkerClient(lambda: known, 1.0, lambda: moves.append(None))
        running = asyncio.create_task(client.run())
        await asyncio.sleep(0)
        yield Bench(client, owners, moves, stack)
        running.cancel()
        await asyncio.wait([running])


async def read(stream: TokenStream) -> list[int]:
    """All tokens to the end."""
    tokens: list[int] = []
    async with asyncio.timeout(20):
        while True:
            fresh, finish = await stream.next()
            tokens += fresh
            if finish is not None:
                assert finish is Finish.LENGTH
                return tokens


async def waits(owner: Owner, request_id: str) -> None:
    """Wait until a gateway waits for a request that has not come to `owner`."""
    await eventually(lambda: request_id in owner.servicer._arrivals._expected, interval_s=0.001)


ORDERS = ("adopt first", "attach first", "adopt and emit first", "end before attach")


async def hand_over(request_id: str, old: Owner, new: Owner, index: int, order: str) -> int:
    """Move a request that has emitted `index` tokens; returns how many it has emitted then."""
    moved = old.moved(request_id, new, index)
    if order == "attach first":
        old.tell(moved)
        await waits(new, request_id)
        new.adopt(request_id, TOKENS, index)
        return index
    new.adopt(request_id, TOKENS, index)
    end = {"adopt first": index, "adopt and emit first": min(index + 1, N - 1)}.get(order, N)
    new.emit(request_id, TOKENS, index, end)
    old.tell(moved)
    return end


@pytest.mark.parametrize("order", ORDERS)
async def test_a_stream_moves_at_any_token(bench: Bench, order: str) -> None:
    old, new, _ = bench.owners
    for index in range(N):
        name = f"r{index}"
        async with bench.open(name) as stream:
            await old.has_started(name)
            old.emit(name, TOKENS, 0, index)
            told = await hand_over(name, old, new, index, order)
            new.emit(name, TOKENS, told, N)
            # What the old one still says of it comes too late.
            old.emit(name, [99] * N, index, N)
            assert await read(stream) == TOKENS
        await bench.all_idle()
    assert len(bench.moves) == N
    assert old.aborted == new.aborted == []


async def test_a_stream_moves_twice(bench: Bench) -> None:
    first, second, third = bench.owners
    pairs = [(a, b) for a in range(N) for b in range(a, N)]
    for number, ((a, b), orders) in enumerate(
        itertools.product(pairs, itertools.product(ORDERS[:2], repeat=2))
    ):
        name = f"r{number}"
        async with bench.open(name) as stream:
            await first.has_started(name)
            first.emit(name, TOKENS, 0, a)
            await hand_over(name, first, second, a, orders[0])
            second.emit(name, TOKENS, a, b)
            # Back to where it came from, or on to a third.
            last = first if number % 3 == 0 else third
            await hand_over(name, second, last, b, orders[1])
            last.emit(name, TOKENS, b, N)
            assert await read(stream) == TOKENS
        await bench.all_idle()
    assert len(bench.moves) == 2 * number + 2


async def test_it_has_moved_on_before_the_gateway_comes(bench: Bench) -> None:
    first, second, third = bench.owners
    async with bench.open("r") as stream:
        await first.has_started("r")
        first.emit("r", TOKENS, 0, 1)
        second.adopt("r", TOKENS, 1)
        second.emit("r", TOKENS, 1, 2)
        second.tell(second.moved("r", third, 2))
        # It comes back to the second once more.
        third.adopt("r", TOKENS, 2)
        third.emit("r", TOKENS, 2, 3)
        second.adopt("r", TOKENS, 3)
        third.tell(third.moved("r", second, 3))
        first.tell(first.moved("r", second, 1))
        second.emit("r", TOKENS, 3, N)
        assert await read(stream) == TOKENS
    assert third.servicer.active == 1, "kept until its time is over"
    third.now_s += ATTACH_TIMEOUT_S
    await bench.all_idle()
    assert third.aborted == []


async def test_hanging_up_reaches_the_owner_at_every_moment(bench: Bench) -> None:
    old, new, _ = bench.owners
    for number, moment in enumerate(
        ["before adopt", "after adopt", "before moved", "waiting", "attached"] * 3
    ):
        name = f"r{number}"
        index = number % 3
        async with bench.open(name):
            await old.has_started(name)
            old.emit(name, TOKENS, 0, index)
            if moment in ("after adopt", "attached"):
                new.adopt(name, TOKENS, index)
            if moment == "waiting":
                old.tell(old.moved(name, new, index))
                await waits(new, name)
            if moment == "attached":
                old.tell(old.moved(name, new, index))
                await eventually(lambda: name in new.servicer._links)  # noqa: B023
        if moment in ("before adopt", "after adopt", "before moved"):
            # The old servicer has forgotten it when its engine says that it has handed it over.
            await eventually(lambda: name in old.aborted)  # noqa: B023
            if moment == "before moved":
                new.adopt(name, TOKENS, index)
            old.tell(old.moved(name, new, index))
        if moment in ("before adopt", "waiting"):
            await eventually(lambda: name in new.servicer._arrivals._aborted)  # noqa: B023
            new.adopt(name, TOKENS, index)
        await eventually(lambda: name in new.aborted)  # noqa: B023
        new.emit(name, TOKENS, index, N)
        await bench.all_idle()
    assert len(new.aborted) == len(set(new.aborted)) == 15


async def test_a_request_that_never_comes_is_admitted_again(bench: Bench) -> None:
    old, new, _ = bench.owners
    for emitted, error in ((0, StaleEpoch), (1, EngineFailed)):
        name = f"r{emitted}"
        async with bench.open(name) as stream:
            await old.has_started(name)
            old.emit(name, TOKENS, 0, emitted)
            old.tell(old.moved(name, new, emitted))
            await waits(new, name)
            new.now_s += ATTACH_TIMEOUT_S
            with pytest.raises(error):
                await read(stream)
        await bench.all_idle()


async def test_a_worker_that_does_not_answer_is_tried_again(bench: Bench) -> None:
    old, *_ = bench.owners
    late = Owner("late", 20)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        late.address = f"127.0.0.1:{closed.getsockname()[1]}"
    for emitted in (0, 1):
        async with bench.open(f"r{emitted}") as stream:
            await old.has_started(f"r{emitted}")
            old.emit(f"r{emitted}", TOKENS, 0, emitted)
            old.tell(old.moved(f"r{emitted}", late, emitted))
            with pytest.raises(WorkerLost):
                await read(stream)
    bench.client._attach_timeout_s = 30
    async with bench.open("r") as stream:
        await old.has_started("r")
        old.tell(old.moved("r", late, 0))
        await eventually(lambda: late.address in bench.client._links)
        await eventually(lambda: late.address not in bench.client._links)
        async with late.serving():
            late.adopt("r", TOKENS, 0)
            late.emit("r", TOKENS, 0, N)
            assert await read(stream) == TOKENS


async def test_a_newer_move_of_an_unanswered_stream_counts(bench: Bench) -> None:
    old, silent, third = bench.owners
    async with bench.open("r") as stream, bench.open("other"):
        await old.has_started("other")
        old.tell(old.moved("r", silent, 0))
        await waits(silent, "r")
        third.adopt("r", TOKENS, 0)
        old.tell(old.moved("r", third, 0))
        third.emit("r", TOKENS, 0, N)
        assert await read(stream) == TOKENS
    silent.now_s += ATTACH_TIMEOUT_S
    await bench.all_idle()


async def test_an_answered_stream_outlives_everybody_else(bench: Bench) -> None:
    old, new, third = bench.owners
    bench.client._attach_timeout_s = 0.5
    async with bench.open("r") as stream:
        await old.has_started("r")
        new.adopt("r", TOKENS, 0)
        old.tell(old.moved("r", new, 0))
        await eventually(lambda: stream.attached)
        # Longer than the time for attaching: its KV is on the way, say.
        new.now_s += 2 * ATTACH_TIMEOUT_S
        await asyncio.sleep(1)
        # A late word of the old one has no effect.
        old.tell(old.moved("r", third, 0))
        new.emit("r", TOKENS, 0, N)
        assert await read(stream) == TOKENS
    await bench.all_idle()


@pytest.mark.parametrize("seed", range(4))
async def test_many_streams_move_at_random(bench: Bench, seed: int) -> None:
    rng = Random(seed)

    async def one(name: str) -> None:
        with contextlib.suppress(GatewayError):
            async with bench.open(name) as stream:
                owner = bench.owners[0]
                await owner.has_started(name)
                reading = asyncio.create_task(read(stream))
                leaves_at = rng.choice([None, None, *range(N)])
                for index in range(N):
                    if index == leaves_at:
                        reading.cancel()
                        return
                    while rng.random() < 0.4:
                        new = rng.choice([o for o in bench.owners if o is not owner])
                        await hand_over(name, owner, new, index, rng.choice(ORDERS[:2]))
                        owner = new
                        await asyncio.sleep(rng.choice([0, 0, 0.001, 0.01]))
                    owner.emit(name, TOKENS, index, index + 1)
                assert await reading == TOKENS

    async with asyncio.TaskGroup() as tasks:
        for number in range(24):
            tasks.create_task(one(f"r{number}"))
    for owner in bench.owners:
        owner.now_s += ATTACH_TIMEOUT_S
    await bench.all_idle()
