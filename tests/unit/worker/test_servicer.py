"""The worker's stream protocol over a real gRPC connection, with a recording engine behind it."""

import asyncio
from collections.abc import Sequence

import grpc.aio
import pytest

from services.core.iteration.events import EmitToken, Load, RefuseRequest
from services.core.request import FinishReason, Request
from services.worker.group_view import NOWHERE, Place
from services.worker.ipc import EngineReady, Progress
from services.worker.servicer import WorkerServicer
from tideserve.worker.v1 import worker_pb2 as pb
from tideserve.worker.v1 import worker_pb2_grpc

FACTS = EngineReady(64, 100, 4, 16, 1024, 1 << 20, 1 << 18, 0)
LOAD = Load(0, 0, 16, 0, 0)


class RecordingEngine:
    """Stands where EngineClient does and remembers what it was told."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def start_request(self, request: Request) -> None:
        await self.told.put(("start", request.request_id))

    async def abort_request(self, request_id: str) -> None:
        await self.told.put(("abort", request_id))

    async def next(self) -> tuple[str, str]:
        return await asyncio.wait_for(self.told.get(), 20)


class Bench:
    """A servicer on a loopback port, and a stub that talks to it."""

    def __init__(self) -> None:
        self.engine = RecordingEngine()
        self.place = Place("g", 7, leads=True)
        self.received: list[str] = []
        self.servicer = WorkerServicer(self.engine, FACTS, lambda: self.place, self.received.append)

    async def __aenter__(self) -> "Bench":
        self.server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.servicer, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.stub = worker_pb2_grpc.WorkerServiceStub(self.channel)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.channel.close()
        await self.server.stop(0)

    def emit(self, *commands: EmitToken | RefuseRequest, received: Sequence[str] = ()) -> None:
        tokens = [c for c in commands if isinstance(c, EmitToken)]
        refusals = [c for c in commands if isinstance(c, RefuseRequest)]
        self.servicer.deliver(Progress(list(received), tokens, refusals, LOAD))


def start(request_id: str, epoch: int = 7, **changes) -> pb.GenerateRequest:
    fields = {
        "group_id": "g",
        "prompt_ids": [1],
        "sampling": pb.Sampling(top_p=1),
        "limits": pb.Limits(max_tokens=8),
        **changes,
    }
    return pb.GenerateRequest(start=pb.Start(request_id=request_id, epoch=epoch, **fields))


async def read(call) -> list[pb.RequestEvent]:
    return list((await asyncio.wait_for(call.read(), 20)).events)


async def test_tokens_of_one_step_travel_in_one_message() -> None:
    async with Bench() as bench:
        call = bench.stub.Generate()
        await call.write(start("a"))
        await call.write(start("b"))
        assert [await bench.engine.next(), await bench.engine.next()] == [
            ("start", "a"),
            ("start", "b"),
        ]
        assert bench.received == [], "the engine's load does not count them yet"
        bench.emit(received=["a", "b"])
        assert bench.received == ["a", "b"]
        bench.emit(EmitToken("a", 0, 5, None), EmitToken("b", 0, 6, FinishReason.STOP))
        first, second = await read(call)
        assert (first.request_id, first.first_index, list(first.token_ids)) == ("a", 0, [5])
        assert first.finish_reason == pb.FINISH_REASON_UNSPECIFIED
        assert second.finish_reason == pb.FINISH_REASON_STOP
        assert bench.servicer.active == 1


async def test_a_stale_epoch_never_reaches_the_engine() -> None:
    async with Bench() as bench:
        call = bench.stub.Generate()
        for epoch in (6, 8, 0):
            await call.write(start(f"r{epoch}", epoch))
            (event,) = await read(call)
            assert event.finish_reason == pb.FINISH_REASON_STALE_EPOCH
        await call.write(start("other", group_id="another group at the same epoch"))
        assert (await read(call))[0].finish_reason == pb.FINISH_REASON_STALE_EPOCH
        assert bench.received == ["r6", "r8", "r0", "other"]
        bench.place = NOWHERE
        await call.write(start("none", 0, group_id=""))
        assert (await read(call))[0].finish_reason == pb.FINISH_REASON_STALE_EPOCH
        assert bench.engine.told.empty()


async def test_invalid_and_duplicate_starts_are_refused() -> None:
    async with Bench() as bench:
        call = bench.stub.Generate()
        await call.write(start("bad", prompt_ids=[100]))
        (event,) = await read(call)
        assert event.finish_reason == pb.FINISH_REASON_INVALID and "prompt_ids" in event.message
        await call.write(start("a"))
        await bench.engine.next()
        await call.write(start("a"))
        (event,) = await read(call)
        assert event.finish_reason == pb.FINISH_REASON_INVALID and "already" in event.message
        assert bench.servicer.active == 1
        bench.emit(RefuseRequest("a", "no room"))
        (event,) = await read(call)
        assert (event.finish_reason, event.message) == (pb.FINISH_REASON_INVALID, "no room")
        await asyncio.wait_for(bench.servicer.wait_idle(), 20)
        await call.write(start("b"))
        await bench.engine.next()
        bench.emit(RefuseRequest("b", "full", retryable=True))
        assert (await read(call))[0].finish_reason == pb.FINISH_REASON_OVERLOADED


async def test_a_dead_engine_ends_every_request_with_an_error() -> None:
    async with Bench() as bench:
        call = bench.stub.Generate()
        for name in ("a", "b"):
            await call.write(start(name))
            await bench.engine.next()
        bench.servicer.fail_all("the engine stopped")
        events = [*await read(call), *await read(call)]
        assert {event.request_id for event in events} == {"a", "b"}
        assert {event.finish_reason for event in events} == {pb.FINISH_REASON_ERROR}
        await asyncio.wait_for(bench.servicer.wait_idle(), 20)


@pytest.mark.parametrize("how", ["abort", "half_close", "cancel"])
async def test_what_a_gateway_gives_up_is_aborted(how: str) -> None:
    async with Bench() as bench:
        call = bench.stub.Generate()
        await call.write(start("a"))
        assert await bench.engine.next() == ("start", "a")
        if how == "abort":
            await call.write(pb.GenerateRequest(abort=pb.Abort(request_id="unknown")))
            await call.write(pb.GenerateRequest(abort=pb.Abort(request_id="a")))
        elif how == "half_close":
            await call.done_writing()
        else:
            call.cancel()
        assert await bench.engine.next() == ("abort", "a")
        await asyncio.wait_for(bench.servicer.wait_idle(), 20)
        bench.emit(EmitToken("a", 0, 5, None))


async def test_one_gateway_cannot_abort_the_request_of_another() -> None:
    async with Bench() as bench:
        ours, theirs = bench.stub.Generate(), bench.stub.Generate()
        await ours.write(start("a"))
        await bench.engine.next()
        await theirs.write(pb.GenerateRequest(abort=pb.Abort(request_id="a")))
        await theirs.write(start("b"))
        assert await bench.engine.next() == ("start", "b")
        assert bench.servicer.active == 2
