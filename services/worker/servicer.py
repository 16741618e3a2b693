"""WorkerService: one stream per gateway; the tokens of one engine step travel in one message.

A request that another worker hands over is kept in `Arrivals` until its gateway attaches to it.
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
from services.worker.arrivals import Arrivals, Expected, UnreadOutput
from services.worker.engine_client import EngineClient
from services.worker.gathering import Gathering
from services.worker.group_view import Place
from services.worker.ipc import AdoptedRequest, EngineReady, MovedRequest, Progress, RequestTimes
from services.worker.link import Context, Link
from services.worker.start_frame import InvalidStart, to_request
from services.worker.translate import failure, to_event, to_moved, to_refusal, to_replay
from tideserve.common.v1 import load_pb2
from tideserve.worker.v1 import worker_pb2 as pb
from tideserve.worker.v1 import worker_pb2_grpc

# How often requests that nobody attaches to are looked for.
SWEEP_S = 0.25

News = TypeVar("News", EmitToken, RefuseRequest, MovedRequest)

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
        self._open: set[Link] = set()
        self._links: dict[str, Link] = {}
        self._arrivals: Arrivals[Link] = Arrivals()
        self._gathering = Gathering()
        # Starts that the engine has not noted yet, by id: what it tells of the id is of earlier
        # ones, whose aborts it may not have read either. It notes each once, also if it is aborted.
        self._unnoted: Counter[str] = Counter()
        # Requests of the engine without a reader for ever; `run` has them aborted.
        self._unwanted: set[str] = set()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def active(self) -> int:
        """Requests that have not ended, or whose end was not fetched."""
        return len(self._links) + len(self._arrivals)

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
        link = Link()
        self._open.add(link)
        tasks = [
            asyncio.create_task(self._read(request_iterator, link)),
            asyncio.create_task(link.write_all(context)),
            asyncio.create_task(link.overflowed.wait()),
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
            self._open.discard(link)
            self._abandon(link)
            await asyncio.gather(*tasks, return_exceptions=True)

    def deliver(self, progress: Progress) -> None:
        """Send the results of an engine step to the gateways that wait for them."""
        self._note_starts(progress.received)
        batches: dict[Link, list[pb.RequestEvent]] = defaultdict(list)
        # A gateway that learns of an end gets the load with it: the scheduler has to know it before
        # it is asked again.
        told_end: set[Link] = set()
        for adopted in progress.adopted:
            self._adopt(adopted, batches)
        for token in self._of_now(progress.tokens):
            link = self._pass_on(token, progress.times.get(token.request_id), batches)
            if link is not None and token.finish_reason is not None:
                self._forget(token.request_id, link)
                told_end.add(link)
        for refusal in self._of_now(progress.refusals):
            link = self._links.get(refusal.request_id)
            if link is None:
                self._arrivals.end(refusal)
                continue
            batches[link] += [*self._gathering.take(refusal.request_id), to_refusal(refusal)]
            self._forget(refusal.request_id, link)
            told_end.add(link)
        for moved in self._of_now(progress.moved):
            self._move(moved, progress.times.get(moved.request_id), batches)
        load = self._load() if told_end else None
        for link, events in batches.items():
            link.post(events, load if link in told_end else None)

    def _note_starts(self, request_ids: Sequence[str]) -> None:
        """The engine has noted a start of each; it may have got more of the same id."""
        for request_id in request_ids:
            self._on_received(request_id)
            self._unnoted[request_id] -= 1
            if self._unnoted[request_id] <= 0:
                del self._unnoted[request_id]

    def _pass_on(
        self,
        token: EmitToken,
        times: RequestTimes | None,
        batches: dict[Link, list[pb.RequestEvent]],
    ) -> Link | None:
        """Send, gather or keep a token; returns the link of its request, None if it has none."""
        link = self._links.get(token.request_id)
        if link is None:
            self._arrivals.add_token(token, times)
        elif events := self._gathering.add(to_event(token, times), self._clock()):
            batches[link] += events
        return link

    def _of_now(self, news: Sequence[News]) -> Sequence[News]:
        """What is not of an earlier start than the one that its request has here."""
        if not self._unnoted:
            return news
        return [one for one in news if one.request_id not in self._unnoted]

    async def sweep(self) -> None:
        """Drop requests and readers that have waited too long."""
        for event in self._gathering.due(self._clock()):
            self._links[event.request_id].post([event])
        overdue, disappointed = self._arrivals.expire(self._clock())
        for expected in disappointed:
            message = (
                f"the request did not come with {expected.group_id} at epoch {expected.epoch}; "
                f"{_serves(self._place())}"
            )
            reason = pb.FINISH_REASON_STALE_EPOCH
            expected.reader.post([failure(expected.request_id, reason, message)])
        self._unwanted.update(overdue)
        self._note_activity()
        while self._unwanted:
            await self._engine.abort_request(self._unwanted.pop())

    def fail_all(self, message: str, engine_died: bool = False) -> None:
        """End every active request with an error; no effect when there is none."""
        reason = pb.FINISH_REASON_ENGINE_DIED if engine_died else pb.FINISH_REASON_ERROR
        for request_id, link in list(self._links.items()):
            link.post([*self._gathering.take(request_id), failure(request_id, reason, message)])
            self._forget(request_id, link)
        for expected in self._arrivals.clear():
            expected.reader.post([failure(expected.request_id, pb.FINISH_REASON_ERROR, message)])
        self._note_activity()

    def give_up_all(self, message: str) -> None:
        """End every active request with an error, and have the engine forget it."""
        self._unwanted.update(self._links, self._arrivals.arrived_ids)
        self.fail_all(message)
        self._wake.set()

    def _adopt(self, adopted: AdoptedRequest, batches: dict[Link, list[pb.RequestEvent]]) -> None:
        request_id = adopted.request_id
        if request_id in self._unnoted:
            return  # its gateway has asked anew; the engine ends this one for that
        if request_id in self._links:
            log.error("request %s was adopted here, but runs here already", request_id)
        elif not self._arrivals.adopt(adopted, self._clock()):
            self._unwanted.add(request_id)
            self._wake.set()
        elif (matched := self._match(request_id)) is not None:
            link, events = matched
            batches[link] += events
        self._note_activity()

    def _match(self, request_id: str) -> tuple[Link, list[pb.RequestEvent]] | None:
        """Let the waiting reader of an adopted request read on; None while one is missing."""
        matched = self._arrivals.match(request_id)
        if matched is None:
            return None
        arrival, expected = matched
        if arrival.ending is None:
            self._links[request_id] = expected.reader
            expected.reader.request_ids.add(request_id)
            if expected.coalesced:
                self._gathering.begin(request_id)
        return expected.reader, to_replay(request_id, arrival, expected.from_index)

    def _move(
        self,
        moved: MovedRequest,
        times: RequestTimes | None,
        batches: dict[Link, list[pb.RequestEvent]],
    ) -> None:
        failpoint.hit("worker.moved.told")
        link = self._links.get(moved.request_id)
        traceparent = self._traceparent_of(moved.group_id, moved.epoch)
        event = to_moved(moved, times, traceparent)
        if link is not None:
            batches[link] += [*self._gathering.take(moved.request_id), event]
            self._forget(moved.request_id, link)
        elif not self._arrivals.end(moved, times) and self._open:
            # Its gateway gave it up after the engine had handed it over: any gateway will pass
            # the abort on, or the new owner would keep it until nobody has attached in time.
            batches[next(iter(self._open))].append(event)

    async def _read(self, frames: AsyncIterator[pb.GenerateRequest], link: Link) -> None:
        async for message in frames:
            for frame in unpacked(message):
                match frame.WhichOneof("body"):
                    case "start":
                        await self._start(frame.start, link)
                    case "abort":
                        await self._abort(frame.abort.request_id, link)
                    case "attach":
                        self._attach(frame.attach, link)

    async def _start(self, start: pb.Start, link: Link) -> None:
        place = self._place()
        asked = (start.group_id, start.epoch)
        if place is None or not place.leads or place[:2] != asked:
            # A follower does not name the leader: the scheduler decides anew, with today's loads
            # and without the reservation at a group that is gone.
            message = f"{start.group_id} at epoch {start.epoch} is stale; {_serves(place)}"
            self._refuse(start, link, pb.FINISH_REASON_STALE_EPOCH, message)
            return
        former = self._links.get(start.request_id)
        try:
            if former is link:
                raise InvalidStart("a request with this id is running already")
            facts = self._facts
            request = to_request(start, facts.vocab_size, facts.max_model_len, self._clock())
        except InvalidStart as error:
            self._refuse(start, link, pb.FINISH_REASON_INVALID, str(error))
            return
        earlier = self._arrivals.forget(start.request_id)
        unwanted = start.request_id in self._unwanted
        if former is not None:
            # Its gateway has lost that link, which this worker has not noticed yet.
            self._forget(start.request_id, former)
        if former is not None or unwanted or (earlier is not None and earlier.ending is None):
            # Its gateway has given that one up, and asks anew under the same id.
            self._unwanted.discard(start.request_id)
            await self._engine.abort_request(start.request_id)
        self._unnoted[start.request_id] += 1
        self._links[start.request_id] = link
        link.request_ids.add(start.request_id)
        if start.delivery == pb.DELIVERY_COALESCED:
            self._gathering.begin(start.request_id)
        self._note_activity()
        await self._engine.start_request(request)

    def _refuse(
        self, start: pb.Start, link: Link, reason: "pb.FinishReason.ValueType", message: str
    ) -> None:
        self._on_received(start.request_id)
        link.post([failure(start.request_id, reason, message)])

    def _attach(self, attach: pb.Attach, link: Link) -> None:
        failpoint.hit("worker.attach.taken")
        request_id = attach.request_id
        reader = self._links.get(request_id)
        if attach.from_index < 0 or reader is link:
            message = "from_index is below 0, or this stream reads the request already"
            link.post([failure(request_id, pb.FINISH_REASON_INVALID, message)])
            return
        if reader is not None:
            # Its gateway has lost that stream, and with it what was sent there.
            message = "the request is read by another stream; ask for another place"
            link.post([failure(request_id, pb.FINISH_REASON_STALE_EPOCH, message)])
            return
        expected = Expected(
            request_id,
            attach.group_id,
            attach.epoch,
            attach.from_index,
            link,
            self._clock() + self._arrivals.timeout_s,
            coalesced=attach.delivery == pb.DELIVERY_COALESCED,
        )
        if not self._arrivals.expect(expected):
            message = "the request was given up here before, or too many wait for theirs"
            link.post([failure(request_id, pb.FINISH_REASON_STALE_EPOCH, message)])
        elif (matched := self._match(request_id)) is not None:
            link.post(matched[1])
        self._note_activity()

    async def _abort(self, request_id: str, link: Link) -> None:
        """Abort a request, unless another gateway reads it."""
        owner = self._links.get(request_id)
        if owner is link:
            self._forget(request_id, link)
            await self._engine.abort_request(request_id)
        elif owner is None:
            arrival = self._arrivals.abort(request_id, self._clock())
            self._note_activity()
            await self._discard(request_id, arrival, link)

    async def _discard(self, request_id: str, arrival: UnreadOutput | None, link: Link) -> None:
        """Drop a kept request; `link` learns where it went, to pass the abort on."""
        if arrival is None:
            return
        if arrival.ending is None:
            await self._engine.abort_request(request_id)
        elif isinstance(arrival.ending, MovedRequest):
            link.post([to_moved(arrival.ending)])

    def _abandon(self, link: Link) -> None:
        """Drop the requests of a broken stream; `run` has the engine abort them."""
        for request_id in [*link.request_ids]:
            self._forget(request_id, link)
            self._unwanted.add(request_id)
        for request_id in self._arrivals.expected_by(link):
            self._arrivals.abort(request_id, self._clock())
        self._note_activity()
        self._wake.set()

    def _forget(self, request_id: str, link: Link) -> None:
        del self._links[request_id]
        self._gathering.drop(request_id)
        link.request_ids.discard(request_id)
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
