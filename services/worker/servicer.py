"""WorkerService: one stream per gateway; the tokens of one engine step travel in one message."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc.aio

from services.common.clock import monotonic_s
from services.worker.engine_client import EngineClient
from services.worker.group_view import NOWHERE, Place
from services.worker.ipc import EngineReady, Progress
from services.worker.translate import InvalidRequest, failure, to_event, to_refusal, to_request
from tideserve.worker.v1 import worker_pb2 as pb
from tideserve.worker.v1 import worker_pb2_grpc

# Engine steps that a gateway may lag behind before its stream is cut.
OUTBOX_MAX = 4096

log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


@dataclass(eq=False, slots=True)
class Link:
    """One gateway's stream: what is to be sent, and the requests that it carries."""

    outbox: asyncio.Queue[pb.GenerateResponse] = field(
        default_factory=lambda: asyncio.Queue(OUTBOX_MAX)
    )
    request_ids: set[str] = field(default_factory=set)
    overflowed: asyncio.Event = field(default_factory=asyncio.Event)

    def post(self, events: list[pb.RequestEvent]) -> None:
        """Queue one message; a gateway that lags too far loses its stream."""
        try:
            self.outbox.put_nowait(pb.GenerateResponse(events=events))
        except asyncio.QueueFull:
            self.overflowed.set()


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Hands requests to the engine and its tokens to the gateways."""

    def __init__(
        self,
        engine: EngineClient,
        facts: EngineReady,
        place: Callable[[], Place],
        on_received: Callable[[str], None],
    ) -> None:
        """`place` is the committed configuration that this worker serves.

        `on_received` learns of each start once the engine's load counts it, or it was refused.
        """
        self._engine = engine
        self._facts = facts
        self._place = place
        self._on_received = on_received
        self._links: dict[str, Link] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def active(self) -> int:
        """Requests that have not ended."""
        return len(self._links)

    async def wait_idle(self) -> None:
        """Return once no request is active."""
        await self._idle.wait()

    async def Generate(  # type: ignore[override]  # the stub knows generators only
        self, request_iterator: AsyncIterator[pb.GenerateRequest], context: Context
    ) -> None:
        """See worker.proto."""
        link = Link()
        tasks = [
            asyncio.create_task(self._read(request_iterator, link)),
            asyncio.create_task(_write(link, context)),
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
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._abandon(link)

    def deliver(self, progress: Progress) -> None:
        """Send an engine step's news to the gateways that wait for it."""
        for request_id in progress.received:
            self._on_received(request_id)
        batches: dict[Link, list[pb.RequestEvent]] = defaultdict(list)
        for token in progress.tokens:
            link = self._links.get(token.request_id)
            if link is not None:
                batches[link].append(to_event(token))
                if token.finish_reason is not None:
                    self._forget(token.request_id, link)
        for refusal in progress.refusals:
            link = self._links.get(refusal.request_id)
            if link is not None:
                self._forget(refusal.request_id, link)
                batches[link].append(to_refusal(refusal))
        for link, events in batches.items():
            link.post(events)

    def fail_all(self, message: str) -> None:
        """End every active request with an error; no effect when there is none."""
        for request_id, link in list(self._links.items()):
            self._forget(request_id, link)
            link.post([failure(request_id, pb.FINISH_REASON_ERROR, message)])

    async def _read(self, frames: AsyncIterator[pb.GenerateRequest], link: Link) -> None:
        async for frame in frames:
            match frame.WhichOneof("body"):
                case "start":
                    await self._start(frame.start, link)
                case "abort":
                    await self._abort(frame.abort.request_id, link)

    async def _start(self, start: pb.Start, link: Link) -> None:
        place = self._place()
        if place == NOWHERE or place != (start.group_id, start.epoch):
            message = (
                f"{start.group_id} at epoch {start.epoch} is stale; "
                f"the worker serves {place.group_id or 'no group'} at epoch {place.epoch}"
            )
            self._refuse(start, link, pb.FINISH_REASON_STALE_EPOCH, message)
            return
        try:
            if start.request_id in self._links:
                raise InvalidRequest("a request with this id is running already")
            facts = self._facts
            request = to_request(start, facts.vocab_size, facts.max_model_len, monotonic_s())
        except InvalidRequest as error:
            self._refuse(start, link, pb.FINISH_REASON_INVALID, str(error))
            return
        self._links[start.request_id] = link
        link.request_ids.add(start.request_id)
        self._idle.clear()
        await self._engine.start_request(request)

    def _refuse(
        self, start: pb.Start, link: Link, reason: "pb.FinishReason.ValueType", message: str
    ) -> None:
        self._on_received(start.request_id)
        link.post([failure(start.request_id, reason, message)])

    async def _abort(self, request_id: str, link: Link) -> None:
        if self._links.get(request_id) is link:
            self._forget(request_id, link)
            await self._engine.abort_request(request_id)

    async def _abandon(self, link: Link) -> None:
        """Abort what a broken stream leaves behind."""
        for request_id in list(link.request_ids):
            await self._abort(request_id, link)

    def _forget(self, request_id: str, link: Link) -> None:
        del self._links[request_id]
        link.request_ids.discard(request_id)
        if not self._links:
            self._idle.set()


async def _write(link: Link, context: Context) -> None:
    while True:
        await context.write(await link.outbox.get())
