"""A simulated worker: a planner of `services.core` whose iterations take modelled time."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, Protocol

from services.core.changeover.state import Changeover
from services.core.host.vocabulary import (
    CancelHostJob,
    HostCommand,
    HostEvent,
    HostGrown,
    HostLooked,
)
from services.core.planner.batch import IterationShape, Microbatch
from services.core.planner.config import IterationConfig
from services.core.planner.events import (
    EmitToken,
    IterationDropped,
    IterationSuspended,
    RefuseRequest,
    RequestArrived,
    RequeueChecked,
)
from services.core.planner.fast_forward import (
    advance_decodes,
    decodes_ahead,
    finish_filled,
    plan_shape,
)
from services.core.planner.host_tier import LOOK_S
from services.core.planner.preemption import OnlineRequest, Preempt, PreemptedWork
from services.core.planner.state import PlannerState
from services.core.report import LoadReport
from services.core.request import Request
from tideserve.sim.delays import Delays
from tideserve.sim.engine import Action, Simulation
from tideserve.sim.host_copies import HostCopyQueue
from tideserve.sim.pipeline import shape_of
from tideserve.sim.reporter import LoadSender
from tideserve.sim.time_model import TimeModel
from tideserve.sim.token_times import TokenTimes

PLACEHOLDER_TOKEN = -1
"""Token that is sampled each time; never a stop token."""
SAFEPOINTS = 32
"""Safepoints of an iteration: one after each layer of a 7B model."""
FAST_FORWARD_MIN = 2
"""Fewest decode iterations that are simulated as one event."""


class Listener(Protocol):
    """Receives the output of an instance, at the time when it leaves the worker."""

    def note_token(self, token: EmitToken) -> None:
        """Take the first or last token of a request."""
        ...

    def note_refused(self, refusal: RefuseRequest) -> None:
        """Take the refusal or return of a request."""
        ...

    def note_shipped(self, refusal: RefuseRequest, output_tokens: int) -> None:
        """Take the return of a request that continues elsewhere after `output_tokens`."""
        ...

    def note_report(self, report: LoadReport) -> None:
        """Take a load report."""
        ...

    def note_ends(self, report: LoadReport) -> None:
        """Take the load report that accompanies the end of requests."""
        ...


class Busy(NamedTuple):
    """Work that keeps the device busy for `seconds`; `action(*arguments)` follows."""

    seconds: float
    action: Action
    arguments: tuple[Any, ...]


Handler = Callable[..., Busy | None]


class GroupMember(Protocol):
    """An instance as a member of its group; see `member.py`."""

    changeover: Changeover

    def apply(self, event: RequestArrived | RequeueChecked | HostEvent) -> Busy | None:
        """Apply an event to the change-over's state machine."""
        ...

    def take_turn(self) -> Busy | None:
        """Continue a change-over that is in progress."""
        ...

    def run_first(self, microbatch: Microbatch) -> Busy:
        """Run the leader's stage of a microbatch."""
        ...


class Instance:
    """Drives its planner as the engine's loop does: drain the inbox, plan, run, publish.

    While only decodes run, many iterations are fast-forwarded as one event; an arrival cuts the
    event short at the end of the iteration in which it falls. Reports during a fast-forward are
    left out: only the number of free blocks changes, and no event exceeds a heartbeat.

    Iterations are not fast-forwarded with `token_times`, which records every token, if batch
    iterations may be preempted between layers, with host copies of KV, or while requests move away
    from here or to here.

    As a `member` of a group, an instance passes every request to the change-over's state machine,
    which also runs between iterations. In a pipeline, the leader's instance plans; the others run
    the microbatches that are posted to them.
    """

    def __init__(
        self,
        name: str,
        config: IterationConfig,
        simulation: Simulation,
        time_model: TimeModel,
        delays: Delays,
        listener: Listener,
        fast_forward: bool = True,
        token_times: TokenTimes | None = None,
        host_slots: int = 0,
    ) -> None:
        """`host_slots`: KV blocks in host memory, for a `config` with `host`."""
        self.name = name
        self.state = PlannerState(config)
        self.reporter = LoadSender(
            name, simulation, delays, listener.note_report, self.state.load()
        )
        self.iterations = 0
        self.iterations_fast_forwarded = 0
        self.member: GroupMember | None = None
        self._simulation = simulation
        self._time_model = time_model
        self._longest_run_s = delays.heartbeat_s
        self._listener = listener
        self._fast_forward = fast_forward and token_times is None
        self._token_times = token_times
        self._execution = config.execution
        self._inbox: list[Request] = []  # received since the last iteration
        self._posted: deque[tuple[Handler, tuple[Any, ...]]] = deque()  # see `post`
        self._drained: list[str] = []  # requests that no published load counts yet
        self._dropped_total = 0  # dropped prefixes that were published
        self._idle = True
        self._decode_run: _DecodeRun | None = None  # the fast-forward in progress
        self._preemptible: _PreemptibleIteration | None = None  # in progress, at a single worker
        self._left_s = 0.0  # remaining time of the suspended iteration
        self._host: HostCopyQueue | None = None  # copies of KV in host memory
        if self.state.host is not None:
            self._host = HostCopyQueue(simulation, self.state.host, self._wake_idle)
            self.state.handle(HostGrown(simulation.now_s, host_slots))

    @property
    def launches(self) -> bool:
        """Whether this worker plans iterations: alone in its group, or as the group's leader."""
        return self.member is None or self.member.changeover.may_plan

    @property
    def _holds_batch_work(self) -> bool:
        """Whether a change of the group holds back batch work while no online work can run."""
        now_s, member = self._simulation.now_s, self.member
        return member is not None and member.changeover.holds_batch_work(now_s)

    def receive(self, request: Request) -> None:
        """Put a request into the inbox; the planner takes it before the next iteration."""
        self._inbox.append(request)
        if self._preemptible is not None and request.service.online:
            self._schedule_safepoint(self._preemptible)
        self.wake()

    def post(self, handler: Handler, *arguments: Any) -> None:
        """Queue a call of `handler` between iterations; the handler may keep the device busy."""
        self._posted.append((handler, arguments))
        if self._preemptible is not None:
            self._schedule_safepoint(self._preemptible)
        self.wake()

    def post_first(self, handler: Handler, *arguments: Any) -> None:
        """Like `post`, but ahead of all queued calls."""
        self._posted.appendleft((handler, arguments))

    def wake(self) -> None:
        """Process inbox and queued calls now, or at the end of the iteration in progress."""
        if self._idle:
            self._begin()
        elif self._decode_run is not None:
            self._cut_short(self._decode_run)

    # --- iterations

    def _begin(self) -> None:
        self._idle = False
        self._drain()
        self._return_waiting()
        if self._host is not None:
            self._copy_blocks(self._host)
        busy = self._take_turn()
        # A call that keeps the device busy postpones the calls after it.
        while self._posted and busy is None:
            handler, arguments = self._posted.popleft()
            busy = handler(*arguments)
            if busy is None and not self._posted:
                busy = self._take_turn()
        if busy is not None:
            self._simulation.after(busy.seconds, self._end_busy, busy)
            return
        if not self.launches or self._holds_batch_work:
            self._become_idle()
        elif self.state.stages > 1:
            self._launch()
        elif (
            self.state.sequence_table.batch  # only batch-only iterations are preemptible
            and self.state.config.preemption is not Preempt.OFF
        ):
            self._begin_preemptible()
        elif self._skips and (ahead := decodes_ahead(self.state)) >= FAST_FORWARD_MIN:
            self._begin_run(ahead)
        elif (shape := self._plan_alone()) is None:
            self._become_idle()
        else:
            self._simulation.after(self._time_model.iteration_s(shape), self._finish)

    @property
    def _skips(self) -> bool:
        """Whether iterations may be fast-forwarded now."""
        member = self.member
        if not self._fast_forward or self._host is not None:
            return False
        return not (member and member.changeover.shipping.active)

    def _become_idle(self) -> None:
        self._idle = True
        if self._drained:
            self.publish()
        if self._host is not None and self.state.waiting and self._host_due_s < inf:
            due_s = max(self._host_due_s, self._simulation.now_s + LOOK_S)
            self._simulation.at(due_s, self._wake_idle)

    def _wake_idle(self) -> None:
        if self._idle:
            self._begin()

    # --- host copies

    @property
    def _host_due_s(self) -> float:
        if self.member is not None:
            return self.member.changeover.host_due_s
        return inf if self.state.host is None else self.state.host.due_s

    def _copy_blocks(self, host: HostCopyQueue) -> None:
        """Apply the ends of copies, and begin those that are due."""
        for event in host.take_ended():
            self._apply_host(event)
        now_s = self._simulation.now_s
        if self._host_due_s <= now_s:
            self._apply_host(HostLooked(now_s, max(now_s, host.free_s)))

    def _apply_host(self, event: HostEvent) -> None:
        if self.member is not None:
            busy = self.member.apply(event)
            assert busy is None, "copies must not occupy the device"
            return
        for command in self.state.handle(event):
            assert isinstance(command, HostCommand)
            self.copy(command)

    def copy(self, command: HostCommand) -> None:
        """Begin a copy; a cancelled one takes its time, and has no effect."""
        assert self._host is not None
        if not isinstance(command, CancelHostJob):
            self._host.begin(command)

    def _drain(self) -> None:
        now_s = self._simulation.now_s
        for request in self._inbox:
            self._drained.append(request.request_id)
            self._apply(RequestArrived(now_s, request))
        self._inbox.clear()

    def _return_waiting(self) -> None:
        """Return requests that have waited too long; before planning, as the engine does."""
        now_s, member = self._simulation.now_s, self.member
        due_s = (self.state if member is None else member.changeover).requeue_due_s
        if due_s is None or now_s < due_s:
            return
        self._apply(RequeueChecked(now_s))

    def _apply(self, event: RequestArrived | RequeueChecked) -> None:
        if self.member is not None:
            busy = self.member.apply(event)
            assert busy is None, "the arrival of a request must not occupy the device"
            return
        for command in self.state.handle(event):
            assert isinstance(command, RefuseRequest)
            self.emit(command)

    def emit(self, command: EmitToken | RefuseRequest) -> None:
        """Pass a planner's command on to the listener."""
        if isinstance(command, RefuseRequest):
            self._listener.note_refused(command)
        else:
            self._listener.note_token(command)

    def pass_on(self, command: RefuseRequest, output_tokens: int) -> None:
        """Pass the return of a request on to the listener, which starts it elsewhere."""
        self._listener.note_shipped(command, output_tokens)

    def _take_turn(self) -> Busy | None:
        return self.member.take_turn() if self.member is not None else None

    def _plan_alone(self) -> IterationShape | None:
        """Plan an iteration of a single-worker group."""
        # While KV is exchanged with other groups, planning goes through the change-over.
        now_s = self._simulation.now_s
        if self.member is None or not self.member.changeover.busy:
            return plan_shape(self.state, now_s)
        microbatch = self.member.changeover.plan(now_s)
        return None if microbatch is None else shape_of(microbatch, self._execution)

    def _end_busy(self, busy: Busy) -> None:
        busy.action(*busy.arguments)
        # A member that does not plan reports its load with heartbeats only.
        if self.launches:
            self.publish()
        else:
            self.reporter.load = self.state.load()
        self._begin()

    def _finish(self) -> None:
        self.iterations += 1
        self.finish()
        self._begin()

    def finish(self, number: int | None = None) -> None:
        """Apply the results of a microbatch; None is the only microbatch of a single worker."""
        now_s, in_flight = self._simulation.now_s, self.state.in_flight
        if self._token_times is not None and in_flight and number in (None, in_flight[0].number):
            self._token_times.note(in_flight[0], now_s)
        tokens = finish_filled(self.state, PLACEHOLDER_TOKEN, now_s, number)
        for token in tokens:
            self._listener.note_token(token)
        self.publish()
        if any(token.finish_reason is not None for token in tokens):
            self._listener.note_ends(self.reporter.snapshot())

    # --- preemptible iterations

    def _begin_preemptible(self) -> None:
        """Plan an iteration that may be preempted at a safepoint, or resume a preempted one."""
        now_s, member = self._simulation.now_s, self.member
        planner = self.state if member is None else member.changeover
        microbatch = planner.plan(now_s)
        if microbatch is None:
            self._become_idle()
            return
        whole_s = self._time_model.iteration_s(shape_of(microbatch, self._execution))
        seconds = whole_s if microbatch.resumes is None else self._left_s
        iteration = _PreemptibleIteration(microbatch, now_s, seconds, whole_s / SAFEPOINTS)
        self._preemptible = iteration
        self._simulation.after(seconds, self._finish_preemptible, iteration)

    def _finish_preemptible(self, iteration: "_PreemptibleIteration") -> None:
        if self._preemptible is iteration:
            self._preemptible = None
            self._finish()

    def _schedule_safepoint(self, iteration: "_PreemptibleIteration") -> None:
        """Schedule a check at the next safepoint whether to preempt the iteration."""
        if not iteration.microbatch.preemptible:
            return
        passed = int((self._simulation.now_s - iteration.start_s) / iteration.interval_s)
        time_s = iteration.start_s + (passed + 1) * iteration.interval_s
        if time_s <= self._simulation.now_s:  # rounding: this safepoint has been checked already
            time_s += iteration.interval_s
        if time_s < iteration.start_s + iteration.seconds:
            self._simulation.at(time_s, self._check_safepoint, iteration)

    def _check_safepoint(self, iteration: "_PreemptibleIteration") -> None:
        """Decide at a safepoint whether new online requests or queued calls preempt batch work."""
        if self._preemptible is not iteration:
            return
        config, now_s = self.state.config, self._simulation.now_s
        elapsed_s = now_s - iteration.start_s
        online = [
            OnlineRequest.of(request, now_s) for request in self._inbox if request.service.online
        ]
        batch = iteration.microbatch.batch
        if not (self._posted or self.state.should_preempt(batch, elapsed_s, online)):
            self._schedule_safepoint(iteration)
            return
        self._preemptible = None
        self._left_s = iteration.seconds - elapsed_s
        resumed = config.preempted_work is PreemptedWork.RESUME
        self.state.handle(IterationSuspended(now_s) if resumed else IterationDropped(now_s))
        self._begin()

    # --- pipelines

    def _launch(self) -> None:
        """Plan a microbatch and run the leader's stage of it."""
        assert self.member is not None
        microbatch = self.member.changeover.plan(self._simulation.now_s)
        if microbatch is None:
            self._become_idle()
            return
        self.iterations += 1
        busy = self.member.run_first(microbatch)
        self._simulation.after(busy.seconds, self._end_busy, busy)

    # --- fast-forward of decode iterations

    def _begin_run(self, ahead: int) -> None:
        running = self.state.running
        prefixes = [sequence.computed for sequence in running]
        prefix_tokens = sum(self._execution.prefixes(prefixes))
        run = _DecodeRun(self._simulation.now_s, len(running), prefix_tokens, ahead)
        # Never skip a heartbeat.
        if self._run_s(run, ahead) > self._longest_run_s:
            run.count = max(1, self._iterations_within(run, self._longest_run_s))
        due_s = self.state.requeue_due_s
        if due_s is not None:
            # Stop at the first iteration after which a waiting request must be returned.
            before = self._iterations_within(run, max(0.0, due_s - run.start_s))
            run.count = min(run.count, before + 1)
        self._decode_run = run
        self._simulation.at(run.start_s + self._run_s(run, run.count), self._finish_run, run)

    def _finish_run(self, run: "_DecodeRun") -> None:
        if self._decode_run is not run:
            return
        self._decode_run = None
        self.iterations += run.count
        self.iterations_fast_forwarded += run.count
        advance_decodes(self.state, run.count, PLACEHOLDER_TOKEN, self._simulation.now_s)
        self.publish()
        self._begin()

    def _cut_short(self, run: "_DecodeRun") -> None:
        """End the fast-forward with the iteration in progress."""
        elapsed_s = self._simulation.now_s - run.start_s
        count = self._iterations_within(run, elapsed_s) + 1
        if count < run.count:
            self._decode_run = _DecodeRun(run.start_s, run.decodes, run.prefix_tokens, count)
            end_s = run.start_s + self._run_s(run, count)
            self._simulation.at(end_s, self._finish_run, self._decode_run)

    def _run_s(self, run: "_DecodeRun", count: int) -> float:
        return self._time_model.decodes_s(run.decodes, run.prefix_tokens, count)

    def _iterations_within(self, run: "_DecodeRun", seconds: float) -> int:
        """Return how many whole iterations of the run end within `seconds` of its start."""
        # Bisection: the duration grows with the number of iterations.
        low, high = 0, run.count + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._run_s(run, middle) <= seconds:
                low = middle
            else:
                high = middle
        return low

    def publish(self) -> None:
        """Pass the load to the reporter, with the requests and dropped prefixes that are new."""
        drained, self._drained = self._drained, []
        dropped = self.state.pool.cache.evictions
        newly_dropped = dropped.since(self._dropped_total)
        self._dropped_total = dropped.total
        self.reporter.publish(self.state.load(), drained, newly_dropped)


@dataclass(slots=True, eq=False)
class _PreemptibleIteration:
    """An iteration of `seconds` at a single worker, with a safepoint every `interval_s`."""

    microbatch: Microbatch
    start_s: float
    seconds: float
    interval_s: float


@dataclass(slots=True, eq=False)
class _DecodeRun:
    """`count` decode iterations of the same requests, simulated as one event."""

    start_s: float
    decodes: int
    prefix_tokens: int
    count: int
