"""The stream to one worker, with the requests of this gateway on it."""

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
PAUSE_MAX_S = 30.0


@dataclass(slots=True)
class _Failure:
    until_s: float
    pause_s: float


@dataclass(slots=True)
class CircuitBreaker:
    """Addresses (host:port) whose last connection came to nothing.

    They may seem to be the best ones to the scheduler, since nothing runs there. So they are not
    asked for a while that grows, as Envoy ejects hosts.
    """

    _failures: dict[str, _Failure] = field(default_factory=dict)

    def failed(self, address: str, now_s: float) -> None:
        """A connection has ended without a word of the worker."""
        before = self._failures.get(address)
        if before is not None and now_s < before.until_s:
            return  # it had begun before
        pause_s = min(2 * before.pause_s, PAUSE_MAX_S) if before is not None else PAUSE_FIRST_S
        self._failures[address] = _Failure(now_s + pause_s, pause_s)

    def reached(self, address: str) -> None:
        """A worker has answered."""
        self._failures.pop(address, None)

    def keep_only(self, addresses: Set[str]) -> None:
        """Forget all others."""
        for address in self._failures.keys() - addresses:
            del self._failures[address]

    def avoided(self, now_s: float) -> tuple[tuple[str, ...], float]:
        """The addresses to avoid now, and for how many seconds that holds of all of them."""
        until_s = {
            one: told.until_s for one, told in self._failures.items() if now_s < told.until_s
        }
        return tuple(until_s), min(until_s.values(), default=now_s) - now_s


GenerateCall = grpc.aio.StreamStreamCall[worker_pb2.GenerateRequest, worker_pb2.GenerateResponse]


class WorkerLink:
    """The stream to one worker address and the requests on it."""

    def __init__(
        self,
        address: str,
        on_moved: Callable[["WorkerLink", str, Moved], None],
        on_load: Callable[[load_pb2.WorkerLoad], None],
        breaker: CircuitBreaker,
        dial: Dial,
    ) -> None:
        """`on_moved` learns of each request id that this worker has handed to another, `on_load` of
        its load whenever requests have ended, before these do; `breaker` whether it answers.

        `answered` is whether the worker has said anything on it, `heard_s` when it did last, or
        when the link was made.
        """
        self.address = address
        self._on_moved = on_moved
        self._on_load = on_load
        self._breaker = breaker
        self._dial = dial
        self.streams: dict[str, TokenStream] = {}
        self._outbox: Outbox[worker_pb2.GenerateRequest] = Outbox()
        self._stop = asyncio.Event()
        self.answered = False
        self.heard_s = monotonic_s()

    @property
    def usable(self) -> bool:
        """Whether it takes new requests."""
        return not self._stop.is_set()

    def send(self, frame: worker_pb2.GenerateRequest) -> None:
        """Queue a frame; a worker that takes none ends the link, and with it its requests."""
        if self._outbox.full:
            self._stop.set()
        else:
            self._outbox.put(frame)

    def room(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Begins when there is room to send a request. Raises QueueFull if that takes too long."""
        return self._outbox.room()

    def close(self) -> None:
        """End the link soon."""
        self._stop.set()

    async def run(self) -> None:
        """Hold the stream until it breaks or is closed; then every request on it fails."""
        reason = "cancelled"
        try:
            async with self._dial(self.address, "worker") as channel:
                call: GenerateCall = worker_pb2_grpc.WorkerServiceStub(channel).Generate()
                try:
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(write_all(call, self._outbox))
                        tasks.create_task(self._read(call))
                        tasks.create_task(self._wait_for_stop())
                        tasks.create_task(self._wait_for_answer(call))
                finally:
                    call.cancel()
        except* (StreamBroken, grpc.aio.AioRpcError) as group:
            reason = cause(group)
            if not (self.answered or self._stop.is_set()):
                self._breaker.failed(self.address, monotonic_s())
        finally:
            self._stop.set()
            self._outbox.close()
            log.info("link to the worker at %s ended: %s", self.address, reason)
            error = WorkerLost(
                "the worker of this request was lost; send the request again", reached=self.answered
            )
            for stream in self.streams.values():
                stream.lose(error)

    async def _read(self, call: GenerateCall) -> None:
        async for frame in call:
            self.heard_s = monotonic_s()
            if frame.HasField("load"):
                self._on_load(frame.load)
            for event in translate_worker.token_events(frame):
                self._dispatch(event)
        raise StreamBroken("the worker closed it")

    def _dispatch(self, event: TokenEvent) -> None:
        stream = self.streams.get(event.request_id)
        if stream is not None:
            try:
                stream.apply(event)
            except JournalError as error:
                log.error("request %s: %s", event.request_id, error)
                stream.fail(EngineFailed("the worker's token stream is inconsistent; try again"))
                self.send(translate_worker.abort_frame(event.request_id))
        if event.moved is not None:
            self._on_moved(self, event.request_id, event.moved)

    async def _wait_for_answer(self, call: GenerateCall) -> None:
        """A worker sends its metadata at once; those of a call that has failed are empty."""
        await call.initial_metadata()
        if not call.done():
            self.answered = True
            self._breaker.reached(self.address)

    async def _wait_for_stop(self) -> None:
        await self._stop.wait()
        raise StreamBroken("the gateway closed it")
