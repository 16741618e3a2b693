"""A link: the gRPC stream to a worker, which carries all requests of this gateway there."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Set
from dataclasses import dataclass, field

import grpc

from services.common.clock import monotonic_s
from services.common.grpc_client import Dial
from services.gateway.cluster import translate_worker
from services.gateway.cluster.journal import JournalError
from services.gateway.cluster.outbox import Outbox
from services.gateway.cluster.stream import StreamBroken, cause, write_all
from services.gateway.cluster.token_stream import TokenStream
from services.gateway.vocabulary.errors import EngineFailed, WorkerLost
from services.gateway.vocabulary.message import Moved, TokenEvent
from tideserve.common.v1 import load_pb2
from tideserve.worker.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

PAUSE_FIRST_S = 1.0
"""Seconds for which a worker is avoided after its first failed connection."""
PAUSE_MAX_S = 30.0


@dataclass(slots=True)
class _Failure:
    until_s: float
    pause_s: float


@dataclass(slots=True)
class CircuitBreaker:
    """Tracks worker addresses (host:port) whose last connection failed.

    A worker that is unreachable from here looks idle to the scheduler, which would prefer it. Asks
    to the scheduler therefore list it as avoided, for a pause that doubles with each failure, like
    Envoy's outlier ejection.
    """

    _failures: dict[str, _Failure] = field(default_factory=dict)

    def record_failure(self, address: str, now_s: float) -> None:
        """Start or double the pause, because a connection ended without a reply of the worker."""
        before = self._failures.get(address)
        if before is not None and now_s < before.until_s:
            return  # the connection was opened before the pause: do not extend it
        pause_s = min(2 * before.pause_s, PAUSE_MAX_S) if before is not None else PAUSE_FIRST_S
        self._failures[address] = _Failure(now_s + pause_s, pause_s)

    def record_success(self, address: str) -> None:
        """End the pause, because the worker has replied."""
        self._failures.pop(address, None)

    def keep_only(self, addresses: Set[str]) -> None:
        """Remove all other addresses."""
        for address in self._failures.keys() - addresses:
            del self._failures[address]

    def avoided(self, now_s: float) -> tuple[tuple[str, ...], float]:
        """The addresses to avoid now, and the shortest of their remaining pauses in seconds."""
        until_s = {
            address: failure.until_s
            for address, failure in self._failures.items()
            if now_s < failure.until_s
        }
        return tuple(until_s), min(until_s.values(), default=now_s) - now_s


GenerateCall = grpc.aio.StreamStreamCall[worker_pb2.GenerateRequest, worker_pb2.GenerateResponse]


class WorkerLink:
    """The stream to a worker address and the requests on it."""

    def __init__(
        self,
        address: str,
        on_moved: Callable[["WorkerLink", str, Moved], None],
        on_load: Callable[[load_pb2.WorkerLoad], None],
        breaker: CircuitBreaker,
        dial: Dial,
    ) -> None:
        """`on_moved` is called with this link and each request that another worker has adopted.

        `on_load` is called with the worker's load before the events of the same message are
        applied. `breaker` records whether the worker replies. `has_replied`: the worker has replied
        on this link. `last_message_s`: time of its last message, initially of the link's creation.
        """
        self.address = address
        self._on_moved = on_moved
        self._on_load = on_load
        self._breaker = breaker
        self._dial = dial
        self.streams: dict[str, TokenStream] = {}
        self._outbox: Outbox[worker_pb2.GenerateRequest] = Outbox()
        self._stop = asyncio.Event()
        self.has_replied = False
        self.last_message_s = monotonic_s()

    @property
    def usable(self) -> bool:
        """Whether the link accepts new requests."""
        return not self._stop.is_set()

    def send(self, frame: worker_pb2.GenerateRequest) -> None:
        """Queue a frame, or close the link if the outbox is full, since the worker hangs."""
        if self._outbox.full:
            self._stop.set()
        else:
            self._outbox.put(frame)

    def room(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Wait for room in the outbox, to send a request in the block; see `Outbox.room`."""
        return self._outbox.room()

    def close(self) -> None:
        """Close the link in the background."""
        self._stop.set()

    async def run(self) -> None:
        """Run the stream until it breaks or is closed; then fail all requests on it."""
        reason = "cancelled"
        try:
            async with self._dial(self.address, "worker") as channel:
                call: GenerateCall = worker_pb2_grpc.WorkerServiceStub(channel).Generate()
                try:
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(write_all(call, self._outbox))
                        tasks.create_task(self._read(call))
                        tasks.create_task(self._wait_for_stop())
                        tasks.create_task(self._wait_for_reply(call))
                finally:
                    call.cancel()
        except* (StreamBroken, grpc.aio.AioRpcError) as group:
            reason = cause(group)
            if not (self.has_replied or self._stop.is_set()):
                self._breaker.record_failure(self.address, monotonic_s())
        finally:
            self._stop.set()
            self._outbox.close()
            log.info("link to the worker at %s ended: %s", self.address, reason)
            error = WorkerLost(
                "the worker of this request was lost; retry the request", reached=self.has_replied
            )
            for stream in self.streams.values():
                stream.lose(error)

    async def _read(self, call: GenerateCall) -> None:
        async for frame in call:
            self.last_message_s = monotonic_s()
            # Forward the load first: the scheduler needs it when a client retries at once.
            if frame.HasField("load"):
                self._on_load(frame.load)
            for event in translate_worker.token_events(frame):
                self._dispatch(event)
        raise StreamBroken("the worker closed the stream")

    def _dispatch(self, event: TokenEvent) -> None:
        stream = self.streams.get(event.request_id)
        if stream is not None:
            try:
                stream.apply(event)
            except JournalError as error:
                log.error("request %s: %s", event.request_id, error)
                stream.fail(EngineFailed("the worker's token stream is inconsistent; retry"))
                self.send(translate_worker.abort_frame(event.request_id))
        if event.moved is not None:
            self._on_moved(self, event.request_id, event.moved)

    async def _wait_for_reply(self, call: GenerateCall) -> None:
        """Wait for the initial metadata, which a worker sends as soon as the call arrives."""
        await call.initial_metadata()
        # A failed call has empty metadata and is done.
        if not call.done():
            self.has_replied = True
            self._breaker.record_success(self.address)

    async def _wait_for_stop(self) -> None:
        await self._stop.wait()
        raise StreamBroken("the gateway closed the stream")
