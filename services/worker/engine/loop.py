"""The engine's main loop: handle received frames, run one microbatch, publish the results.

The loop owns the ZeroMQ socket to the servicer process (the worker's gRPC server). `Member` does
the planning, the group changes and the pipeline.

Terms: a group is a set of workers that run the layers of one model as a pipeline; a member is the
engine of a worker in a group. A microbatch is a planned batch, and an iteration is its run here.
"""

import logging
import select
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from services.common.clock import monotonic_s
from services.core.cost.refinement import differ
from services.core.histogram import PREEMPTION_S, HistogramMeter
from services.core.planner.batch import Microbatch
from services.core.planner.events import (
    DrainContinued,
    RequestAborted,
    RequestArrived,
    RequeueChecked,
)
from services.core.planner.infeasible_targets import InfeasibleTargets
from services.core.planner.preemption import OnlineRequest, Preempt
from services.core.planner.sequence_ids import request_id_of
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
    CostsLearned,
    FromEngine,
    GroupCommand,
    Introduce,
    Prepare,
    Progress,
    ReturnRequests,
    ShipRequests,
    StartRequest,
    ToEngine,
    encode,
    to_engine_decoder,
)

IDLE_REPORT_MS = 500
BUSY_WAIT_MS = 1
TRANSFER_WAIT_MS = 20
SEND_TIMEOUT_MS = 10_000
SLICES_MAX = 3
"""Slices of a drop's memory to map or unmap during an iteration on a GPU; each takes up to 0.7 ms,
and an iteration a few milliseconds."""
COSTS_CHANGE_MIN = 0.2
"""Relative change of a predicted time that dispatch must know of."""

log = logging.getLogger(__name__)


def connect(address: str) -> zmq.Socket[bytes]:
    """Connect to the servicer's socket; a send fails after `SEND_TIMEOUT_MS`."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
    socket.setsockopt(zmq.LINGER, SEND_TIMEOUT_MS)
    socket.connect(address)
    return socket


def send(socket: zmq.Socket[bytes], frame: FromEngine) -> None:
    """Send a frame. Raises zmq.Again if the queue stays full for `SEND_TIMEOUT_MS`."""
    socket.send(encode(frame))


class EngineLoop:
    """Passes frames between the servicer's socket and the group member of this engine."""

    def __init__(
        self,
        member: Member,
        socket: zmq.Socket[bytes],
        grammars: GrammarCheck,
        descriptors: Sequence[int] = (),
        profiler: IdleProfiler | None = None,
        *,
        overlaps: bool = False,
    ) -> None:
        """`descriptors` become readable when frames from other members arrive.

        `profiler` measures batches while the engine is idle. `overlaps`: publish the results of an
        iteration while a GPU runs the next one.
        """
        self._member = member
        self._socket = socket
        self._grammars = grammars
        self._profiler = profiler
        self._overlaps = overlaps
        self._infeasible = InfeasibleTargets()  # latency targets that no request can meet
        self._published_costs = member.state.config.cost_model
        # Frames of the servicer that were read and not handled yet.
        self._inbox: deque[ToEngine] = deque()
        # Ids of requests to acknowledge in the next report.
        self._received: list[str] = []
        # Whether requests may interrupt the next iteration; False after they interrupted one.
        self._may_interrupt = True
        # Times from the arrival of an online request until batch work yielded.
        self._preemption_s = HistogramMeter(PREEMPTION_S)
        # Time of the last report.
        self._published_s = 0.0
        # Prefix-cache evictions reported so far.
        self._evictions_reported = 0
        # The last reported (epoch, changing, trouble, isolated): a change is reported at once.
        self._published_status = (0, False, "", False)
        # An idle wait polls every source of work; an iteration polls fewer (`_interrupts`).
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        for descriptor in (*descriptors, grammars.fileno()):
            self._poller.register(descriptor, zmq.POLLIN)
        self._member_sources = select.epoll()
        self._all_sources = select.epoll()  # members and the servicer
        self._all_sources.register(socket.fileno(), select.EPOLLIN)
        for descriptor in descriptors:
            self._member_sources.register(descriptor, select.EPOLLIN)
            self._all_sources.register(descriptor, select.EPOLLIN)

    def run(self) -> None:
        """Serve until the process terminates."""
        while True:
            self.step(IDLE_REPORT_MS)

    def step(self, wait_ms: int) -> None:
        """Handle frames and run at most one microbatch; without work, wait up to `wait_ms`."""
        self._drain_inbox()
        self._start_checked()
        received = self._member.take()
        self._requeue_overdue()
        published = ran = False
        if self._overlaps and self._member.state.stages == 1:
            # The results of the last iteration wait for the launch of the next (`_while_running`).
            ran = self._member.launch(self._interrupts, self._while_running)
        else:
            # Publish the results received from other members before running a microbatch, or the
            # tokens of a pipeline would be late by the duration of this stage.
            published = self._publish()
            ran = self._member.launch(self._interrupts)
        if not (ran and self._overlaps):
            published = self._publish() or published
        if not (received or published or ran) and not self._profile_when_idle():
            with self._member.links.lane.attended():
                self._poller.poll(self._wait_ms(wait_ms))

    def _while_running(self) -> None:
        """Publish earlier results and read frames; what they ask for waits for the iteration."""
        self._publish()
        self._fill_inbox()
        slices = 0
        while slices < SLICES_MAX and self._member.continue_drop():
            slices += 1

    def _wait_ms(self, idle_ms: int) -> int:
        """The longest wait for a frame; work of a group change needs turns without frames."""
        if not self._member.busy_changing:
            idle_ms = self._member.host_wait_ms(idle_ms)
            return TRANSFER_WAIT_MS if self._member.shipping else idle_ms
        return TRANSFER_WAIT_MS if self._member.awaits_transfers else BUSY_WAIT_MS

    def _interrupts(self, microbatch: Microbatch) -> Callable[[], bool] | None:
        """Return a predicate that is called before layers: True interrupts the iteration.

        An abort of a request in the microbatch interrupts it. A preemptible microbatch also yields
        to online requests, to group commands of the memory manager and, during a group change, to
        any frame of another member. Returns None if nothing may interrupt the iteration.
        """
        if self._profiler is not None:
            self._profiler.note_work()
        if self._overlaps and microbatch.batch.tokens > len(microbatch.batch.chunks):
            self._publish()  # the launch of a prefill takes nearly as long as its run
        # Arrivals and aborts may interrupt at most every other iteration; otherwise a burst would
        # starve running requests.
        may_interrupt, self._may_interrupt = self._may_interrupt, True
        preemptible = microbatch.preemptible
        if not may_interrupt and not preemptible:
            return None
        seq_ids = (chunk.seq_id for chunk in microbatch.batch.chunks)
        request_ids = frozenset(map(request_id_of, seq_ids))
        changing = preemptible and self._member.busy_changing
        started_s = monotonic_s()

        def interrupted() -> bool:
            self._fill_inbox()
            # Group changes may interrupt every iteration: the whole group waits for this member.
            if preemptible and self._has_group_command():
                return True
            if changing and self._member_sources.poll(0):
                return True
            # Stop for an abort, so that its blocks are freed within the time of a layer.
            interrupts = may_interrupt and (
                self._aborts_any(request_ids)
                or (preemptible and self._preempts(microbatch, started_s))
            )
            self._may_interrupt = not interrupts
            return interrupts

        def time_dependent() -> bool:
            # A deadline in the inbox comes closer without a new frame, so the predicate must be
            # called even if no descriptor is readable.
            return may_interrupt and preemptible and self._has_waiting_deadline

        watched = self._all_sources if changing else self._socket
        return WatchedInterrupt(interrupted, watched.fileno(), time_dependent)

    def _has_group_command(self) -> bool:
        """Whether the inbox holds a command that prepares or applies a group configuration."""
        return any(isinstance(frame, ApplyConfiguration | Prepare) for frame in self._inbox)

    @property
    def _has_waiting_deadline(self) -> bool:
        """Whether the policy preempts by deadline and a request in the inbox has a TTFT target."""
        return self._member.state.config.preemption is Preempt.DEADLINE and any(
            isinstance(frame, StartRequest) and frame.request.service.ttft_s is not None
            for frame in self._inbox
        )

    def _preempts(self, microbatch: Microbatch, started_s: float) -> bool:
        """Whether an online request in the inbox preempts the running microbatch."""
        now_s = monotonic_s()
        online = [
            frame.request
            for frame in self._inbox
            if isinstance(frame, StartRequest) and frame.request.service.online
        ]
        waiting = [OnlineRequest.of(request, now_s) for request in online]
        state = self._member.state
        preempts = state.should_preempt(microbatch.batch, now_s - started_s, waiting)
        if preempts:
            self._preemption_s.add(now_s - min(request.arrival_s for request in online))
        return preempts

    def _aborts_any(self, request_ids: frozenset[str]) -> bool:
        """Whether the inbox holds an abort for any of `request_ids`."""
        return any(
            isinstance(frame, AbortRequest) and frame.request_id in request_ids
            for frame in self._inbox
        )

    def _profile_when_idle(self) -> bool:
        """Measure a batch for the profile if this worker is idle; returns whether it did."""
        # The profiler overwrites KV blocks, so no sequence may own any. It measures all layers, so
        # this worker must have all of them.
        if self._profiler is None or self._member.state.sequences or not self._member.alone:
            return False
        return self._profiler.step(lambda: bool(self._poller.poll(0)))

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
                    # The planner does not know a request whose grammar is being compiled, so
                    # acknowledge the request here; `_start` acknowledges all others.
                    if self._grammars.abort(request_id):
                        self._received.append(request_id)
                    else:
                        self._member.handle(RequestAborted(monotonic_s(), request_id))
                case ReturnRequests(room=room):
                    self._member.handle(DrainContinued(monotonic_s(), room))
                case _:
                    self._take_group_command(frame)

    def _take_group_command(self, command: GroupCommand) -> None:
        match command:
            case ApplyConfiguration():
                self._member.apply(command)
            case Prepare():
                self._member.prepare(command)
            case AbortAttempt(attempt=attempt):
                self._member.abort(attempt)
            case ShipRequests():
                self._member.ship(command)
            case Introduce(peers=peers, timeout_s=timeout_s):
                self._member.introduce(peers, timeout_s)

    def _start_checked(self) -> None:
        """Start or refuse the requests whose grammar check has ended."""
        for checked in self._grammars.take():
            if checked.refusal is None:
                self._start(checked.request)
            else:
                self._received.append(checked.request.request_id)
                self._member.refuse(checked.refusal)

    def _start(self, request: Request) -> None:
        self._received.append(request.request_id)
        cost_model = self._member.state.config.cost_model
        for target in self._infeasible.unreported(request.service, cost_model):
            log.warning("%s", target)
        self._member.handle(RequestArrived(monotonic_s(), request))

    def _requeue_overdue(self) -> None:
        """Let the planner requeue: requests that have waited too long go back to the scheduler."""
        due_s, now_s = self._member.changeover.requeue_due_s, monotonic_s()
        if due_s is not None and due_s <= now_s:
            self._member.handle(RequeueChecked(now_s))

    def _fill_inbox(self) -> None:
        while len(self._inbox) < FRAMES_MAX and self._socket.poll(0):
            self._inbox.append(to_engine_decoder.decode(self._socket.recv()))

    def _publish(self) -> bool:
        """Send the results since the last call and a report to the servicer.

        Without results, a report is sent only if the last one is old. Returns whether there were
        results or the status has changed.
        """
        outbox, now_s = self._member.take_outbox(), monotonic_s()
        silent_s = now_s - self._published_s
        configuration = self._member.configuration
        epoch = configuration.epoch if configuration else 0
        member = self._member
        status = (epoch, not member.settled, member.trouble, member.changeover.isolated)
        is_due = bool(outbox or self._received or status != self._published_status)
        # Half the interval, so that every idle wait of `IDLE_REPORT_MS` ends in a report.
        if not is_due and 1e3 * silent_s < IDLE_REPORT_MS / 2:
            return False
        self._published_status = status
        self._published_s = now_s

        answers: list[FromEngine] = [*outbox.prepared, *outbox.shipped]
        for answer in answers:
            send(self._socket, answer)
        self._publish_costs()
        received, self._received = self._received, []
        evictions = self._member.state.pool.cache.evictions
        evicted_prefixes = evictions.since(self._evictions_reported)
        self._evictions_reported = evictions.total
        send(
            self._socket,
            Progress(
                received,
                outbox.tokens,
                outbox.refusals,
                self._report(status),
                outbox.adopted,
                outbox.moved,
                outbox.times,
                evicted_prefixes,
            ),
        )
        return is_due

    def _report(self, status: tuple[int, bool, str, bool]) -> EngineReport:
        member = self._member
        return EngineReport(
            member.state.load(),
            *status[:2],
            member.stage.runner.parameter_bytes,
            member.pipeline_time,
            member.iteration_time,
            member.iteration_tokens,
            *status[2:],
            member.slowest_iteration_s,
            member.restored_slabs,
            member.cost_origin,
            member.state.deadline_use,
            self._preemption_s.histogram,
            member.shipments,
            member.host_report,
        )

    def _publish_costs(self) -> None:
        """Send the cost model if it predicts other times than the one that was sent last."""
        model, published = self._member.state.config.cost_model, self._published_costs
        if model is published or model is None:
            return
        if published is None or differ(published, model, COSTS_CHANGE_MIN):
            self._published_costs = model
            send(self._socket, CostsLearned(model))
