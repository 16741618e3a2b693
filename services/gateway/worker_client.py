"""Token streams from workers: one multiplexed gRPC stream per worker address."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import grpc

from services.common.grpc_client import open_channel
from services.gateway import translate
from services.gateway.errors import (
    EngineFailed,
    GatewayError,
    InvalidRequest,
    QueueFull,
    WorkerLost,
)
from services.gateway.journal import Journal, JournalError
from services.gateway.message import Assignment, Finish, Job, TokenEvent
from services.gateway.stream import OUTBOX_FRAMES, StreamBroken, cause, write_all
from tideserve.worker.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)
GenerateCall = grpc.aio.StreamStreamCall[worker_pb2.GenerateRequest, worker_pb2.GenerateResponse]


class StaleEpoch(Exception):
    """The worker serves another epoch than the assignment's: ask the scheduler again."""


class TokenStream:
    """One request's tokens, journalled as they come and read at the client's pace."""

    def __init__(self, job: Job) -> None:
        self._journal = Journal(job.limits.max_tokens)
        self._read = 0
        self._news = asyncio.Event()
        self._error: GatewayError | None = None

    @property
    def over(self) -> bool:
        """Whether the worker is done with the request."""
        return self._journal.finish is not None or self._error is not None

    def apply(self, event: TokenEvent) -> None:
        """Take a worker's event; raises JournalError if it breaks the order."""
        self._journal.apply(event.first_index, event.token_ids, event.finish, event.message)
        self._news.set()

    def fail(self, error: GatewayError) -> None:
        """End the stream with an error, unless it has ended already."""
        if not self.over:
            self._error = error
            self._news.set()

    async def next(self) -> tuple[list[int], Finish | None]:
        """All tokens since the last call, and the ending if that is reached; waits for news.

        Raises:
            StaleEpoch: if the request must be admitted again.
            GatewayError: if the request failed; tokens that came before are returned first.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            journal = self._journal
            fresh = journal.token_ids[self._read :]
            self._read += len(fresh)
            if journal.finish in (Finish.STOP, Finish.LENGTH):
                return fresh, journal.finish
            if fresh:
                if self.over:
                    self._news.set()
                return fresh, None
            self._raise_failure()

    def _raise_failure(self) -> None:
        journal = self._journal
        match journal.finish:
            case Finish.STALE_EPOCH if not journal.token_ids:
                raise StaleEpoch
            case Finish.STALE_EPOCH:
                raise EngineFailed("the worker's group changed under the request; try again")
            case Finish.INVALID:
                raise InvalidRequest(journal.message or "the worker refuses the request")
            case Finish.OVERLOADED:
                raise QueueFull(journal.message or "the worker is full; try again")
            case Finish.ERROR:
                raise WorkerLost(journal.message or "the engine failed; try again")
        if self._error is not None:
            raise self._error


class _Link:
    """The stream to one worker address and the requests on it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.streams: dict[str, TokenStream] = {}
        self._outbox: asyncio.Queue[worker_pb2.GenerateRequest] = asyncio.Queue(OUTBOX_FRAMES)
        self._stop = asyncio.Event()

    @property
    def usable(self) -> bool:
        """Whether it takes new requests."""
        return not self._stop.is_set()

    def send(self, frame: worker_pb2.GenerateRequest) -> None:
        """Queue a frame; a worker that takes none ends the link, and with it its requests."""
        if self._outbox.full():
            self._stop.set()
        else:
            self._outbox.put_nowait(frame)

    def close(self) -> None:
        """End the link soon."""
        self._stop.set()

    async def run(self) -> None:
        """Hold the stream until it breaks or is closed; then every request on it fails."""
        reason = "cancelled"
        try:
            async with open_channel(self.address) as channel:
                call: GenerateCall = worker_pb2_grpc.WorkerServiceStub(channel).Generate()
                try:
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(write_all(call, self._outbox))
                        tasks.create_task(self._read(call))
                        tasks.create_task(self._wait_for_stop())
                finally:
                    call.cancel()
        except* (StreamBroken, grpc.aio.AioRpcError) as group:
            reason = cause(group)
        finally:
            self._stop.set()
            log.info("link to the worker at %s ended: %s", self.address, reason)
            error = WorkerLost("the worker of this request was lost; send the request again")
            for stream in self.streams.values():
                stream.fail(error)

    async def _read(self, call: GenerateCall) -> None:
        async for frame in call:
            for event in translate.token_events(frame):
                self._dispatch(event)
        raise StreamBroken("the worker closed it")

    def _dispatch(self, event: TokenEvent) -> None:
        stream = self.streams.get(event.request_id)
        if stream is None:
            return
        try:
            stream.apply(event)
        except JournalError as error:
            log.error("request %s: %s", event.request_id, error)
            stream.fail(EngineFailed("the worker's token stream is inconsistent; try again"))
            self.send(translate.abort_frame(event.request_id))

    async def _wait_for_stop(self) -> None:
        await self._stop.wait()
        raise StreamBroken("the gateway closed it")


class WorkerClient:
    """The links to all workers; made when first needed, closed when a worker has gone."""

    def __init__(self, known_addresses: Callable[[], frozenset[str]]) -> None:
        """`known_addresses`: where the registered workers listen."""
        self._known_addresses = known_addresses
        self._links: dict[str, _Link] = {}
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def running(self) -> int:
        """Requests at workers."""
        return sum(len(link.streams) for link in self._links.values())

    async def run(self) -> None:
        """Own the links until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            # Nothing else to do here: links come and go with the requests.
            await asyncio.get_running_loop().create_future()

    @contextlib.asynccontextmanager
    async def open(self, job: Job, place: Assignment) -> AsyncIterator[TokenStream]:
        """Start `job` at a worker; leaving early aborts it there."""
        link = self._link(place.address)
        stream = TokenStream(job)
        link.streams[job.request_id] = stream
        link.send(translate.start_frame(job, place))
        try:
            yield stream
        finally:
            del link.streams[job.request_id]
            if not stream.over:
                link.send(translate.abort_frame(job.request_id))
            self._close_if_vanished(link)

    def workers_changed(self) -> None:
        """Tell that `known_addresses` may have changed."""
        for link in list(self._links.values()):
            self._close_if_vanished(link)

    def _close_if_vanished(self, link: _Link) -> None:
        if not link.streams and link.address not in self._known_addresses():
            link.close()

    def _link(self, address: str) -> _Link:
        link = self._links.get(address)
        if link is None or not link.usable:
            assert self._tasks is not None, "run() owns the links"
            link = self._links[address] = _Link(address)
            task = self._tasks.create_task(link.run(), name=f"worker {address}")
            task.add_done_callback(lambda _: self._forget(link))
        return link

    def _forget(self, link: _Link) -> None:
        if self._links.get(link.address) is link:
            del self._links[link.address]
