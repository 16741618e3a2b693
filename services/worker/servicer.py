"""WorkerService: one stream per gateway; the tokens of one engine step travel in one message.

A request that another worker hands over is kept in `Handovers` until its gateway attaches to it.
"""

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import grpc.aio

from services.common import failpoint
from services.common.clock import monotonic_s
from services.common.frames import TAKES_MANY, unpacked
from services.common.timeouts import timeout
from services.core.planner.events import EmitToken, RefuseRequest
from services.worker.engine_client import EngineClient
from services.worker.gateway_stream import Context, GatewayStream
from services.worker.group_view import Place
from services.worker.handovers import Handovers, UnreadOutput, WaitingReader
from services.worker.ipc import AdoptedRequest, EngineReady, MovedRequest, Progress, RequestTimes
from services.worker.start_frame import InvalidStart, to_request
from services.worker.token_coalescer import TokenCoalescer
from services.worker.translate import failure, to_event, to_moved, to_refusal, to_replay
from tideserve.common.v1 import load_pb2
from tideserve.worker.v1 import worker_pb2 as pb
from tideserve.worker.v1 import worker_pb2_grpc

# How often requests that nobody attaches to are looked for.
SWEEP_S = 0.25

EngineEvent = TypeVar("EngineEvent", EmitToken, RefuseRequest, MovedRequest)

log = logging.getLogger(__name__)


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Hands requests to the engine and its tokens to the gateways."""

    def __init__(
        self,
        engine: EngineClient,
        facts: EngineReady,
        place: Callable[[], Place | None],
        on_received: Callable[[str], None],
        load: Callable[[], load_pb2.WorkerLoad],
        traceparent_of: Callable[[str, int], str],
        clock: Callable[[], float] = monotonic_s,
    ) -> None:
        """`place` is the committed configuration that this worker serves, None if there is none.

        `on_received` learns of each start once the engine's load counts it, or it was refused.
        `load` is this worker's load now. `traceparent_of` the change that made a group's
        configuration of an epoch, "" if that is not traced.
        """
        self._engine = engine
        self._facts = facts
        self._place = place
        self._on_received = on_received
        self._load = load
        self._traceparent_of = traceparent_of
        self._clock = clock
        # Open streams, and which of them reads which request.
        self._open: set[GatewayStream] = set()
        self._streams: dict[str, GatewayStream] = {}
        self._handovers: Handovers[GatewayStream] = Handovers()
        self._coalescer = TokenCoalescer()
        # Starts that the engine has not noted yet, by id: what it tells of the id is of earlier
        # ones, whose aborts it may not have read either. It notes each once, also if it is aborted.
        self._pending_starts: Counter[str] = Counter()
        # Requests of the engine without a reader for ever; `run` has them aborted.
        self._to_abort: set[str] = set()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def active(self) -> int:
        """Requests that have not ended, or whose end was not fetched."""
        return len(self._streams) + len(self._handovers)

    async def run(self) -> None:
        """Drop requests without gateways and gateways without requests, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with timeout(SWEEP_S):
                    await self._wake.wait()
            self._wake.clear()
            await self.sweep()

    async def wait_idle(self) -> None:
        """Return once no request is active."""
        await self._idle.wait()

    async def Generate(  # type: ignore[override]  # the stub knows generators only
        self, request_iterator: AsyncIterator[pb.GenerateRequest], context: Context
    ) -> None:
        await context.send_initial_metadata(TAKES_MANY)
        stream = GatewayStream()
        self._open.add(stream)
        tasks = [
            asyncio.create_task(self._read(request_iterator, stream)),
            asyncio.create_task(stream.write_all(context)),
            asyncio.create_task(stream.overflowed.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0] in done:
                tasks[0].result()  # a defect in reading ends the call with an error, and is logged
            if tasks[2] in done:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, "the gateway reads too slowly"
                )
        finally:
            # A call that its gateway cut may be cancelled here once more, so what must happen comes
            # before the first wait.
            for task in tasks:
                task.cancel()
            self._open.discard(stream)
            self._abandon(stream)
            await asyncio.gather(*tasks, return_exceptions=True)

    def deliver(self, progress: Progress) -> None:
        """Send the results of an engine step to the gateways that wait for them."""
        self._note_received(progress.received)
        batches: dict[GatewayStream, list[pb.RequestEvent]] = defaultdict(list)
        # A gateway that learns of an end gets the load with it: the scheduler has to know it before
        # it is asked again.
        ended: set[GatewayStream] = set()
        for adopted in progress.adopted:
            self._adopt(adopted, batches)
        for token in self._of_latest_start(progress.tokens):
            stream = self._forward(token, progress.times.get(token.request_id), batches)
            if stream is not None and token.finish_reason is not None:
                self._forget(token.request_id, stream)
                ended.add(stream)
        for refusal in self._of_latest_start(progress.refusals):
            stream = self._streams.get(refusal.request_id)
            if stream is None:
                self._handovers.end(refusal)
                continue
            batches[stream] += [*self._coalescer.take(refusal.request_id), to_refusal(refusal)]
            self._forget(refusal.request_id, stream)
            ended.add(stream)
        for moved in self._of_latest_start(progress.moved):
            self._move(moved, progress.times.get(moved.request_id), batches)
        load = self._load() if ended else None
        for stream, events in batches.items():
            stream.post(events, load if stream in ended else None)

    def _note_received(self, request_ids: Sequence[str]) -> None:
        """The engine has noted a start of each; it may have got more of the same id."""
        for request_id in request_ids:
            self._on_received(request_id)
            self._pending_starts[request_id] -= 1
            if self._pending_starts[request_id] <= 0:
                del self._pending_starts[request_id]

    def _forward(
        self,
        token: EmitToken,
        times: RequestTimes | None,
        batches: dict[GatewayStream, list[pb.RequestEvent]],
    ) -> GatewayStream | None:
        """Send, gather or keep a token; returns the link of its request, None if it has none."""
        stream = self._streams.get(token.request_id)
        if stream is None:
            self._handovers.add_token(token, times)
        elif events := self._coalescer.add(to_event(token, times), self._clock()):
            batches[stream] += events
        return stream

    def _of_latest_start(self, news: Sequence[EngineEvent]) -> Sequence[EngineEvent]:
        """What is not of an earlier start than the one that its request has here."""
        if not self._pending_starts:
            return news
        return [one for one in news if one.request_id not in self._pending_starts]

    async def sweep(self) -> None:
        """Drop requests and readers that have waited too long."""
        for event in self._coalescer.due(self._clock()):
            self._streams[event.request_id].post([event])
        overdue, timed_out = self._handovers.expire(self._clock())
        for expected in timed_out:
            message = (
                f"the request did not come with {expected.group_id} at epoch {expected.epoch}; "
                f"{_serves(self._place())}"
            )
            reason = pb.FINISH_REASON_STALE_EPOCH
            expected.reader.post([failure(expected.request_id, reason, message)])
        self._to_abort.update(overdue)
        self._note_activity()
        while self._to_abort:
            await self._engine.abort_request(self._to_abort.pop())

    def fail_all(self, message: str, engine_died: bool = False) -> None:
        """End every active request with an error; no effect when there is none."""
        reason = pb.FINISH_REASON_ENGINE_DIED if engine_died else pb.FINISH_REASON_ERROR
        for request_id, stream in list(self._streams.items()):
            stream.post([*self._coalescer.take(request_id), failure(request_id, reason, message)])
            self._forget(request_id, stream)
        for expected in self._handovers.clear():
            expected.reader.post([failure(expected.request_id, pb.FINISH_REASON_ERROR, message)])
        self._note_activity()

    def give_up_all(self, message: str) -> None:
        """End every active request with an error, and have the engine forget it."""
        self._to_abort.update(self._streams, self._handovers.arrived_ids)
        self.fail_all(message)
        self._wake.set()

    def _adopt(
        self, adopted: AdoptedRequest, batches: dict[GatewayStream, list[pb.RequestEvent]]
    ) -> None:
        request_id = adopted.request_id
        if request_id in self._pending_starts:
            return  # its gateway has asked anew; the engine ends this one for that
        if request_id in self._streams:
            log.error("request %s was adopted here, but runs here already", request_id)
        elif not self._handovers.adopt(adopted, self._clock()):
            self._to_abort.add(request_id)
            self._wake.set()
        elif (matched := self._match(request_id)) is not None:
            stream, events = matched
            batches[stream] += events
        self._note_activity()

    def _match(self, request_id: str) -> tuple[GatewayStream, list[pb.RequestEvent]] | None:
        """Let the waiting reader of an adopted request read on; None while one is missing."""
        matched = self._handovers.match(request_id)
        if matched is None:
            return None
        arrival, expected = matched
        if arrival.ending is None:
            self._streams[request_id] = expected.reader
            expected.reader.request_ids.add(request_id)
            if expected.coalesced:
                self._coalescer.begin(request_id)
        return expected.reader, to_replay(request_id, arrival, expected.from_index)

    def _move(
        self,
        moved: MovedRequest,
        times: RequestTimes | None,
        batches: dict[GatewayStream, list[pb.RequestEvent]],
    ) -> None:
        failpoint.hit("worker.moved.told")
        stream = self._streams.get(moved.request_id)
        traceparent = self._traceparent_of(moved.group_id, moved.epoch)
        event = to_moved(moved, times, traceparent)
        if stream is not None:
            batches[stream] += [*self._coalescer.take(moved.request_id), event]
            self._forget(moved.request_id, stream)
        elif not self._handovers.end(moved, times) and self._open:
            # Its gateway gave it up after the engine had handed it over: any gateway will pass
            # the abort on, or the new owner would keep it until nobody has attached in time.
            batches[next(iter(self._open))].append(event)

    async def _read(self, frames: AsyncIterator[pb.GenerateRequest], stream: GatewayStream) -> None:
        async for message in frames:
            for frame in unpacked(message):
                match frame.WhichOneof("body"):
                    case "start":
                        await self._start(frame.start, stream)
                    case "abort":
                        await self._abort(frame.abort.request_id, stream)
                    case "attach":
                        self._attach(frame.attach, stream)

    async def _start(self, start: pb.Start, stream: GatewayStream) -> None:
        place = self._place()
        asked = (start.group_id, start.epoch)
        if place is None or not place.leads or place[:2] != asked:
            # A follower does not name the leader: the scheduler decides anew, with today's loads
            # and without the reservation at a group that is gone.
            message = f"{start.group_id} at epoch {start.epoch} is stale; {_serves(place)}"
            self._refuse(start, stream, pb.FINISH_REASON_STALE_EPOCH, message)
            return
        former = self._streams.get(start.request_id)
        try:
            if former is stream:
                raise InvalidStart("a request with this id is running already")
            facts = self._facts
            request = to_request(start, facts.vocab_size, facts.max_model_len, self._clock())
        except InvalidStart as error:
            self._refuse(start, stream, pb.FINISH_REASON_INVALID, str(error))
            return
        earlier = self._handovers.forget(start.request_id)
        unwanted = start.request_id in self._to_abort
        if former is not None:
            # Its gateway has lost that link, which this worker has not noticed yet.
            self._forget(start.request_id, former)
        if former is not None or unwanted or (earlier is not None and earlier.ending is None):
            # Its gateway has given that one up, and asks anew under the same id.
            self._to_abort.discard(start.request_id)
            await self._engine.abort_request(start.request_id)
        self._pending_starts[start.request_id] += 1
        self._streams[start.request_id] = stream
        stream.request_ids.add(start.request_id)
        if start.delivery == pb.DELIVERY_COALESCED:
            self._coalescer.begin(start.request_id)
        self._note_activity()
        await self._engine.start_request(request)

    def _refuse(
        self,
        start: pb.Start,
        stream: GatewayStream,
        reason: "pb.FinishReason.ValueType",
        message: str,
    ) -> None:
        self._on_received(start.request_id)
        stream.post([failure(start.request_id, reason, message)])

    def _attach(self, attach: pb.Attach, stream: GatewayStream) -> None:
        failpoint.hit("worker.attach.taken")
        request_id = attach.request_id
        reader = self._streams.get(request_id)
        if attach.from_index < 0 or reader is stream:
            message = "from_index is below 0, or this stream reads the request already"
            stream.post([failure(request_id, pb.FINISH_REASON_INVALID, message)])
            return
        if reader is not None:
            # Its gateway has lost that stream, and with it what was sent there.
            message = "the request is read by another stream; ask for another place"
            stream.post([failure(request_id, pb.FINISH_REASON_STALE_EPOCH, message)])
            return
        expected = WaitingReader(
            request_id,
            attach.group_id,
            attach.epoch,
            attach.from_index,
            stream,
            self._clock() + self._handovers.timeout_s,
            coalesced=attach.delivery == pb.DELIVERY_COALESCED,
        )
        if not self._handovers.expect(expected):
            message = "the request was given up here before, or too many wait for theirs"
            stream.post([failure(request_id, pb.FINISH_REASON_STALE_EPOCH, message)])
        elif (matched := self._match(request_id)) is not None:
            stream.post(matched[1])
        self._note_activity()

    async def _abort(self, request_id: str, stream: GatewayStream) -> None:
        """Abort a request, unless another gateway reads it."""
        owner = self._streams.get(request_id)
        if owner is stream:
            self._forget(request_id, stream)
            await self._engine.abort_request(request_id)
        elif owner is None:
            arrival = self._handovers.abort(request_id, self._clock())
            self._note_activity()
            await self._discard(request_id, arrival, stream)

    async def _discard(
        self, request_id: str, arrival: UnreadOutput | None, stream: GatewayStream
    ) -> None:
        """Drop a kept request; `stream` learns where it went, to pass the abort on."""
        if arrival is None:
            return
        if arrival.ending is None:
            await self._engine.abort_request(request_id)
        elif isinstance(arrival.ending, MovedRequest):
            stream.post([to_moved(arrival.ending)])

    def _abandon(self, stream: GatewayStream) -> None:
        """Drop the requests of a broken stream; `run` has the engine abort them."""
        for request_id in [*stream.request_ids]:
            self._forget(request_id, stream)
            self._to_abort.add(request_id)
        for request_id in self._handovers.expected_by(stream):
            self._handovers.abort(request_id, self._clock())
        self._note_activity()
        self._wake.set()

    def _forget(self, request_id: str, stream: GatewayStream) -> None:
        del self._streams[request_id]
        self._coalescer.drop(request_id)
        stream.request_ids.discard(request_id)
        self._note_activity()

    def _note_activity(self) -> None:
        if self.active:
            self._idle.clear()
        else:
            self._idle.set()


def _serves(place: Place | None) -> str:
    if place is None:
        return "the worker serves no group"
    role = "leads" if place.leads else "follows in"
    return f"the worker {role} {place.group_id} at epoch {place.epoch}"
