"""The gRPC service of a worker: passes requests from gateways to the engine, and tokens back.

There is a stream per gateway; the tokens of an engine step share a message. Workers form groups; an
epoch numbers a group's configurations, and requests are started at the leader. A request adopted
from another worker, which continues here after a group change, is kept in `Handovers` until its
gateway attaches to it. All `request_id`s are the ids under which gateways started the requests,
never the engine's sequence ids.
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

# Interval of checks for expired handovers and coalesced tokens.
SWEEP_S = 0.25

EngineEvent = TypeVar("EngineEvent", EmitToken, RefuseRequest, MovedRequest)

log = logging.getLogger(__name__)


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Passes requests from gateways to the engine, and tokens back."""

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
        """`place` returns the committed group configuration that this worker serves, if any.

        `on_received` is called with the id of each request that was refused here, or that the
        engine's load includes. `load` returns the current load. `traceparent_of(group_id, epoch)`
        returns the traceparent of the change to a configuration, "" if it is not traced.
        """
        self._engine = engine
        self._facts = facts
        self._place = place
        self._on_received = on_received
        self._load = load
        self._traceparent_of = traceparent_of
        self._clock = clock
        self._open: set[GatewayStream] = set()
        self._streams: dict[str, GatewayStream] = {}  # stream that reads a request, by request id
        self._handovers: Handovers[GatewayStream] = Handovers()
        self._coalescer = TokenCoalescer()
        # Number of starts per id that the engine has not acknowledged yet. Until then, its events
        # for the id belong to earlier starts. It acknowledges each start once, even if aborted.
        self._pending_starts: Counter[str] = Counter()
        # Requests in the engine that no gateway reads; `run` aborts them.
        self._to_abort: set[str] = set()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def active(self) -> int:
        """Number of requests that have not ended, or whose end no gateway has read."""
        return len(self._streams) + len(self._handovers)

    async def run(self) -> None:
        """Sweep periodically, and whenever requests must be aborted, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with timeout(SWEEP_S):
                    await self._wake.wait()
            self._wake.clear()
            await self.sweep()

    async def wait_idle(self) -> None:
        """Wait until no request is active."""
        await self._idle.wait()

    async def Generate(  # type: ignore[override]  # the stub's signature allows only generators
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
                tasks[0].result()  # raise an unexpected error, which fails the call and is logged
            if tasks[2] in done:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, "the gateway reads too slowly"
                )
        finally:
            # gRPC may cancel a disconnected call again, so clean up before the first await.
            for task in tasks:
                task.cancel()
            self._open.discard(stream)
            self._abandon(stream)
            await asyncio.gather(*tasks, return_exceptions=True)

    def deliver(self, progress: Progress) -> None:
        """Send the results of an engine step to the gateways that read them."""
        self._note_received(progress.received)
        batches: dict[GatewayStream, list[pb.RequestEvent]] = defaultdict(list)
        # Send the load with the end of a request. The gateway forwards it, so that the scheduler
        # knows the free capacity before the client's next request.
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
        """Record that the engine has acknowledged a start of each id; more may be pending."""
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
        """Send, coalesce or keep a token; returns the stream that reads its request, if any."""
        stream = self._streams.get(token.request_id)
        if stream is None:
            self._handovers.add_token(token, times)
        elif events := self._coalescer.add(to_event(token, times), self._clock()):
            batches[stream] += events
        return stream

    def _of_latest_start(self, events: Sequence[EngineEvent]) -> Sequence[EngineEvent]:
        """Remove events that belong to an earlier start of the same request."""
        if not self._pending_starts:
            return events
        return [event for event in events if event.request_id not in self._pending_starts]

    async def sweep(self) -> None:
        """Send due coalesced tokens, expire handovers, and abort requests without a reader."""
        for event in self._coalescer.due(self._clock()):
            self._streams[event.request_id].post([event])
        unattached_ids, unmatched_readers = self._handovers.expire(self._clock())
        for expected in unmatched_readers:
            message = (
                f"the request was not adopted with {expected.group_id} at epoch {expected.epoch}; "
                f"{_role_text(self._place())}"
            )
            reason = pb.FINISH_REASON_STALE_EPOCH
            expected.reader.post([failure(expected.request_id, reason, message)])
        self._to_abort.update(unattached_ids)
        self._note_activity()
        while self._to_abort:
            await self._engine.abort_request(self._to_abort.pop())

    def fail_all(self, message: str, engine_died: bool = False) -> None:
        """End every active request with an error."""
        reason = pb.FINISH_REASON_ENGINE_DIED if engine_died else pb.FINISH_REASON_ERROR
        for request_id, stream in list(self._streams.items()):
            stream.post([*self._coalescer.take(request_id), failure(request_id, reason, message)])
            self._forget(request_id, stream)
        for expected in self._handovers.clear():
            expected.reader.post([failure(expected.request_id, pb.FINISH_REASON_ERROR, message)])
        self._note_activity()

    def abort_all(self, message: str) -> None:
        """End every active request with an error, and abort it in the engine."""
        self._to_abort.update(self._streams, self._handovers.adopted_ids)
        self.fail_all(message)
        self._wake.set()

    def _adopt(
        self, adopted: AdoptedRequest, batches: dict[GatewayStream, list[pb.RequestEvent]]
    ) -> None:
        request_id = adopted.request_id
        if request_id in self._pending_starts:
            return  # the gateway has restarted the request, which aborts the adopted sequence
        if request_id in self._streams:
            log.error("request %s was adopted, but already runs here", request_id)
        elif not self._handovers.adopt(adopted, self._clock()):
            self._to_abort.add(request_id)
            self._wake.set()
        elif (matched := self._match(request_id)) is not None:
            stream, events = matched
            batches[stream] += events
        self._note_activity()

    def _match(self, request_id: str) -> tuple[GatewayStream, list[pb.RequestEvent]] | None:
        """Connect an adopted request to its waiting reader; None while either is missing."""
        matched = self._handovers.match(request_id)
        if matched is None:
            return None
        unread, expected = matched
        if unread.ending is None:
            self._streams[request_id] = expected.reader
            expected.reader.request_ids.add(request_id)
            if expected.coalesced:
                self._coalescer.begin(request_id)
        return expected.reader, to_replay(request_id, unread, expected.from_index)

    def _move(
        self,
        moved: MovedRequest,
        times: RequestTimes | None,
        batches: dict[GatewayStream, list[pb.RequestEvent]],
    ) -> None:
        failpoint.hit("worker.moved.reported")
        stream = self._streams.get(moved.request_id)
        traceparent = self._traceparent_of(moved.group_id, moved.epoch)
        event = to_moved(moved, times, traceparent)
        if stream is not None:
            batches[stream] += [*self._coalescer.take(moved.request_id), event]
            self._forget(moved.request_id, stream)
        elif not self._handovers.end(moved, times) and self._open:
            # The request was aborted after the engine had handed it over. Report the move to any
            # gateway, which aborts it at the new worker; else it would run until its attach
            # timeout.
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
            # Refuse instead of redirecting to the leader: the scheduler must decide again with
            # current loads, and release its reservation at the old configuration.
            message = f"{start.group_id} at epoch {start.epoch} is stale; {_role_text(place)}"
            self._refuse(start, stream, pb.FINISH_REASON_STALE_EPOCH, message)
            return
        former = self._streams.get(start.request_id)
        try:
            if former is stream:
                raise InvalidStart("a request with this id is already running")
            facts, now_s = self._facts, self._clock()
            limits = facts.vocab_size, facts.max_model_len, now_s, facts.adapter_rank_max
            request = to_request(start, *limits)
        except InvalidStart as error:
            self._refuse(start, stream, pb.FINISH_REASON_INVALID, str(error))
            return
        earlier = self._handovers.forget(start.request_id)
        unwanted = start.request_id in self._to_abort
        if former is not None:
            # The gateway has lost that stream, which this worker has not detected yet.
            self._forget(start.request_id, former)
        if former is not None or unwanted or (earlier is not None and earlier.ending is None):
            # The gateway restarts the request under the same id: abort the earlier start first.
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
            message = "from_index is negative, or this stream already reads the request"
            stream.post([failure(request_id, pb.FINISH_REASON_INVALID, message)])
            return
        if reader is not None:
            # The gateway has lost that stream, with tokens that were sent on it.
            message = "the request is read by another stream; request a new assignment"
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
            message = "the request was aborted here before, or too many readers wait"
            stream.post([failure(request_id, pb.FINISH_REASON_STALE_EPOCH, message)])
        elif (matched := self._match(request_id)) is not None:
            stream.post(matched[1])
        self._note_activity()

    async def _abort(self, request_id: str, stream: GatewayStream) -> None:
        """Abort a request, unless another stream reads it."""
        owner = self._streams.get(request_id)
        if owner is stream:
            self._forget(request_id, stream)
            await self._engine.abort_request(request_id)
        elif owner is None:
            unread = self._handovers.abort(request_id, self._clock())
            self._note_activity()
            await self._discard(request_id, unread, stream)

    async def _discard(
        self, request_id: str, unread: UnreadOutput | None, stream: GatewayStream
    ) -> None:
        """Abort an unread request; if the request has moved, report its new worker on `stream`."""
        if unread is None:
            return
        if unread.ending is None:
            await self._engine.abort_request(request_id)
        elif isinstance(unread.ending, MovedRequest):
            stream.post([to_moved(unread.ending)])

    def _abandon(self, stream: GatewayStream) -> None:
        """End the requests of a broken stream; `run` aborts them in the engine."""
        for request_id in [*stream.request_ids]:
            self._forget(request_id, stream)
            self._to_abort.add(request_id)
        for request_id in self._handovers.expected_by(stream):
            self._handovers.abort(request_id, self._clock())
        self._note_activity()
        self._wake.set()

    def _forget(self, request_id: str, stream: GatewayStream) -> None:
        del self._streams[request_id]
        self._coalescer.forget(request_id)
        stream.request_ids.discard(request_id)
        self._note_activity()

    def _note_activity(self) -> None:
        if self.active:
            self._idle.clear()
        else:
            self._idle.set()


def _role_text(place: Place | None) -> str:
    if place is None:
        return "the worker serves no group"
    role = "leads" if place.leads else "follows in"
    return f"the worker {role} {place.group_id} at epoch {place.epoch}"
