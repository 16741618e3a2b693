"""Runs requests at workers, over one gRPC stream (link) per worker address.

A request may move: when its group of workers changes, another worker adopts it. The gateway then
attaches to the new worker, and the request's token stream continues after the last received token.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from dataclasses import dataclass

from services.common import failpoint, genai
from services.common.clock import monotonic_s
from services.common.grpc_client import Dial
from services.common.timeouts import timeout
from services.common.tracing import SpanLink, parse_traceparent
from services.core.ask import Assignment
from services.core.request import Request
from services.core.stall_limit import STALLED_S
from services.gateway.cluster import translate_worker
from services.gateway.cluster.journal import Journal
from services.gateway.cluster.token_stream import TokenStream
from services.gateway.cluster.worker_link import CircuitBreaker, WorkerLink
from services.gateway.records.request_record import ChoiceRecord, RequestMove, WorkerSegment
from services.gateway.vocabulary.errors import ServiceUnavailable, ShuttingDown, WorkerLost
from services.gateway.vocabulary.message import Moved
from tideserve.common.v1 import load_pb2
from tideserve.worker.v1 import worker_pb2

REATTACH_S = 0.2
UNREACHED_MAX = 5
"""Consecutive connections without a reply after which a moved request's worker counts as dead."""
GONE_SILENT_S = STALLED_S
"""Seconds without a message after which an unregistered worker counts as dead."""
ADAPTER_RETRY_S = 10.0
"""Retry-After of a request whose worker would ignore its adapter, in seconds."""
LARGE_IDS = 4096
"""Token ids of a request from which several encodings in a row would block the event loop."""

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _OpenStream:
    """A token stream, the link that carries it, and the group epoch of its worker.

    `coalesced`: the worker may send the tokens of several iterations in one event.
    """

    request_id: str
    stream: TokenStream
    link: WorkerLink
    epoch: int
    coalesced: bool
    # Attaches to the new worker after a move, until that worker replies.
    attaching: asyncio.Task[None] | None = None


class WorkerClient:
    """Links to all workers, opened on first use and closed when their worker is gone."""

    def __init__(
        self,
        known_addresses: Callable[[], frozenset[str]],
        attach_timeout_s: float,
        on_moved: Callable[[], None],
        on_load: Callable[[load_pb2.WorkerLoad], None],
        dial: Dial,
        loads_adapters: Callable[[str], bool] = lambda _address: False,
    ) -> None:
        """`known_addresses` returns the addresses of the registered workers.

        A moved stream fails if its new worker sends no event within `attach_timeout_s`.
        `on_moved` is called for each stream that moves to another worker. `on_load` is called with
        a worker's load before the requests in the same message end here. `loads_adapters` returns
        whether the worker at an address loads adapters.
        """
        self._known_addresses = known_addresses
        self._attach_timeout_s = attach_timeout_s
        self._on_moved = on_moved
        self._on_load = on_load
        self._dial = dial
        self._loads_adapters = loads_adapters
        self._breaker = CircuitBreaker()
        self._links: dict[str, WorkerLink] = {}
        self._open_streams: dict[str, _OpenStream] = {}
        self._watched: set[WorkerLink] = set()  # links with streams to unregistered workers
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def running(self) -> int:
        """Number of requests at workers."""
        return len(self._open_streams)

    async def run(self) -> None:
        """Run the tasks of all links until cancelled; then fail the remaining streams."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                # Wait forever: `_link` and `_follow_move` add tasks to the group.
                await asyncio.get_running_loop().create_future()
        finally:
            for opened in self._open_streams.values():
                opened.stream.fail(ShuttingDown("the gateway is shutting down; retry"))

    @contextlib.asynccontextmanager
    async def open(
        self,
        request: Request,
        assignment: Assignment,
        record: ChoiceRecord,
        journal: Journal,
        coalesced: bool = False,
    ) -> AsyncIterator[TokenStream]:
        """Start `request` at its assigned worker; leaving the block early aborts the request.

        Each worker that runs the request adds a segment to `record`. `journal` has the output of
        earlier workers and receives new tokens. `coalesced`: the worker may send the tokens of
        several iterations in one event.

        Raises:
            QueueFull: if the worker reads its stream too slowly.
            ServiceUnavailable: if the request has an adapter, and the worker loads none.
        """
        if request.adapter is not None and not self._loads_adapters(assignment.address):
            # The worker would ignore the adapter. Only earlier schedulers make such assignments.
            raise ServiceUnavailable(
                f"{assignment.worker_id} was assigned, but loads no adapters; upgrade the"
                " scheduler, then retry",
                retry_after_s=ADAPTER_RETRY_S,
            )
        async with self._link(assignment.address).room():
            if _token_id_count(request) > LARGE_IDS:
                # Encode large requests in separate turns of the event loop, so that others can run.
                await asyncio.sleep(0)
            opened = self._start(request, assignment, record, journal, coalesced)
        stream = opened.stream
        try:
            yield stream
        finally:
            del self._open_streams[request.request_id]
            record.segments[-1].ended_s = monotonic_s()
            if opened.attaching is not None:
                opened.attaching.cancel()
            if not stream.over:
                self._abort(request.request_id, opened.link.address)
            opened.link.streams.pop(request.request_id, None)
            self._close_if_vanished(opened.link)

    def _start(
        self,
        request: Request,
        assignment: Assignment,
        record: ChoiceRecord,
        journal: Journal,
        coalesced: bool,
    ) -> _OpenStream:
        worker_id, group_id, epoch = assignment.worker_id, assignment.group_id, assignment.epoch
        first = len(journal.token_ids)
        record.segments.append(
            WorkerSegment(worker_id, group_id, epoch, monotonic_s(), first_index=first)
        )
        stream = TokenStream(journal, record)
        link = self._link(assignment.address)
        opened = _OpenStream(request.request_id, stream, link, epoch, coalesced)
        self._open_streams[request.request_id] = opened
        frame = translate_worker.start_frame(request, assignment, monotonic_s(), coalesced)
        self._bind(opened, assignment.address, frame)
        failpoint.hit("gateway.started")
        return opened

    def avoided(self) -> tuple[tuple[str, ...], float]:
        """Addresses of workers that are unreachable from here; see `CircuitBreaker.avoided`."""
        return self._breaker.avoided(monotonic_s())

    def notify_workers_change(self) -> None:
        """Notify the client that `known_addresses` may have changed."""
        self._breaker.keep_only(self._known_addresses())
        for link in list(self._links.values()):
            self._close_if_vanished(link)

    def _bind(self, opened: _OpenStream, address: str, frame: worker_pb2.GenerateRequest) -> None:
        """Bind a stream to the link to `address` and send its first frame there.

        Later frames of the previous link are ignored.
        """
        opened.link.streams.pop(opened.request_id, None)
        opened.link = self._link(address)
        opened.link.streams[opened.request_id] = opened.stream
        opened.link.send(frame)

    def _abort(self, request_id: str, address: str) -> None:
        self._link(address).send(translate_worker.abort_frame(request_id))

    def _follow_move(self, link: WorkerLink, request_id: str, moved: Moved) -> None:
        """Attach to the worker that has adopted a request from the worker of `link`."""
        opened = self._open_streams.get(request_id)
        if opened is None or opened.stream.over:
            # The request has ended here while it moved: abort it at the new worker, which would
            # otherwise run it in vain.
            self._abort(request_id, moved.address)
            return
        # While the new worker has not replied, a later move (newer epoch) may come by another link.
        newer = not opened.stream.attached and moved.epoch > opened.epoch
        if opened.link is not link and not newer:
            return
        log.info("request %s moved to %s", request_id, moved.worker_id)
        failpoint.hit("gateway.moved.before_attach")
        self._on_moved()
        _record_move(opened.stream, moved)
        if opened.attaching is not None:
            opened.attaching.cancel()
        opened.epoch = moved.epoch
        opened.stream.move()
        self._attach(opened, moved)
        assert self._tasks is not None
        opened.attaching = self._tasks.create_task(self._keep_attaching(opened, moved))

    async def _keep_attaching(self, opened: _OpenStream, moved: Moved) -> None:
        """Attach again each time the link is lost before the new worker has replied."""
        unreached = 0
        try:
            async with timeout(self._attach_timeout_s):
                while not await opened.stream.wait_reattached():
                    if moved.address not in self._known_addresses():
                        self._fail_move(opened, moved, "is gone")
                        return
                    # Only connections without any reply count against the worker.
                    unreached = 0 if opened.link.has_replied else unreached + 1
                    if unreached == UNREACHED_MAX:
                        self._fail_move(opened, moved, "is unreachable")
                        return
                    await asyncio.sleep(REATTACH_S)
                    self._attach(opened, moved)
        except TimeoutError:
            self._fail_move(opened, moved, "stopped responding")

    def _fail_move(self, opened: _OpenStream, moved: Moved, reason: str) -> None:
        self._abort(opened.request_id, moved.address)
        opened.stream.fail(WorkerLost(f"the worker that adopted this request {reason}; retry"))

    def _attach(self, opened: _OpenStream, moved: Moved) -> None:
        failpoint.hit("gateway.attach.sent")
        request_id, from_index = opened.request_id, opened.stream.next_index
        frame = translate_worker.attach_frame(request_id, moved, from_index, opened.coalesced)
        self._bind(opened, moved.address, frame)

    def _close_if_vanished(self, link: WorkerLink) -> None:
        """Close the link of an unregistered worker: at once if unused, else once it is silent."""
        # A hung process loses its registration long before its connections break. A worker that
        # shuts down, or that only lost etcd, still runs its requests: wait for silence.
        if link.address in self._known_addresses():
            return
        if not link.streams:
            link.close()
        elif link not in self._watched:
            assert self._tasks is not None, "run() owns the links"
            self._watched.add(link)
            self._tasks.create_task(self._watch_vanished(link))

    async def _watch_vanished(self, link: WorkerLink) -> None:
        try:
            while link.usable and link.streams and link.address not in self._known_addresses():
                left_s = link.last_message_s + GONE_SILENT_S - monotonic_s()
                if left_s <= 0:
                    link.close()
                    return
                await asyncio.sleep(left_s)
        finally:
            self._watched.discard(link)

    def _link(self, address: str) -> WorkerLink:
        link = self._links.get(address)
        if link is None or not link.usable:
            assert self._tasks is not None, "run() owns the links"
            link = self._links[address] = WorkerLink(
                address, self._follow_move, self._on_load, self._breaker, self._dial
            )
            # Use a new context: the link outlives the request that opens it and its trace.
            task = self._tasks.create_task(link.run(), name=f"worker {address}", context=Context())
            task.add_done_callback(lambda _: self._forget(link))
        return link

    def _forget(self, link: WorkerLink) -> None:
        if self._links.get(link.address) is link:
            del self._links[link.address]


def _token_id_count(request: Request) -> int:
    ids = request.prompt_ids, request.output_ids, request.sampling.allowed_token_ids
    return sum(map(len, ids))


def _record_move(stream: TokenStream, moved: Moved) -> None:
    now_s, record = monotonic_s(), stream.record
    previous = record.segments[-1]
    previous.ended_s = now_s
    # Link the request's trace to the trace of the group change that caused the move.
    change = parse_traceparent(moved.traceparent)
    link = (
        SpanLink(change, {genai.GROUP: moved.group_id, genai.EPOCH: moved.epoch})
        if change
        else None
    )
    record.moves.append(RequestMove(now_s, previous.worker_id, moved, link))
    segment = WorkerSegment(moved.worker_id, moved.group_id, moved.epoch, now_s)
    segment.first_index, segment.moved = stream.next_index, True
    record.segments.append(segment)
