"""Streams of requests that move: the gateway's client and real worker servicers over gRPC."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass
from random import Random

import pytest

from services.common.transport import Transport
from services.core.ask import Assignment
from services.core.request import Limits, Request, Sampling
from services.gateway.cluster.journal import Journal
from services.gateway.cluster.token_stream import StaleEpoch, TokenStream
from services.gateway.cluster.worker_client import WorkerClient
from services.gateway.records.request_record import ChoiceRecord
from services.gateway.vocabulary.errors import WorkerLost
from services.gateway.vocabulary.message import Finish, TokenEvent
from services.worker.handovers import ATTACH_TIMEOUT_S
from tests.support.owner import Owner
from tests.support.refusing_address import refusing_address
from tests.support.waiting import eventually
from tideserve.common.v1 import load_pb2

WORKS_FOR: ContextVar[str] = ContextVar("works for", default="no request")
"""The request that a task works for, as in its log lines."""
TOKENS = [11, 12, 13, 14, 15]
N = len(TOKENS)


@dataclass
class Bench:
    """A gateway's client, and workers between which requests move."""

    client: WorkerClient
    owners: list[Owner]
    registered: set[str]  # addresses
    moves: list[None]
    loads: list[str]
    worked_for: list[str]
    running: asyncio.Task[None]

    def place(self, request_id: str) -> Assignment:
        """The first worker."""
        owner = self.owners[0]
        group_id, epoch = owner.place.group_id, owner.place.epoch
        return Assignment(request_id, group_id, epoch, owner.worker_id, owner.address)

    def open(
        self, request_id: str, coalesced: bool = False
    ) -> contextlib.AbstractAsyncContextManager[TokenStream]:
        """Start a request at the first worker."""
        request = Request(request_id, (1, 2), Sampling(), Limits(max_tokens=N), arrival_s=0.0)
        place = self.place(request_id)
        return self.client.open(request, place, ChoiceRecord(), Journal(N), coalesced)

    @contextlib.asynccontextmanager
    async def begin(
        self, request_id: str, emitted: int, coalesced: bool = False
    ) -> AsyncIterator[TokenStream]:
        """Start a request at the first worker, which emits `emitted` tokens."""
        async with self.open(request_id, coalesced) as stream:
            await self.owners[0].has_started(request_id)
            self.owners[0].emit(request_id, TOKENS, 0, emitted)
            yield stream

    async def all_idle(self) -> None:
        """Wait until no worker holds a request."""
        for owner in self.owners:
            await asyncio.wait_for(owner.servicer.wait_idle(), 20)
            owner.check_idle()
        assert self.client.running == 0


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    moves: list[None] = []
    loads: list[str] = []
    worked_for: list[str] = []

    def note_load(load: load_pb2.WorkerLoad) -> None:
        loads.append(load.worker_id)
        worked_for.append(WORKS_FOR.get())

    async with contextlib.AsyncExitStack() as stack:
        owners = [
            await stack.enter_async_context(Owner(f"w{number}", 7 + number).serving())
            for number in range(3)
        ]
        registered = {owner.address for owner in owners}
        client = WorkerClient(
            lambda: frozenset(registered),
            30.0,
            lambda: moves.append(None),
            note_load,
            Transport().dial,
        )
        running = asyncio.create_task(client.run())
        await asyncio.sleep(0)
        yield Bench(client, owners, registered, moves, loads, worked_for, running)
        running.cancel()
        await asyncio.wait([running])


async def read(stream: TokenStream) -> list[int]:
    """Read a stream to its end; returns its tokens."""
    tokens: list[int] = []
    async with asyncio.timeout(20):
        while True:
            fresh = await stream.next()
            tokens += fresh.token_ids
            if fresh.finish is not None:
                assert fresh.finish is Finish.LENGTH
                return tokens


ORDERS = ("adopt first", "attach first", "adopt and emit first", "end before attach")


async def hand_over(request_id: str, old: Owner, new: Owner, index: int, order: str) -> int:
    """Move a request that has emitted `index` tokens; returns its number of emitted tokens."""
    moved = old.moved(request_id, new, index)
    if order == "attach first":
        old.publish(moved)
        await new.is_awaited(request_id)
        new.adopt(request_id, TOKENS, index)
        return index
    new.adopt(request_id, TOKENS, index)
    end = {"adopt first": index, "adopt and emit first": min(index + 1, N - 1)}.get(order, N)
    new.emit(request_id, TOKENS, index, end)
    old.publish(moved)
    return end


async def test_a_link_works_for_no_request_in_particular(bench: Bench) -> None:
    WORKS_FOR.set("the first request")
    async with bench.open("r") as stream:
        await bench.owners[0].has_started("r")
        bench.owners[0].emit("r", TOKENS, 0, N)
        assert await read(stream) == TOKENS
    assert set(bench.worked_for) == {"no request"}


async def test_a_load_is_forwarded_before_the_end_in_the_same_frame(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = bench.owners[0]
    passed_on_before: list[list[str]] = []
    async with bench.open("r") as stream:
        apply = stream.apply

        def note(event: TokenEvent) -> None:
            passed_on_before.append(list(bench.loads))
            apply(event)

        monkeypatch.setattr(stream, "apply", note)
        await owner.has_started("r")
        owner.emit("r", TOKENS, 0, N)
        assert await read(stream) == TOKENS
    assert passed_on_before == [[]] * (N - 1) + [[owner.worker_id]]


@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("order", ORDERS)
async def test_a_stream_moves_at_any_token(bench: Bench, order: str, coalesced: bool) -> None:
    old, new, _ = bench.owners
    for index in range(N):
        name = f"r{index}"
        async with bench.begin(name, index, coalesced) as stream:
            emitted = await hand_over(name, old, new, index, order)
            new.emit(name, TOKENS, emitted, N)
            # Late events of the old worker are ignored.
            old.emit(name, [99] * N, index, N)
            assert await read(stream) == TOKENS
        await bench.all_idle()
    assert len(bench.moves) == N
    assert old.aborted == new.aborted == []


@pytest.mark.parametrize("coalesced", [False, True])
async def test_a_stream_moves_twice(bench: Bench, coalesced: bool) -> None:
    first, second, third = bench.owners
    pairs = [(a, b) for a in range(N) for b in range(a, N)]
    for number, ((a, b), orders) in enumerate(
        itertools.product(pairs, itertools.product(ORDERS[:2], repeat=2))
    ):
        name = f"r{number}"
        async with bench.begin(name, a, coalesced) as stream:
            await hand_over(name, first, second, a, orders[0])
            second.emit(name, TOKENS, a, b)
            # Back to its source, or on to a third worker.
            last = first if number % 3 == 0 else third
            await hand_over(name, second, last, b, orders[1])
            last.emit(name, TOKENS, b, N)
            assert await read(stream) == TOKENS
        await bench.all_idle()
    assert len(bench.moves) == 2 * number + 2


@pytest.mark.parametrize("index", range(N))
async def test_coalesced_tokens_precede_the_engines_death(bench: Bench, index: int) -> None:
    owner = bench.owners[0]
    async with bench.begin("r", index, coalesced=True) as stream:
        owner.servicer.fail_all("it died", engine_died=True)
        tokens: list[int] = []
        with pytest.raises(WorkerLost):
            async with asyncio.timeout(20):
                while True:
                    tokens += (await stream.next()).token_ids
    # The next start follows all generated tokens.
    assert tokens == TOKENS[:index]


async def test_a_request_that_moved_again_before_the_gateway_attaches(bench: Bench) -> None:
    first, second, third = bench.owners
    async with bench.begin("r", 1) as stream:
        second.adopt("r", TOKENS, 1)
        second.emit("r", TOKENS, 1, 2)
        second.publish(second.moved("r", third, 2))
        # It returns to the second worker.
        third.adopt("r", TOKENS, 2)
        third.emit("r", TOKENS, 2, 3)
        second.adopt("r", TOKENS, 3)
        third.publish(third.moved("r", second, 3))
        first.publish(first.moved("r", second, 1))
        second.emit("r", TOKENS, 3, N)
        assert await read(stream) == TOKENS
    assert third.servicer.active == 1, "kept until its time is over"
    third.now_s += ATTACH_TIMEOUT_S
    await bench.all_idle()
    assert third.aborted == []


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("moment", ["awaited", "read"])
async def test_a_disconnect_after_the_move_reaches_the_new_owner(
    bench: Bench, moment: str, index: int
) -> None:
    old, new, _ = bench.owners
    async with bench.begin("r", index):
        old.publish(old.moved("r", new, index))
        await new.is_awaited("r")
        if moment == "read":
            new.adopt("r", TOKENS, index)
            await new.is_read("r")
    if moment == "awaited":
        await new.is_unwanted("r")
        new.adopt("r", TOKENS, index)
    await new.has_aborted("r")
    new.emit("r", TOKENS, index, N)
    await bench.all_idle()
    assert (old.aborted, new.aborted) == ([], ["r"])


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("adopted", ["before", "between", "after"])
async def test_an_abort_too_late_for_the_old_owner(bench: Bench, adopted: str, index: int) -> None:
    old, new, _ = bench.owners
    async with bench.begin("r", index):
        if adopted == "before":
            new.adopt("r", TOKENS, index)
    await old.has_aborted("r")
    if adopted == "between":
        new.adopt("r", TOKENS, index)
    # Its engine had already handed it over, and the servicer no longer knows it.
    old.publish(old.moved("r", new, index))
    if adopted == "after":
        await new.is_unwanted("r")
        new.adopt("r", TOKENS, index)
    await new.has_aborted("r")
    await bench.all_idle()


async def test_a_gateway_that_dies_while_it_waits(bench: Bench) -> None:
    old, new, _ = bench.owners
    async with bench.open("r"):
        await old.has_started("r")
        old.publish(old.moved("r", new, 0))
        await new.is_awaited("r")
        bench.running.cancel()
        await asyncio.wait([bench.running])
        await new.is_unwanted("r")
    new.adopt("r", TOKENS, 0)
    await new.has_aborted("r")
    await bench.all_idle()


async def test_a_request_that_never_arrives_is_admitted_again(bench: Bench) -> None:
    old, new, _ = bench.owners
    for emitted in (0, 1):
        name = f"r{emitted}"
        async with bench.begin(name, emitted) as stream:
            old.publish(old.moved(name, new, emitted))
            await new.is_awaited(name)
            new.now_s += ATTACH_TIMEOUT_S
            with pytest.raises(StaleEpoch):
                await read(stream)
        await bench.all_idle()


async def test_a_worker_that_does_not_answer_in_time(bench: Bench) -> None:
    old, *_ = bench.owners
    silent = Owner("silent", 20)
    bench.client._attach_timeout_s = 0.5
    with refusing_address() as silent.address:
        for emitted in (0, 1):
            name = f"r{emitted}"
            async with bench.begin(name, emitted) as stream:
                old.publish(old.moved(name, silent, emitted))
                with pytest.raises(WorkerLost):
                    await read(stream)
        await bench.all_idle()


async def test_an_unreachable_worker_is_abandoned_at_once(bench: Bench) -> None:
    old, *_ = bench.owners
    gone = Owner("gone", 20)
    bench.client._attach_timeout_s = 3600.0
    with refusing_address() as gone.address:
        bench.registered.add(gone.address)
        async with bench.open("r") as stream:
            await old.has_started("r")
            old.publish(old.moved("r", gone, 0))
            with pytest.raises(WorkerLost, match="is unreachable"):
                await read(stream)
    await bench.all_idle()


async def test_attaching_is_retried_until_the_worker_answers(bench: Bench) -> None:
    old, *_ = bench.owners
    late = Owner("late", 20)
    asked = asyncio.Event()

    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        writer.close()

    async with bench.open("r") as stream:
        await old.has_started("r")
        async with await asyncio.start_server(hang_up, "127.0.0.1") as closing:
            host, port = closing.sockets[0].getsockname()
            late.address = f"{host}:{port}"
            bench.registered.add(late.address)
            old.publish(old.moved("r", late, 0))
            await asked.wait()
        async with late.serving():
            late.adopt("r", TOKENS, 0)
            late.emit("r", TOKENS, 0, N)
            assert await read(stream) == TOKENS


async def test_a_newer_move_of_an_unanswered_stream_counts(bench: Bench) -> None:
    old, silent, third = bench.owners
    async with bench.open("r") as stream, bench.open("other"):
        await old.has_started("other")
        old.publish(old.moved("r", silent, 0))
        await silent.is_awaited("r")
        third.adopt("r", TOKENS, 0)
        old.publish(old.moved("r", third, 0))
        third.emit("r", TOKENS, 0, N)
        assert await read(stream) == TOKENS
    silent.now_s += ATTACH_TIMEOUT_S
    await bench.all_idle()


async def test_an_answered_stream_may_be_silent(bench: Bench) -> None:
    old, new, third = bench.owners
    bench.client._attach_timeout_s = 0.5
    async with bench.open("r") as stream:
        await old.has_started("r")
        new.adopt("r", TOKENS, 0)
        old.publish(old.moved("r", new, 0))
        await new.is_read("r")
        await eventually(lambda: stream.attached)
        # Longer than the attach timeout, for example while KV is in flight.
        new.now_s += 2 * ATTACH_TIMEOUT_S
        await asyncio.sleep(1)
        # A late event of the old worker has no effect.
        old.publish(old.moved("r", third, 0))
        new.emit("r", TOKENS, 0, N)
        assert await read(stream) == TOKENS
    await bench.all_idle()


class Engines:
    """Runs a request, and moves it between workers until it ends."""

    def __init__(self, name: str, owners: list[Owner], rng: Random) -> None:
        self.name = name
        self.owners = owners
        self.rng = rng
        self.aborted = False

    async def run(self) -> None:
        """Emit all tokens, or stop at the abort, which must reach the request's owner."""
        owner, index = self.owners[0], 0
        await owner.has_started(self.name)
        aborts = 0
        while True:
            await asyncio.sleep(self.rng.choice([0, 0, 0.001, 0.005]))
            if owner.aborted.count(self.name) > aborts:
                self.aborted = True
                return
            if self.rng.random() < 0.4:
                new = self.rng.choice([other for other in self.owners if other is not owner])
                aborts = new.aborted.count(self.name)
                await self._hand_over(owner, new, index)
                owner = new
            elif index < N - 1 or self.rng.random() < 0.3:
                owner.emit(self.name, TOKENS, index, index + 1)
                index += 1
                if index == N:
                    return

    async def _hand_over(self, old: Owner, new: Owner, index: int) -> None:
        steps = [
            lambda: new.adopt(self.name, TOKENS, index),
            lambda: old.publish(old.moved(self.name, new, index)),
        ]
        self.rng.shuffle(steps)
        for step in steps:
            step()
            await asyncio.sleep(self.rng.choice([0, 0, 0.001, 0.005]))


@pytest.mark.parametrize("seed", range(6))
async def test_many_streams_move_and_disconnect_at_random(bench: Bench, seed: int) -> None:
    rng = Random(seed)

    async def run_stream(name: str, leaves_after: int | None) -> None:
        engines = Engines(name, bench.owners, Random(rng.random()))
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(engines.run())
            async with bench.open(name) as stream:
                tokens: list[int] = []
                finish = None
                while finish is None and len(tokens) != leaves_after:
                    fresh = await stream.next()
                    tokens += fresh.token_ids
                    finish = fresh.finish
                    assert tokens == TOKENS[: len(tokens)]
                assert finish is None or tokens == TOKENS
            await running
        assert engines.aborted <= (finish is None)

    async with asyncio.TaskGroup() as tasks:
        for number in range(32):
            tasks.create_task(run_stream(f"r{number}", rng.choice([None, None, None, 0, 1, 2, 3])))
    for owner in bench.owners:
        owner.now_s += ATTACH_TIMEOUT_S
    await bench.all_idle()
