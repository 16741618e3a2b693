"""The worker's stream protocol over a real gRPC connection, with a recording engine behind it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
import pytest

from services.core.planner.events import EmitToken, RefuseRequest
from services.core.report import EngineReport, Load
from services.core.request import FinishReason, Request
from services.worker.group_view import Place
from services.worker.handovers import ATTACH_TIMEOUT_S
from services.worker.ipc import AdoptedRequest, EngineReady, MovedRequest, Progress, RequestTimes
from services.worker.servicer import WorkerServicer
from services.worker.token_coalescer import AGE_MAX_S
from tests.support.waiting import eventually
from tideserve.common.v1 import load_pb2
from tideserve.worker.v1 import worker_pb2 as pb
from tideserve.worker.v1 import worker_pb2_grpc

FACTS = EngineReady(64, 100, 4, 16, 1024, 1 << 20, 1 << 18, 0)
REPORT = EngineReport(Load(0, 0, 16, 0))


Call = Any


class RecordingEngine:
    """Stands in for EngineClient and records its calls."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.unnoted: list[str] = []

    async def start_request(self, request: Request) -> None:
        self.unnoted.append(request.request_id)
        await self.calls.put(("start", request.request_id))

    async def abort_request(self, request_id: str) -> None:
        await self.calls.put(("abort", request_id))

    async def next(self) -> tuple[str, str]:
        return await asyncio.wait_for(self.calls.get(), 20)


class Bench:
    """A servicer on a loopback port, and a stub that talks to it."""

    def __init__(self) -> None:
        self.engine = RecordingEngine()
        self.place = Place("g", 7, leads=True)
        self.received: list[str] = []
        self.now_s = 0.0
        self.servicer = WorkerServicer(
            self.engine,
            FACTS,
            lambda: self.place,
            self.received.append,
            lambda: load_pb2.WorkerLoad(worker_id="w", running=7),
            lambda group_id, epoch: f"change of {group_id} {epoch}",
            lambda: self.now_s,
        )

    async def __aenter__(self) -> "Bench":
        self.server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.servicer, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.running = asyncio.create_task(self.servicer.run())
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.stub = worker_pb2_grpc.WorkerServiceStub(self.channel)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.channel.close()
        await self.server.stop(0)
        self.running.cancel()

    async def begin(self, call: Call, frame: pb.GenerateRequest) -> None:
        """Write a start, and wait until the engine has it."""
        await call.write(frame)
        await self.expect_calls(("start", frame.start.request_id))

    async def expect_calls(self, *expected: tuple[str, str]) -> None:
        """Check the next calls of the engine."""
        assert [await self.engine.next() for _ in expected] == [*expected]

    async def idle(self) -> None:
        await asyncio.wait_for(self.servicer.wait_idle(), 20)

    def emit(
        self,
        *commands: EmitToken | RefuseRequest | AdoptedRequest | MovedRequest,
        received: Sequence[str] | None = None,
        times: dict[str, RequestTimes] | None = None,
    ) -> None:
        """Deliver a frame in which the engine notes all starts, or those that are `received`."""
        if received is None:
            received, self.engine.unnoted = self.engine.unnoted, []
        tokens = [c for c in commands if isinstance(c, EmitToken)]
        refusals = [c for c in commands if isinstance(c, RefuseRequest)]
        adopted = [c for c in commands if isinstance(c, AdoptedRequest)]
        moved = [c for c in commands if isinstance(c, MovedRequest)]
        self.servicer.deliver(
            Progress(list(received), tokens, refusals, REPORT, adopted, moved, times=times or {})
        )


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with Bench() as bench:
        yield bench


@pytest.fixture
async def call(bench: Bench) -> Call:
    return bench.stub.Generate()


def start(request_id: str, epoch: int = 7, **changes) -> pb.GenerateRequest:
    fields = {
        "group_id": "g",
        "prompt_ids": [1],
        "sampling": pb.Sampling(top_p=1),
        "limits": pb.Limits(max_tokens=8),
        **changes,
    }
    return pb.GenerateRequest(start=pb.Start(request_id=request_id, epoch=epoch, **fields))


def attach(request_id: str, from_index: int, epoch: int = 8) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        attach=pb.Attach(request_id=request_id, group_id="g", epoch=epoch, from_index=from_index)
    )


def abort(request_id: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(abort=pb.Abort(request_id=request_id))


def adopted(request_id: str, *emitted_ids: int) -> AdoptedRequest:
    return AdoptedRequest(request_id, "g", 8, list(emitted_ids))


def moved(request_id: str, next_index: int, epoch: int = 9) -> MovedRequest:
    return MovedRequest(request_id, "w1", "w1:1", "h", epoch, next_index)


async def read(call) -> list[pb.RequestEvent]:
    return list((await asyncio.wait_for(call.read(), 20)).events)


async def test_tokens_of_a_step_are_sent_in_a_single_message(bench: Bench, call: Call) -> None:
    await call.write(start("a"))
    await call.write(start("b"))
    await bench.expect_calls(("start", "a"), ("start", "b"))
    assert bench.received == [], "the engine's load does not count them yet"
    bench.emit(received=["a", "b"])
    assert bench.received == ["a", "b"]
    bench.emit(EmitToken("a", 0, 5, None), EmitToken("b", 0, 6, FinishReason.STOP))
    first, second = await read(call)
    assert (first.request_id, first.first_index, list(first.token_ids)) == ("a", 0, [5])
    assert first.finish_reason == pb.FINISH_REASON_UNSPECIFIED
    assert second.finish_reason == pb.FINISH_REASON_STOP
    assert bench.servicer.active == 1


async def test_the_load_comes_with_the_end_of_a_request(bench: Bench, call: Call) -> None:
    for request_id in ("a", "b"):
        await bench.begin(call, start(request_id))
    for emitted, has_load in (
        (EmitToken("a", 0, 5, None), False),
        (EmitToken("a", 1, 5, FinishReason.LENGTH), True),
        (RefuseRequest("b", "no room"), True),
    ):
        bench.emit(emitted)
        frame = await asyncio.wait_for(call.read(), 20)
        assert frame.HasField("load") is has_load
        assert not has_load or frame.load.running == 7


async def test_a_stale_epoch_never_reaches_the_engine(bench: Bench, call: Call) -> None:
    for epoch in (6, 8, 0):
        await call.write(start(f"r{epoch}", epoch))
        (event,) = await read(call)
        assert event.finish_reason == pb.FINISH_REASON_STALE_EPOCH
    await call.write(start("other", group_id="another group at the same epoch"))
    assert (await read(call))[0].finish_reason == pb.FINISH_REASON_STALE_EPOCH
    assert bench.received == ["r6", "r8", "r0", "other"]
    bench.place = None
    await call.write(start("none", 0, group_id=""))
    assert (await read(call))[0].finish_reason == pb.FINISH_REASON_STALE_EPOCH
    assert bench.engine.calls.empty()


async def test_a_follower_takes_no_request(bench: Bench, call: Call) -> None:
    bench.place = Place("g", 7, leads=False)
    await call.write(start("a"))
    (event,) = await read(call)
    assert event.finish_reason == pb.FINISH_REASON_STALE_EPOCH
    assert "follows in g at epoch 7" in event.message
    assert bench.received == ["a"], "the scheduler's reservation can go"
    assert bench.engine.calls.empty()


async def test_invalid_and_duplicate_starts_are_refused(bench: Bench, call: Call) -> None:
    await call.write(start("bad", prompt_ids=[100]))
    (event,) = await read(call)
    assert event.finish_reason == pb.FINISH_REASON_INVALID and "prompt_ids" in event.message
    await bench.begin(call, start("a"))
    await call.write(start("a"))
    (event,) = await read(call)
    assert event.finish_reason == pb.FINISH_REASON_INVALID and "already" in event.message
    assert bench.servicer.active == 1
    bench.emit(RefuseRequest("a", "no room"))
    (event,) = await read(call)
    assert (event.finish_reason, event.message) == (pb.FINISH_REASON_INVALID, "no room")
    await bench.idle()
    await bench.begin(call, start("b"))
    bench.emit(RefuseRequest("b", "full", retryable=True))
    assert (await read(call))[0].finish_reason == pb.FINISH_REASON_OVERLOADED


async def test_a_dead_engine_ends_every_request_with_an_error(bench: Bench, call: Call) -> None:
    for name in ("a", "b"):
        await bench.begin(call, start(name))
    await call.write(attach("awaited", 0))
    await eventually(lambda: bench.servicer.active == 3)
    bench.servicer.fail_all("the engine stopped", engine_died=True)
    events = [event for _ in range(3) for event in await read(call)]
    assert {event.request_id: event.finish_reason for event in events} == {
        "a": pb.FINISH_REASON_ENGINE_DIED,
        "b": pb.FINISH_REASON_ENGINE_DIED,
        "awaited": pb.FINISH_REASON_ERROR,  # it has not been in that engine
    }
    await bench.idle()


async def test_requests_dropped_by_a_lost_group_are_aborted(bench: Bench, call: Call) -> None:
    await bench.begin(call, start("a"))
    bench.servicer.abort_all("a member was lost")
    (event,) = await read(call)
    assert (event.request_id, event.finish_reason) == ("a", pb.FINISH_REASON_ERROR)
    await bench.servicer.sweep()
    await bench.expect_calls(("abort", "a"))
    # A late event of its engine is no second ending.
    await bench.begin(call, start("b"))
    bench.emit(EmitToken("a", 0, 5, FinishReason.STOP), RefuseRequest("a", "too late"))
    bench.emit(EmitToken("b", 0, 7, FinishReason.STOP))
    (event,) = await read(call)
    assert event.request_id == "b"


@pytest.mark.parametrize("how", ["abort", "half_close", "cancel"])
async def test_requests_dropped_by_a_gateway_are_aborted(
    bench: Bench, call: Call, how: str
) -> None:
    await bench.begin(call, start("a"))
    if how == "abort":
        await call.write(abort("unknown"))
        await call.write(abort("a"))
    elif how == "half_close":
        await call.done_writing()
    else:
        call.cancel()
    await bench.expect_calls(("abort", "a"))
    await bench.idle()
    bench.emit(EmitToken("a", 0, 5, None))


async def test_a_gateway_cannot_abort_a_request_of_another(bench: Bench) -> None:
    own, other = bench.stub.Generate(), bench.stub.Generate()
    await bench.begin(own, start("a"))
    await other.write(abort("a"))
    await bench.begin(other, start("b"))
    assert bench.servicer.active == 2


async def test_a_moved_request_leaves_and_its_stream_stays_open(bench: Bench, call: Call) -> None:
    for name in ("a", "b"):
        await bench.begin(call, start(name))
    bench.emit(EmitToken("a", 0, 5, None), moved("a", 1))
    token, move = await read(call)
    assert list(token.token_ids) == [5] and not token.HasField("moved")
    assert move.moved == pb.Moved(
        worker_id="w1",
        address="w1:1",
        group_id="h",
        epoch=9,
        next_index=1,
        traceparent="change of h 9",
    )
    assert move.finish_reason == pb.FINISH_REASON_UNSPECIFIED
    assert bench.servicer.active == 1
    bench.emit(EmitToken("a", 1, 6, None), EmitToken("b", 0, 7, FinishReason.STOP))
    (event,) = await read(call)
    assert event.request_id == "b"
    await bench.idle()
    assert bench.engine.calls.empty()


async def test_the_last_event_has_the_times_for_late_readers(bench: Bench, call: Call) -> None:
    times = {"a": RequestTimes(1.0, 2.0, 3.0, [0.5])}
    expected_times = pb.RequestTimes(wait_s=1.0, prefill_s=2.0, decode_s=3.0, preempted_s=[0.5])
    for end in (EmitToken("a", 1, 6, FinishReason.STOP), moved("a", 1)):
        await bench.begin(call, start("a"))
        bench.emit(EmitToken("a", 0, 5, None))
        (first,) = await read(call)
        bench.emit(end, times=times)
        (last,) = await read(call)
        assert last.times == expected_times and not first.HasField("times")
    bench.emit(adopted("b", 5, 6))
    bench.emit(EmitToken("b", 2, 7, FinishReason.STOP), times={"b": times["a"]})
    await call.write(attach("b", 0))
    (replayed,) = await read(call)
    assert replayed.times == expected_times and list(replayed.token_ids) == [5, 6, 7]


@pytest.mark.parametrize("from_index", range(5))
@pytest.mark.parametrize("told_before", [0, 1, 2])
async def test_an_attached_reader_gets_every_token_once(
    bench: Bench, call: Call, from_index: int, told_before: int
) -> None:
    tokens = [EmitToken("a", 2, 7, None), EmitToken("a", 3, 8, FinishReason.LENGTH)]
    bench.emit(adopted("a", 5, 6))
    for token in tokens[:told_before]:
        bench.emit(token)
    assert bench.servicer.active == 1
    await call.write(attach("a", from_index))
    (first,) = await read(call)
    assert first.first_index == from_index
    assert list(first.token_ids) == [5, 6, 7, 8][from_index : 2 + told_before]
    last = first
    for token in tokens[told_before:]:
        bench.emit(token)
        (last,) = await read(call)
        assert (last.first_index, list(last.token_ids)) == (token.index, [token.token_id])
    assert last.finish_reason == pb.FINISH_REASON_LENGTH
    await bench.idle()


async def test_attach_before_the_request_arrives(bench: Bench, call: Call) -> None:
    await call.write(attach("a", 1))
    await bench.begin(call, start("b"))
    assert bench.servicer.active == 2
    bench.emit(adopted("a", 5), EmitToken("a", 1, 6, None), EmitToken("b", 0, 9, None))
    events = await read(call)
    assert [(e.request_id, e.first_index, list(e.token_ids)) for e in events] == [
        ("a", 1, []),
        ("a", 1, [6]),
        ("b", 0, [9]),
    ]


async def test_a_stream_that_waits_too_long_for_its_request_fails(bench: Bench, call: Call) -> None:
    bench.emit(adopted("kept"), adopted("ended"), adopted("refused"))
    bench.emit(EmitToken("ended", 0, 5, FinishReason.STOP))
    bench.emit(RefuseRequest("refused", "no room"), moved("gone", 0))
    bench.now_s = ATTACH_TIMEOUT_S - 1
    await call.write(attach("awaited", 0))
    await call.write(attach("refused", 0))
    _, refused = await read(call)
    assert (refused.finish_reason, refused.message) == (pb.FINISH_REASON_INVALID, "no room")
    await bench.servicer.sweep()
    assert bench.servicer.active == 3
    bench.now_s += 1
    await bench.servicer.sweep()
    await bench.expect_calls(("abort", "kept"))
    assert bench.servicer.active == 1
    await call.write(attach("kept", 0))
    (event,) = await read(call)
    assert event.finish_reason == pb.FINISH_REASON_STALE_EPOCH and "was aborted" in event.message
    bench.now_s = 2 * ATTACH_TIMEOUT_S
    await bench.servicer.sweep()
    (event,) = await read(call)
    assert (event.request_id, event.finish_reason) == ("awaited", pb.FINISH_REASON_STALE_EPOCH)
    assert "with g at epoch 8; the worker leads g at epoch 7" in event.message
    await bench.idle()
    assert bench.engine.calls.empty()


@pytest.mark.parametrize("when", ["adopted", "attached"])
async def test_an_adopted_request_can_be_aborted(bench: Bench, call: Call, when: str) -> None:
    bench.emit(adopted("a"))
    if when == "attached":
        await call.write(attach("a", 0))
    await call.write(abort("a"))
    await bench.expect_calls(("abort", "a"))
    assert bench.servicer.active == 0


@pytest.mark.parametrize("how", ["abort", "cancel"])
@pytest.mark.parametrize("awaited", [False, True])
async def test_an_abort_may_precede_its_request(
    bench: Bench, call: Call, how: str, awaited: bool
) -> None:
    if awaited:
        await call.write(attach("a", 0))
        await eventually(lambda: bench.servicer.active)
    if how == "abort":
        await call.write(abort("a"))
        await bench.begin(call, start("sync"))
    else:
        call.cancel()
        await eventually(lambda: not bench.servicer.active)
    bench.emit(adopted("a"))
    await bench.servicer.sweep()
    # The end of a stream that did not know the request does not end it.
    if awaited or how == "abort":
        await bench.expect_calls(("abort", "a"))
    else:
        assert bench.servicer.active == 1


async def test_a_start_on_another_stream_replaces_a_request_of_a_broken_stream(
    bench: Bench,
) -> None:
    """The gateway has lost its stream, and this worker has not noticed it yet."""
    old, new = bench.stub.Generate(), bench.stub.Generate()
    await bench.begin(old, start("a"))
    bench.emit(EmitToken("a", 0, 5, None), received=["a"])
    await read(old)
    await new.write(start("a", output_ids=[5]))
    await bench.expect_calls(("abort", "a"), ("start", "a"))
    assert bench.servicer.active == 1
    # Events from before the engine got the second start belong to the first.
    bench.emit(EmitToken("a", 1, 6, None), received=())
    bench.emit(EmitToken("a", 2, 7, FinishReason.STOP), received=())
    bench.emit(moved("a", 3), received=())
    bench.emit(RefuseRequest("a", "full"), received=())
    bench.emit(EmitToken("a", 1, 8, None), received=["a"])
    (event,) = await read(new)
    assert (event.first_index, list(event.token_ids)) == (1, [8])
    # The end of the old stream does not concern it.
    old.cancel()
    await bench.begin(new, start("sync"))
    bench.emit(EmitToken("a", 2, 9, FinishReason.STOP), received=["sync"])
    (event,) = await read(new)
    assert (event.first_index, event.finish_reason) == (2, pb.FINISH_REASON_STOP)


@pytest.mark.parametrize("how", ["the stream broke", "its gateway aborted it", "it was given up"])
async def test_events_of_an_aborted_start_do_not_reach_the_next(bench: Bench, how: str) -> None:
    """The engine handles the abort after its iteration, and emits events of the first start."""
    old, new = bench.stub.Generate(), bench.stub.Generate()
    await bench.begin(old, start("a"))
    bench.emit(EmitToken("a", 0, 5, None), received=["a"])
    await read(old)
    if how == "the stream broke":
        old.cancel()
    elif how == "its gateway aborted it":
        await old.write(abort("a"))
    else:
        bench.servicer.abort_all("the group goes on without it")
    await bench.expect_calls(("abort", "a"))
    await bench.begin(new, start("a", output_ids=[5]))
    # The token with index 1 went to the broken stream.
    bench.emit(EmitToken("a", 2, 7, None), received=())
    bench.emit(EmitToken("a", 3, 7, FinishReason.STOP), received=())
    bench.emit(EmitToken("a", 1, 8, None), received=["a"])
    (event,) = await read(new)
    assert (event.first_index, list(event.token_ids)) == (1, [8])
    bench.emit(EmitToken("a", 2, 9, FinishReason.STOP))
    (event,) = await read(new)
    assert (event.first_index, event.finish_reason) == (2, pb.FINISH_REASON_STOP)


@pytest.mark.parametrize("aborted", [True, False])
async def test_two_losses_before_the_engine_has_noted_the_first_start(
    bench: Bench, aborted: bool
) -> None:
    """The engine notes each start: events before the last note belong to earlier starts."""
    old, new = bench.stub.Generate(), bench.stub.Generate()
    await bench.begin(old, start("a"))
    if aborted:
        await old.write(abort("a"))
        await bench.expect_calls(("abort", "a"))
        await new.write(start("a"))
    else:
        await new.write(start("a"))
        await bench.expect_calls(("abort", "a"))
    await bench.expect_calls(("start", "a"))
    bench.emit(EmitToken("a", 0, 6, FinishReason.STOP), received=["a"])
    assert bench.servicer.active == 1, "that was the first one"
    bench.emit(EmitToken("a", 0, 7, None), received=["a"])
    (event,) = await read(new)
    assert (list(event.token_ids), event.finish_reason) == ([7], 0)


async def test_events_of_a_late_adoption_do_not_reach_the_next_start(
    bench: Bench, call: Call
) -> None:
    """Its gateway timed out and asked again; the engine adopted it before the start."""
    await bench.begin(call, start("a"))
    bench.emit(adopted("a", 5, 6), EmitToken("a", 2, 7, None), received=())
    bench.emit(EmitToken("a", 0, 4, None), received=["a"])
    (event,) = await read(call)
    assert (event.first_index, list(event.token_ids)) == (0, [4])


async def test_a_second_start_on_the_same_stream_is_refused(bench: Bench, call: Call) -> None:
    await call.write(start("a"))
    await call.write(start("a"))
    (event,) = await read(call)
    assert event.finish_reason == pb.FINISH_REASON_INVALID


class StuckCall:
    """Context of a call whose writes end only at a second cancellation."""

    def __init__(self) -> None:
        self.writing = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def send_initial_metadata(self, metadata: object) -> None:
        pass

    async def write(self, message: pb.GenerateResponse) -> None:
        self.writing.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            await asyncio.Event().wait()


async def test_a_call_cancelled_at_its_end_leaks_nothing(bench: Bench) -> None:
    cut = asyncio.Event()

    async def frames() -> AsyncIterator[pb.GenerateRequest]:
        yield start("a")
        yield attach("b", 0)
        await cut.wait()

    context = StuckCall()
    calling = asyncio.create_task(bench.servicer.Generate(frames(), context))
    await bench.expect_calls(("start", "a"))
    bench.emit(EmitToken("a", 0, 5, None))
    await asyncio.wait_for(context.writing.wait(), 20)
    cut.set()
    await asyncio.wait_for(context.cancelled.wait(), 20)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert bench.servicer.active == 0
    await bench.expect_calls(("abort", "a"))
    bench.emit(adopted("b"))
    await bench.expect_calls(("abort", "b"))


async def test_an_abort_follows_a_request_that_has_left(bench: Bench, call: Call) -> None:
    bench.emit(adopted("a"), adopted("b"))
    bench.emit(moved("a", 0))
    await call.write(abort("a"))
    (event,) = await read(call)
    assert (event.request_id, event.moved.address) == ("a", "w1:1")
    await call.write(abort("b"))
    await bench.expect_calls(("abort", "b"))
    bench.emit(moved("b", 0))
    (event,) = await read(call)
    assert (event.request_id, event.moved.address) == ("b", "w1:1")
    await bench.idle()


async def test_state_of_an_earlier_stay_does_not_redirect_a_reader(
    bench: Bench, call: Call
) -> None:
    bench.emit(adopted("a"), moved("a", 0, epoch=9))
    # It was sent here by epoch 10; what it will read has not come yet.
    await call.write(attach("a", 0, epoch=10))
    await bench.begin(call, start("sync"))
    assert bench.servicer.active == 2
    bench.emit(adopted("a", 5))
    (event,) = await read(call)
    assert list(event.token_ids) == [5] and not event.HasField("moved")


async def test_invalid_attaches_are_refused(bench: Bench, call: Call) -> None:
    await call.write(attach("a", -1))
    assert (await read(call))[0].finish_reason == pb.FINISH_REASON_INVALID
    bench.emit(adopted("b"))
    await call.write(attach("b", 0))
    await read(call)
    await call.write(attach("b", 0))
    assert (await read(call))[0].finish_reason == pb.FINISH_REASON_INVALID
    bench.emit(EmitToken("b", 0, 5, None))
    assert list((await read(call))[0].token_ids) == [5]


async def test_a_reader_on_another_stream_must_reattach(bench: Bench) -> None:
    """The response was lost with a stream whose end this worker has not noticed yet."""
    broken, new = bench.stub.Generate(), bench.stub.Generate()
    bench.emit(adopted("a", 5, 6))
    await broken.write(attach("a", 1))
    await read(broken)
    await new.write(attach("a", 1))
    (event,) = await read(new)
    assert event.finish_reason == pb.FINISH_REASON_STALE_EPOCH
    await new.write(start("a", output_ids=[5]))
    await bench.expect_calls(("abort", "a"), ("start", "a"))
    bench.emit(EmitToken("a", 1, 6, None))
    assert list((await read(new))[0].token_ids) == [6]


async def test_a_start_replaces_unread_output(bench: Bench, call: Call) -> None:
    bench.emit(adopted("a", 5))
    await call.write(start("a"))
    await bench.expect_calls(("abort", "a"), ("start", "a"))
    bench.emit(EmitToken("a", 0, 5, FinishReason.LENGTH), received=["a"])
    assert list((await read(call))[0].token_ids) == [5]
    await bench.idle()


async def test_a_dead_engine_ends_requests_between_owners(bench: Bench, call: Call) -> None:
    bench.emit(adopted("a"))
    await call.write(attach("b", 0))
    await bench.begin(call, start("sync"))
    bench.servicer.fail_all("the engine stopped")
    events = [*await read(call), *await read(call)]
    assert {event.request_id for event in events} == {"sync", "b"}
    assert {event.finish_reason for event in events} == {pb.FINISH_REASON_ERROR}
    await bench.idle()


def coalesced(request_id: str) -> pb.GenerateRequest:
    limits = pb.Limits(max_tokens=60)
    return start(request_id, delivery=pb.DELIVERY_COALESCED, limits=limits)


@pytest.mark.parametrize("ending", ["finish", "move", "refusal", "death", "age"])
async def test_gathered_tokens_are_sent_before_the_next_event(
    bench: Bench, call: Call, ending: str
) -> None:
    await bench.begin(call, coalesced("a"))
    bench.emit(EmitToken("a", 0, 5, None))
    bench.emit(EmitToken("a", 1, 6, None))
    match ending:
        case "finish":
            bench.emit(EmitToken("a", 2, 7, FinishReason.STOP))
        case "move":
            bench.emit(moved("a", 2))
        case "refusal":
            bench.emit(RefuseRequest("a", "no"))
        case "death":
            bench.servicer.fail_all("it died", engine_died=True)
        case "age":
            bench.now_s += AGE_MAX_S
            await bench.servicer.sweep()
    first, *rest = await read(call)
    tokens = [5, 6, 7] if ending == "finish" else [5, 6]
    assert (first.first_index, list(first.token_ids)) == (0, tokens)
    assert len(rest) == (ending in ("move", "refusal", "death"))
    assert bench.servicer.active == (ending == "age")


async def test_a_moved_request_is_gathered_at_its_new_worker(bench: Bench, call: Call) -> None:
    frame = attach("a", 1)
    frame.attach.delivery = pb.DELIVERY_COALESCED
    await call.write(frame)
    bench.emit(adopted("a", 5, 6))
    (first,) = await read(call)
    assert (first.first_index, list(first.token_ids)) == (1, [6])
    for index in range(2, 5):
        bench.emit(EmitToken("a", index, index, None))
    bench.emit(EmitToken("a", 5, 9, FinishReason.LENGTH))
    (last,) = await read(call)
    assert (last.first_index, list(last.token_ids)) == (2, [2, 3, 4, 9])
    assert last.finish_reason == pb.FINISH_REASON_LENGTH


async def test_tokens_gathered_for_an_earlier_start_are_dropped(bench: Bench, call: Call) -> None:
    await bench.begin(call, coalesced("a"))
    bench.emit(EmitToken("a", 0, 5, None))
    other = bench.stub.Generate()
    await other.write(start("a"))
    await bench.expect_calls(("abort", "a"), ("start", "a"))
    bench.emit(EmitToken("a", 0, 6, None))
    (first,) = await read(other)
    assert list(first.token_ids) == [6]
