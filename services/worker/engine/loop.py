"""The engine's loop: drain the inbox, let the member take its turn, publish the results.

Results from other members are published before the next microbatch runs. Otherwise a pipeline's
tokens would wait for the time of a stage.
"""

import logging
import select
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from services.common.clock import monotonic_s
from services.core.planner.batch import Microbatch
from services.core.planner.events import RequestAborted, RequestArrived, WaitLooked
from services.core.planner.impossible import ImpossibleTargets
from services.core.planner.preemption import OnlineRequest, Preempt
from services.core.planner.sequence_names import request_of
from services.core.report import EngineReport
from services.core.request import Request
from services.worker.engine.grammar_check import GrammarCheck
from services.worker.engine.model.interrupt import WatchedInterrupt
from services.worker.engine.pipeline.member import Member
from services.worker.engine.profile.idle import IdleProfiler
from services.worker.ipc import (
    FRAMES_MAX,
    AbortAttempt,
    AbortRequest,
    ApplyConfiguration,
    FromEngine,
    Prepare,
    Progress,
    StartRequest,
    ToEngine,
    encode,
    to_engine_decoder,
)

IDLE_HEARTBEAT_MS = 500
BUSY_WAIT_MS = 1
SEND_TIMEOUT_MS = 10_000

log = logging.getLogger(__name__)


def connect(address: str) -> zmq.Socket[bytes]:
    """The engine's end of the socket to its servicer; sending gives up after a deadline."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
    socket.setsockopt(zmq.LINGER, SEND_TIMEOUT_MS)
    socket.connect(address)
    return socket


def send(socket: zmq.Socket[bytes], frame: FromEngine) -> None:
    """Send a frame; raises zmq.Again when the servicer takes nothing for `SEND_TIMEOUT_MS`."""
    socket.send(encode(frame))


class EngineLoop:
    """Joins the servicer's socket with the engine's part in its group."""

    def __init__(
        self,
        member: Member,
        socket: zmq.Socket[bytes],
        grammars: GrammarCheck,
        descriptors: Sequence[int] = (),
        profiler: IdleProfiler | None = None,
        impossible: ImpossibleTargets | None = None,
    ) -> None:
        """`descriptors` are readable when something comes from other members.

        `impossible` finds targets that are logged, since no request can keep them.
        """
        self._member = member
        self._socket = socket
        self._grammars = grammars
        self._profiler = profiler
        self._impossible = impossible or ImpossibleTargets()
        self._inbox: deque[ToEngine] = deque()
        self._received: list[str] = []
        self._may_interrupt = True
        self._published_s = 0.0
        self._dropped_total = 0
        self._standing = (0, False, "", False)
        self._waiting = zmq.Poller()
        self._waiting.register(socket, zmq.POLLIN)
        for descriptor in (*descriptors, grammars.fileno()):
            self._waiting.register(descriptor, zmq.POLLIN)
        self._members = select.epoll()
        self._anybody = select.epoll()  # also the servicer
        self._anybody.register(socket.fileno(), select.EPOLLIN)
        for descriptor in descriptors:
            self._members.register(descriptor, select.EPOLLIN)
            self._anybody.register(descriptor, select.EPOLLIN)

    def run(self) -> None:
        """Serve until the process is ended."""
        while True:
            self.step(IDLE_HEARTBEAT_MS)

    def step(self, wait_ms: int) -> None:
        """One turn: take frames, run a microbatch; wait up to `wait_ms` if there was nothing."""
        self._drain_inbox()
        self._take_checked()
        took = self._member.take()
        self._return_waiting()
        told = self._publish()
        ran = self._member.launch(self._interrupts)
        told = self._publish() or told
        if not (took or told or ran) and not self._profiled_a_batch():
            with self._member.links.lane.attended():
                self._waiting.poll(BUSY_WAIT_MS if self._member.busy_changing else wait_ms)

    def _interrupts(self, microbatch: Microbatch) -> Callable[[], bool] | None:
        """Interrupt an iteration when one of its requests is aborted meanwhile.

        So blocks are free within a layer's time, however long the iteration. Requests interrupt
        never two in a row, or a storm of them would stop all others. A preemptible one is also
        interrupted for an online request, for each order of the memory manager, and, while groups
        change, for all that comes from other members.
        """
        if self._profiler is not None:
            self._profiler.note_work()
        for_requests, self._may_interrupt = self._may_interrupt, True
        preemptible = microbatch.preemptible
        if not for_requests and not preemptible:
            return None
        names = (chunk.request_id for chunk in microbatch.batch.chunks)
        request_ids = frozenset(map(request_of, names))
        changing = preemptible and self._member.busy_changing
        started_s = monotonic_s()

        def interrupted() -> bool:
            self._fill_inbox()
            if preemptible and self._changes_groups():
                return True
            if changing and self._members.poll(0):
                return True
            found = for_requests and (
                self._aborts_one_of(request_ids)
                or (preemptible and self._preempts(microbatch, started_s))
            )
            self._may_interrupt = not found
            return found

        def asks_again() -> bool:
            return for_requests and preemptible and self._keeps_deadlines

        watched = self._anybody if changing else self._socket
        return WatchedInterrupt(interrupted, watched.fileno(), asks_again)

    def _changes_groups(self) -> bool:
        """Whether the inbox holds an order of the memory manager."""
        return any(isinstance(frame, ApplyConfiguration | Prepare) for frame in self._inbox)

    @property
    def _keeps_deadlines(self) -> bool:
        """Whether the inbox holds an online request whose deadline an iteration must keep."""
        return self._member.state.config.preempt is Preempt.DEADLINE and any(
            isinstance(frame, StartRequest) and frame.request.service.ttft_s is not None
            for frame in self._inbox
        )

    def _preempts(self, microbatch: Microbatch, started_s: float) -> bool:
        """Whether the inbox holds online requests for which a preemptible iteration ends."""
        now_s = monotonic_s()
        online = (
            OnlineRequest.of(frame.request, now_s)
            for frame in self._inbox
            if isinstance(frame, StartRequest) and frame.request.service.online
        )
        return self._member.state.gives_way(microbatch.batch, now_s - started_s, online)

    def _aborts_one_of(self, request_ids: frozenset[str]) -> bool:
        """Whether the inbox holds an abort of one of them."""
        return any(
            isinstance(frame, AbortRequest) and frame.request_id in request_ids
            for frame in self._inbox
        )

    def _profiled_a_batch(self) -> bool:
        """Use a quiet moment of a group of one; only while no sequence owns a block."""
        if self._profiler is None or self._member.state.sequences or not self._member.alone:
            return False
        return self._profiler.step(lambda: bool(self._waiting.poll(0)))

    def _drain_inbox(self) -> None:
        self._fill_inbox()
        while self._inbox:
            frame = self._inbox.popleft()
            match frame:
                case StartRequest(request=request):
                    if request.sampling.grammar is not None:
                        self._grammars.submit(request)
                    else:
                        self._start(request)
                case AbortRequest(request_id=request_id):
                    if self._grammars.abort(request_id):
                        self._received.append(request_id)  # each start is told once
                    else:
                        self._member.handle(RequestAborted(monotonic_s(), request_id))
                case ApplyConfiguration():
                    self._member.apply(frame)
                case Prepare():
                    self._member.prepare(frame)
                case AbortAttempt(attempt=attempt):
                    self._member.abort(attempt)

    def _take_checked(self) -> None:
        """Requests whose grammars are compiled now, or will never be."""
        for checked in self._grammars.take():
            if checked.refusal is None:
                self._start(checked.request)
            else:
                self._received.append(checked.request.request_id)
                self._member.refuse(checked.refusal)

    def _start(self, request: Request) -> None:
        self._received.append(request.request_id)
        for target in self._impossible.news(request.service):
            log.warning("%s", target)
        self._member.handle(RequestArrived(monotonic_s(), request))

    def _return_waiting(self) -> None:
        """Give back the requests that have waited too long and cannot start now."""
        due_s, now_s = self._member.changeover.return_due_s, monotonic_s()
        if due_s is not None and due_s <= now_s:
            self._member.handle(WaitLooked(now_s))

    def _fill_inbox(self) -> None:
        while len(self._inbox) < FRAMES_MAX and self._socket.poll(0):
            self._inbox.append(to_engine_decoder.decode(self._socket.recv()))

    def _publish(self) -> bool:
        """Send the servicer the results; without any, only a heartbeat now and then.

        Returns whether there were any.
        """
        news, now_s = self._member.take_news(), monotonic_s()
        silent_s = now_s - self._published_s
        configuration = self._member.configuration
        epoch = configuration.epoch if configuration else 0
        member = self._member
        standing = (epoch, not member.settled, member.trouble, member.changeover.left)
        happened = bool(news or self._received or standing != self._standing)
        if not happened and 1e3 * silent_s < IDLE_HEARTBEAT_MS / 2:
            return False
        self._standing = standing
        self._published_s = now_s
        for answer in news.prepared:
            send(self._socket, answer)
        received, self._received = self._received, []
        dropped = self._member.state.pool.cache.dropped
        dropped_prefixes = dropped.since(self._dropped_total)
        self._dropped_total = dropped.total
        report = EngineReport(
            member.state.load(),
            *standing[:2],
            member.stage.runner.parameter_bytes,
            member.pipeline_time,
            member.iteration_time,
            member.iteration_tokens,
            *standing[2:],
            member.slowest_iteration_s,
        )
        send(
            self._socket,
            Progress(
                received,
                news.tokens,
                news.refusals,
                report,
                news.adopted,
                news.moved,
                news.times,
                dropped_prefixes,
            ),
        )
        return happened
