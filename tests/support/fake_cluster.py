"""Fakes of a gateway's backends: scheduler, workers and memory manager over real gRPC."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from services.common.etcd import Store
from services.common.frames import TAKES_MANY, packed, unpacked
from services.common.grpc_server import ProcessServicer, Server
from services.common.membership import SERVICES
from services.common.transport import Transport
from tests.support.control_plane import registered, worker_in_group, worker_record
from tideserve.common.v1 import record_pb2
from tideserve.memmgr.v1 import memmgr_pb2, memmgr_pb2_grpc
from tideserve.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from tideserve.worker.v1 import worker_pb2, worker_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

METADATA = TAKES_MANY
"""Capabilities that the fakes announce at the start of a stream; () for the last release."""


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Assigns requests to the workers round robin, unless configured otherwise."""

    def __init__(self, workers: "Sequence[FakeWorker]") -> None:
        self.workers = workers
        self.asks: list[scheduler_pb2.Ask] = []
        self.withdrawn: list[str] = []
        # Workers whose loads were forwarded, each with the number of asks before it.
        self.loads: list[tuple[str, int]] = []
        # `frozen`: reads frames and sends nothing; `holding`: sends tickets only.
        self.frozen = False
        self.holding = False
        self.refusal: scheduler_pb2.Refusal | None = None
        self.queued = 0
        self.streams = 0
        # Parts of the heartbeat, and reported outcomes. `deaf`: estimated asks get no answer.
        self.class_waits: list[scheduler_pb2.ClassWait] = []
        self.wants_outcomes = False
        self.outcomes: list[scheduler_pb2.Outcome] = []
        self.placed: list[scheduler_pb2.Placed] = []
        self.deaf = False

    async def Admit(
        self, frames: AsyncIterator[scheduler_pb2.AdmitRequest], context: Context
    ) -> AsyncIterator[scheduler_pb2.AdmitResponse]:
        """See scheduler.proto."""
        await context.send_initial_metadata(METADATA)
        self.streams += 1
        answers: asyncio.Queue[scheduler_pb2.AdmitResponse] = asyncio.Queue()
        reading = asyncio.create_task(self._read(frames, answers))
        beating = asyncio.create_task(self._beat(answers))
        try:
            while True:
                ready = [await answers.get()]
                while not answers.empty():
                    ready.append(answers.get_nowait())
                messages = packed(ready) if METADATA else ready
                for message in () if self.frozen else messages:
                    yield message
        finally:
            reading.cancel()
            beating.cancel()

    async def _beat(self, answers: asyncio.Queue[scheduler_pb2.AdmitResponse]) -> None:
        while True:
            beat = scheduler_pb2.Heartbeat(
                groups_serving=len(self.workers),
                queued=self.queued,
                class_waits=self.class_waits,
                wants_outcomes=self.wants_outcomes,
                models=[
                    scheduler_pb2.ModelState(model=model, groups_serving=count)
                    for model, count in Counter(w.model for w in self.workers).items()
                ],
            )
            answers.put_nowait(scheduler_pb2.AdmitResponse(heartbeat=beat))
            await asyncio.sleep(0.2)

    async def _read(
        self,
        frames: AsyncIterator[scheduler_pb2.AdmitRequest],
        answers: asyncio.Queue[scheduler_pb2.AdmitResponse],
    ) -> None:
        async for message in frames:
            for frame in unpacked(message):
                self._take(frame, answers)

    def _take(
        self,
        frame: scheduler_pb2.AdmitRequest,
        answers: asyncio.Queue[scheduler_pb2.AdmitResponse],
    ) -> None:
        if frame.HasField("withdraw"):
            self.withdrawn.append(frame.withdraw.request_id)
        elif frame.HasField("load"):
            self.loads.append((frame.load.worker_id, len(self.asks)))
        elif frame.HasField("outcome"):
            self.outcomes.append(frame.outcome)
        elif frame.HasField("placed"):
            self.placed.append(frame.placed)
        else:
            self.asks.append(frame.ask)
            for answer in self._answers(frame.ask):
                answers.put_nowait(answer)

    def _answers(self, ask: scheduler_pb2.Ask) -> list[scheduler_pb2.AdmitResponse]:
        if self.refusal is not None:
            refusal = scheduler_pb2.Refusal()
            refusal.CopyFrom(self.refusal)
            refusal.request_id, refusal.estimated = ask.request_id, ask.estimated
            return [scheduler_pb2.AdmitResponse(refusal=refusal)]
        if ask.estimated:
            proceed = scheduler_pb2.Proceed(request_id=ask.request_id)
            return [] if self.deaf else [scheduler_pb2.AdmitResponse(proceed=proceed)]
        ticket = scheduler_pb2.Ticket(request_id=ask.request_id)
        if self.holding:
            return [scheduler_pb2.AdmitResponse(ticket=ticket)]
        serving = [w for w in self.workers if w.model == ask.model] or self.workers
        worker = serving[len(self.asks) % len(serving)]
        assignment = scheduler_pb2.Assignment(
            request_id=ask.request_id,
            group_id=f"group-{worker.worker_id}",
            epoch=worker.epoch,
            worker_id=worker.worker_id,
            address=worker.address,
            returnable=worker.return_times > 0,
            hand_to=None if worker.hand_to is None else worker.hand_to.place,
        )
        return [
            scheduler_pb2.AdmitResponse(ticket=ticket),
            scheduler_pb2.AdmitResponse(assignment=assignment),
        ]


@dataclass(eq=False)
class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Answers every prompt with the tokens that `script` returns for its ids."""

    worker_id: str
    script: Callable[[Sequence[int]], Sequence[int]]
    model: str = "m"
    step_s: float = 0.002
    tokens_per_event: int = 1
    epoch: int = 1
    starts: list[worker_pb2.Start] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    active: set[str] = field(default_factory=set)
    # The token at which all streams pause until the test resumes them.
    pause_at: int | None = None
    go: asyncio.Event = field(default_factory=asyncio.Event)
    finish: "worker_pb2.FinishReason" = worker_pb2.FINISH_REASON_LENGTH
    # The message of requests that fail.
    broken: str = "it broke"
    stale_times: int = 0
    # Number of resumable requests to return.
    return_times: int = 0
    # Tokens beyond the requested number.
    generate_more: int = 0
    # Number of tokens after which requests of this worker fail, and the reason.
    fails_after: int | None = None
    failure: "worker_pb2.FinishReason" = worker_pb2.FINISH_REASON_ERROR
    kv_lost: bool = False
    leaving: bool = False
    # Upstream server losses reported with each failed request.
    server_losses: int = 0
    # Where requests that fail as RETURNED continue.
    go_to: "FakeWorker | None" = None
    hand_to: "FakeWorker | None" = None  # the scheduler's target for handing requests over
    # The index after the last token that was emitted.
    emitted: int = 0
    # Where its requests move, and before which token.
    moves_to: "FakeWorker | None" = None
    move_at: int = 0
    # Traceparent of the change that moves them, and the times in the last event.
    moved_by: str = ""
    times: worker_pb2.RequestTimes | None = None
    # Requests of other workers that continue here, and the attaches of their gateways.
    adopted: dict[str, worker_pb2.Start] = field(default_factory=dict)
    attaches: list[worker_pb2.Attach] = field(default_factory=list)
    address: str = ""
    # Additional fields of its registration.
    record: dict[str, Any] = field(default_factory=dict)
    calls: set["asyncio.Task[None]"] = field(default_factory=set)

    async def Generate(
        self, frames: AsyncIterator[worker_pb2.GenerateRequest], context: Context
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        """See worker.proto."""
        await context.send_initial_metadata(METADATA)
        outbox: asyncio.Queue[worker_pb2.RequestEvent | None] = asyncio.Queue()
        running: dict[str, asyncio.Task[None]] = {}
        reading = asyncio.create_task(self._read(frames, outbox, running))
        self.calls.add(reading)
        try:
            while (event := await outbox.get()) is not None:
                events = {event.request_id: event}
                # As a worker does: all events of a step in one message.
                while not outbox.empty() and (event := outbox.get_nowait()) is not None:
                    if event.request_id in events:
                        yield self._frame(events.values())
                        events = {}
                    events[event.request_id] = event
                yield self._frame(events.values())
                if event is None:
                    return
        finally:
            self.calls.discard(reading)
            for task in [reading, *running.values()]:
                task.cancel()
            self.active -= running.keys()

    def _frame(self, events: Iterable[worker_pb2.RequestEvent]) -> worker_pb2.GenerateResponse:
        frame = worker_pb2.GenerateResponse(events=events)
        if any(event.finish_reason for event in frame.events):
            frame.load.worker_id = self.worker_id
        return frame

    def hang_up(self) -> None:
        """Close every stream, as a dying worker does."""
        for reading in list(self.calls):
            reading.cancel()

    def die(self) -> None:
        """Close every stream, and fail later calls."""
        self.pause_at, self.fails_after = None, 0
        self.hang_up()

    async def _read(
        self,
        frames: AsyncIterator[worker_pb2.GenerateRequest],
        outbox: asyncio.Queue[worker_pb2.RequestEvent | None],
        running: dict[str, "asyncio.Task[None]"],
    ) -> None:
        try:
            async for message in frames:
                for frame in unpacked(message):
                    self._take(frame, outbox, running)
        finally:
            outbox.put_nowait(None)

    def _take(
        self,
        frame: worker_pb2.GenerateRequest,
        outbox: asyncio.Queue[worker_pb2.RequestEvent | None],
        running: dict[str, "asyncio.Task[None]"],
    ) -> None:
        if frame.HasField("abort"):
            self.aborted.append(frame.abort.request_id)
            self.active.discard(frame.abort.request_id)
            if task := running.pop(frame.abort.request_id, None):
                task.cancel()
            return
        if frame.HasField("attach"):
            self.attaches.append(frame.attach)
            start, first = self.adopted[frame.attach.request_id], frame.attach.from_index
            self._emit(outbox, start, first, [], worker_pb2.FINISH_REASON_UNSPECIFIED)
        else:
            self.starts.append(frame.start)
            start, first = frame.start, len(frame.start.output_ids)
        self.active.add(start.request_id)
        running[start.request_id] = asyncio.create_task(self._generate(start, outbox, first))

    async def _generate(
        self,
        start: worker_pb2.Start,
        outbox: asyncio.Queue[worker_pb2.RequestEvent | None],
        from_index: int,
    ) -> None:
        if self.stale_times > 0:
            self.stale_times -= 1
            self._emit(outbox, start, 0, [], worker_pb2.FINISH_REASON_STALE_EPOCH)
            return
        if self.return_times > 0 and start.returnable:
            self.return_times -= 1
            self._emit(outbox, start, 0, [], worker_pb2.FINISH_REASON_RETURNED)
            return
        tokens = self.script(start.prompt_ids)
        tokens = tokens[: start.limits.max_tokens + self.generate_more]
        if from_index >= len(tokens):
            self._emit(outbox, start, from_index, [], self.finish)
            return
        for first in range(from_index, len(tokens), self.tokens_per_event):
            if self.moves_to is not None and first >= self.move_at:
                self._move(outbox, start, first, self.moves_to)
                return
            if self.pause_at is not None and first >= self.pause_at:
                await self.go.wait()
            if self.fails_after is not None and first - from_index >= self.fails_after:
                losses = start.server_losses + self.server_losses
                self._emit(outbox, start, first, [], self.failure, losses)
                return
            part = tokens[first : first + self.tokens_per_event]
            end = first + len(part) == len(tokens)
            reason = worker_pb2.FINISH_REASON_UNSPECIFIED
            if end:
                stopped = part[-1] in start.limits.stop_token_ids
                reason = worker_pb2.FINISH_REASON_STOP if stopped else self.finish
            self._emit(outbox, start, first, part, reason)
            await asyncio.sleep(self.step_s)

    def _move(
        self,
        outbox: asyncio.Queue[worker_pb2.RequestEvent | None],
        start: worker_pb2.Start,
        next_index: int,
        target: "FakeWorker",
    ) -> None:
        self.active.discard(start.request_id)
        target.adopted[start.request_id] = start
        moved = worker_pb2.Moved(
            worker_id=target.worker_id,
            address=target.address,
            group_id=f"group-{target.worker_id}",
            epoch=target.epoch,
            next_index=next_index,
            traceparent=self.moved_by,
        )
        event = worker_pb2.RequestEvent(request_id=start.request_id, moved=moved)
        outbox.put_nowait(event)

    def _emit(
        self,
        outbox: asyncio.Queue[worker_pb2.RequestEvent | None],
        start: worker_pb2.Start,
        first_index: int,
        token_ids: Sequence[int],
        reason: "worker_pb2.FinishReason",
        server_losses: int = 0,
    ) -> None:
        if reason != worker_pb2.FINISH_REASON_UNSPECIFIED:
            self.active.discard(start.request_id)
        message = self.broken if reason == worker_pb2.FINISH_REASON_ERROR else ""
        returned = reason == worker_pb2.FINISH_REASON_RETURNED
        event = worker_pb2.RequestEvent(
            request_id=start.request_id,
            first_index=first_index,
            token_ids=token_ids,
            finish_reason=reason,
            message=message,
            server_losses=server_losses,
            kv_lost=self.kv_lost and returned,
            leaving=self.leaving and returned,
            go_to=self.go_to.place if self.go_to is not None and returned else None,
            **self._told(start, first_index, token_ids),
            times=None if reason == worker_pb2.FINISH_REASON_UNSPECIFIED else self.times,
        )
        outbox.put_nowait(event)
        self.emitted = max(self.emitted, first_index + len(token_ids))

    @property
    def place(self) -> worker_pb2.GoTo:
        """This worker as the target of a moved request."""
        return worker_pb2.GoTo(
            worker_id=self.worker_id,
            address=self.address,
            group_id=f"group-{self.worker_id}",
            epoch=self.epoch,
        )

    def _told(
        self, start: worker_pb2.Start, first_index: int, token_ids: Sequence[int]
    ) -> dict[str, Any]:
        """Log probabilities, if requested."""
        fields: dict[str, Any] = {}
        if start.logprobs.HasField("output_top"):
            top = start.logprobs.output_top
            fields["logprobs"] = [fake_logprobs(token_id, top) for token_id in token_ids]
        if start.logprobs.HasField("prompt_top") and first_index == 0:
            top = start.logprobs.prompt_top
            ids = start.prompt_ids[1:]
            fields["prompt_logprobs"] = [fake_logprobs(token_id, top) for token_id in ids]
        return fields


def fake_logprobs(token_id: int, top: int) -> worker_pb2.TokenLogprobs:
    """Log probabilities that fall with the token id; the most likely ids are always 3, 4, …"""
    return worker_pb2.TokenLogprobs(
        logprob=-token_id / 64,
        rank=token_id - 2,
        top_ids=range(3, 3 + top),
        top_logprobs=[-other / 64 for other in range(3, 3 + top)],
    )


class FakeMemmgr(memmgr_pb2_grpc.MemmgrServiceServicer):
    """Reports half of each worker's blocks as free."""

    def __init__(self, workers: Sequence[FakeWorker]) -> None:
        self._workers = workers

    async def GetCluster(
        self, request: memmgr_pb2.GetClusterRequest, context: Context
    ) -> memmgr_pb2.GetClusterResponse:
        """See memmgr.proto."""
        response = memmgr_pb2.GetClusterResponse()
        for worker in self._workers:
            response.workers.add(
                worker_id=worker.worker_id,
                kv_blocks_total=100,
                kv_blocks_free=50,
                running=len(worker.active),
                parameter_bytes=1000,
                pipeline_busy_s=7.5,
                pipeline_bubble_s=2.5,
                pids=[1, 2],
            )
            group_id = f"group-{worker.worker_id}"
            group = response.groups.add(group_id=group_id, epoch=worker.epoch, model=worker.model)
            group.phase = record_pb2.GROUP_PHASE_STABLE
            group.members.add(worker_id=worker.worker_id)
        return response


@asynccontextmanager
async def running_worker(
    store: Store, worker: FakeWorker, transport: Transport | None = None, **record: Any
) -> AsyncIterator[FakeWorker]:
    """Serve and register a worker, with its group."""
    process = ProcessServicer(worker.worker_id, lambda: [1, 2], lambda: True)
    server = Server("127.0.0.1", 0, process, transport=transport)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server.services)
    await server.start()
    worker.address = server.address
    own = {"address": server.address, "model": worker.model}
    fields = worker_record(worker.worker_id, **own | record | worker.record)
    try:
        async with worker_in_group(store, fields, worker.epoch):
            yield worker
    finally:
        await server.stop(0)


@asynccontextmanager
async def running_service(
    store: Store, name: str, incarnation: str, add: Callable[[grpc.aio.Server], None]
) -> AsyncIterator[Server]:
    """Serve and register a scheduler or memory manager."""
    server = Server("127.0.0.1", 0, ProcessServicer(name, lambda: [7], lambda: True))
    add(server.services)
    await server.start()
    record = record_pb2.ServiceRecord(
        name=name,
        incarnation=incarnation,
        address=server.address,
        pid=7,
        scheduling="slo" if name == "scheduler" else "",
    )
    try:
        async with registered(store, f"{SERVICES}{name}/{incarnation}", record):
            yield server
    finally:
        await server.stop(0)


@dataclass
class FakeCluster:
    """The fakes, with methods to start and stop scheduler and memory manager."""

    store: Store
    scheduler: FakeScheduler
    workers: list[FakeWorker]
    _scheduler_stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _memmgr_stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _starts: int = 0

    async def start_scheduler(self) -> None:
        """Start and register a scheduler; the object stays the same."""
        self._starts += 1
        await self._scheduler_stack.enter_async_context(
            running_service(
                self.store,
                "scheduler",
                f"s{self._starts}",
                lambda server: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(
                    self.scheduler, server
                ),
            )
        )

    async def start_memmgr(self) -> None:
        """Start and register a memory manager."""
        memmgr = FakeMemmgr(self.workers)
        await self._memmgr_stack.enter_async_context(
            running_service(
                self.store,
                "memmgr",
                "m1",
                lambda server: memmgr_pb2_grpc.add_MemmgrServiceServicer_to_server(memmgr, server),
            )
        )

    async def stop_memmgr(self) -> None:
        """Stop and deregister the memory manager."""
        await self._memmgr_stack.aclose()

    async def stop_scheduler(self) -> None:
        """Stop and deregister the scheduler."""
        await self._scheduler_stack.aclose()


@asynccontextmanager
async def fake_cluster(
    store: Store,
    script: Callable[[Sequence[int]], Sequence[int]],
    workers: int = 1,
    others: Sequence[FakeWorker] = (),
    **record: Any,
) -> AsyncIterator[FakeCluster]:
    """Run scheduler, memory manager and workers; `others` are workers of other models."""
    async with AsyncExitStack() as stack:
        fakes = [*(FakeWorker(f"w{number}", script) for number in range(workers)), *others]
        for fake in fakes:
            await stack.enter_async_context(running_worker(store, fake, **record))
        cluster = FakeCluster(store, FakeScheduler(fakes), fakes)
        stack.push_async_callback(cluster.stop_memmgr)
        await cluster.start_memmgr()
        stack.push_async_callback(cluster.stop_scheduler)
        await cluster.start_scheduler()
        yield cluster
