"""A simulated worker: one planner of `services.core`, whose iterations take modelled time."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from services.core.changeover.state import Changeover
from services.core.planner.batch import IterationShape, Microbatch
from services.core.planner.config import IterationConfig
from services.core.planner.events import (
    EmitToken,
    IterationDropped,
    IterationSuspended,
    RefuseRequest,
    RequestArrived,
    WaitLooked,
)
from services.core.planner.fast_forward import (
    advance_decodes,
    decodes_ahead,
    finish_filled,
    plan_shape,
)
from services.core.planner.preemption import OnlineRequest, Preempt, PreemptedWork
from services.core.planner.state import PlannerState
from services.core.report import LoadReport
from services.core.request import Request
from tideserve.sim.delays import Delays
from tideserve.sim.engine import Action, Simulation
from tideserve.sim.pipeline import shape_of
from tideserve.sim.reporter import LoadSender
from tideserve.sim.time_model import TimeModel
from tideserve.sim.token_times import TokenTimes

FILLER = -1
"""The token that is sampled each time; it is nobody's stop token."""
SAFEPOINTS = 32
"""An iteration has so many: one after each layer of a model of 7B."""
RUN_MIN = 2
"""Fewer certain decodes are not worth a jump."""


class Listener(Protocol):
    """What an instance reports to."""

    def note_token(self, token: EmitToken) -> None:
        """A first or last token leaves the planner."""
        ...

    def note_refused(self, refusal: RefuseRequest) -> None:
        """The planner takes a request not."""
        ...

    def note_report(self, told: LoadReport) -> None:
        """A load report leaves the worker."""
        ...

    def note_ends(self, told: LoadReport) -> None:
        """Requests have finished; with them the load leaves the worker."""
        ...


class Busy(NamedTuple):
    """The device works for so long, then this happens."""

    seconds: float
    action: Action
    arguments: tuple[Any, ...]


Handler = Callable[..., Busy | None]


class GroupMember(Protocol):
    """An instance's part in its group, see `member.py`."""

    changeover: Changeover

    def apply(self, event: RequestArrived | WaitLooked) -> Busy | None:
        """Have the machine of the change-over handle an event."""
        ...

    def take_turn(self) -> Busy | None:
        """Go on with what is under way."""
        ...

    def run_first(self, microbatch: Microbatch) -> Busy:
        """Run the leader's stage of a microbatch."""
        ...


class Instance:
    """Drives its planner as the engine's loop does: drain the inbox, plan, run, publish.

    While only decodes run, many iterations are one event; an arrival cuts it short at the end of
    the iteration in which it falls. Reports inside such a jump are left out: only the number of
    free blocks changes in it, and it never lasts longer than a heartbeat.

    With `token_times`, which hear of every token, nothing is jumped over; nor where an iteration of
    batch work may give way between two layers.

    As a `member` of a group it hands every request to the machine of the change-over, and calls it
    between iterations. In a pipeline, the first instance plans; the others run what is posted.
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
    ) -> None:
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
        self._inbox: list[Request] = []
        self._mail: deque[tuple[Handler, tuple[Any, ...]]] = deque()
        self._drained: list[str] = []
        self._dropped_total = 0
        self._idle = True
        self._run: _Run | None = None
        self._watched: _Watched | None = None
        self._left_s = 0.0  # of the suspended iteration

    @property
    def launches(self) -> bool:
        """Whether this worker plans now."""
        return self.member is None or self.member.changeover.may_plan

    @property
    def _holds_batch_work(self) -> bool:
        """Whether batch work alone waits for a change of the group."""
        now_s, member = self._simulation.now_s, self.member
        return member is not None and member.changeover.holds_batch_work(now_s)

    def receive(self, request: Request) -> None:
        """A request reaches the inbox; the planner sees it before its next iteration."""
        self._inbox.append(request)
        if self._watched is not None and request.service.online:
            self._plan_safepoint(self._watched)
        self.wake()

    def post(self, handler: Handler, *arguments: Any) -> None:
        """Have `handler` called between iterations, in order; it may keep the device busy."""
        self._mail.append((handler, arguments))
        if self._watched is not None:
            self._plan_safepoint(self._watched)
        self.wake()

    def post_first(self, handler: Handler, *arguments: Any) -> None:
        """As `post`, before all that waits; called between iterations."""
        self._mail.appendleft((handler, arguments))

    def wake(self) -> None:
        """Look at the inbox and take a turn, at the end of the iteration that runs."""
        if self._idle:
            self._begin()
        elif self._run is not None:
            self._cut_short(self._run)

    # --- iterations

    def _begin(self) -> None:
        self._idle = False
        self._drain()
        self._return_waiting()
        busy = self._take_turn()
        while self._mail and busy is None:
            handler, arguments = self._mail.popleft()
            busy = handler(*arguments)
            if busy is None and not self._mail:
                busy = self._take_turn()
        if busy is not None:
            self._simulation.after(busy.seconds, self._end_busy, busy)
            return
        if not self.launches or self._holds_batch_work:
            self._rest()
        elif self.state.stages > 1:
            self._launch()
        elif self.state.config.preempt is not Preempt.OFF:
            self._begin_watched()
        elif self._fast_forward and (ahead := decodes_ahead(self.state)) >= RUN_MIN:
            self._begin_run(ahead)
        elif (shape := self._plan_alone()) is None:
            self._rest()
        else:
            self._simulation.after(self._time_model.iteration_s(shape), self._finish)

    def _rest(self) -> None:
        self._idle = True
        if self._drained:
            self.publish()

    def _drain(self) -> None:
        now_s = self._simulation.now_s
        for request in self._inbox:
            self._drained.append(request.request_id)
            self._apply(RequestArrived(now_s, request))
        self._inbox.clear()

    def _return_waiting(self) -> None:
        """Give back what has waited too long; before a plan, as the engine does."""
        now_s, member = self._simulation.now_s, self.member
        due_s = (self.state if member is None else member.changeover).return_due_s
        if due_s is None or now_s < due_s:
            return
        self._apply(WaitLooked(now_s))

    def _apply(self, event: RequestArrived | WaitLooked) -> None:
        if self.member is not None:
            busy = self.member.apply(event)
            assert busy is None, "a request keeps the device busy"
            return
        for command in self.state.handle(event):
            assert isinstance(command, RefuseRequest)
            self.tell(command)

    def tell(self, command: EmitToken | RefuseRequest) -> None:
        """Tell a client what the planner has for it."""
        if isinstance(command, RefuseRequest):
            self._listener.note_refused(command)
        else:
            self._listener.note_token(command)

    def _take_turn(self) -> Busy | None:
        return self.member.take_turn() if self.member is not None else None

    def _plan_alone(self) -> IterationShape | None:
        """Plan an iteration of a group of one: by the machine while it has KV of other groups."""
        now_s = self._simulation.now_s
        if self.member is None or not self.member.changeover.busy:
            return plan_shape(self.state, now_s)
        microbatch = self.member.changeover.plan(now_s)
        return shape_of(microbatch) if microbatch is not None else None

    def _end_busy(self, busy: Busy) -> None:
        busy.action(*busy.arguments)
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
        """The results of a microbatch are here; None is the only one's of a group of one."""
        now_s, in_flight = self._simulation.now_s, self.state.in_flight
        if self._token_times is not None and in_flight and number in (None, in_flight[0].number):
            self._token_times.note(in_flight[0], now_s)
        tokens = finish_filled(self.state, FILLER, now_s, number)
        for token in tokens:
            self._listener.note_token(token)
        self.publish()
        if any(token.finish_reason is not None for token in tokens):
            self._listener.note_ends(self.reporter.tell())

    # --- iterations that give way

    def _begin_watched(self) -> None:
        """Plan an iteration that may end at a safepoint, or go on with one that did."""
        now_s, member = self._simulation.now_s, self.member
        planner = self.state if member is None else member.changeover
        microbatch = planner.plan(now_s)
        if microbatch is None:
            self._rest()
            return
        whole_s = self._time_model.iteration_s(shape_of(microbatch))
        seconds = whole_s if microbatch.resumes is None else self._left_s
        watched = _Watched(microbatch, now_s, seconds, whole_s / SAFEPOINTS)
        self._watched = watched
        self._simulation.after(seconds, self._finish_watched, watched)

    def _finish_watched(self, watched: "_Watched") -> None:
        if self._watched is watched:
            self._watched = None
            self._finish()

    def _plan_safepoint(self, watched: "_Watched") -> None:
        """Look at the next safepoint whether the iteration gives way to what has come."""
        if not watched.microbatch.preemptible:
            return
        passed = int((self._simulation.now_s - watched.start_s) / watched.interval_s)
        time_s = watched.start_s + (passed + 1) * watched.interval_s
        if time_s <= self._simulation.now_s:  # by rounding: this one has been looked at
            time_s += watched.interval_s
        if time_s < watched.start_s + watched.seconds:
            self._simulation.at(time_s, self._look, watched)

    def _look(self, watched: "_Watched") -> None:
        """A safepoint with online requests in the inbox, or mail about a change of groups."""
        if self._watched is not watched:
            return
        config, now_s = self.state.config, self._simulation.now_s
        elapsed_s = now_s - watched.start_s
        online = [OnlineRequest.of(one, now_s) for one in self._inbox if one.service.online]
        batch = watched.microbatch.batch
        if not (self._mail or self.state.gives_way(batch, elapsed_s, online)):
            self._plan_safepoint(watched)
            return
        self._watched = None
        self._left_s = watched.seconds - elapsed_s
        resumed = config.preempted_work is PreemptedWork.RESUME
        self.state.handle(IterationSuspended(now_s) if resumed else IterationDropped(now_s))
        self._begin()

    # --- pipelines

    def _launch(self) -> None:
        """Run the leader's stage of one more microbatch."""
        assert self.member is not None
        microbatch = self.member.changeover.plan(self._simulation.now_s)
        if microbatch is None:
            self._rest()
            return
        self.iterations += 1
        busy = self.member.run_first(microbatch)
        self._simulation.after(busy.seconds, self._end_busy, busy)

    # --- jumps over plain decodes

    def _begin_run(self, ahead: int) -> None:
        running = self.state.running
        prefix_tokens = sum([sequence.computed for sequence in running])
        run = _Run(self._simulation.now_s, len(running), prefix_tokens, ahead)
        if self._run_s(run, ahead) > self._longest_run_s:
            run.count = max(1, self._iterations_within(run, self._longest_run_s))
        due_s = self.state.return_due_s
        if due_s is not None:
            before = self._iterations_within(run, max(0.0, due_s - run.start_s))
            run.count = min(run.count, before + 1)
        self._run = run
        self._simulation.at(run.start_s + self._run_s(run, run.count), self._finish_run, run)

    def _finish_run(self, run: "_Run") -> None:
        if self._run is not run:
            return
        self._run = None
        self.iterations += run.count
        self.iterations_fast_forwarded += run.count
        advance_decodes(self.state, run.count, FILLER)
        self.publish()
        self._begin()

    def _cut_short(self, run: "_Run") -> None:
        """End the run with the iteration that is under way."""
        elapsed_s = self._simulation.now_s - run.start_s
        count = self._iterations_within(run, elapsed_s) + 1
        if count < run.count:
            self._run = _Run(run.start_s, run.decodes, run.prefix_tokens, count)
            end_s = run.start_s + self._run_s(run, count)
            self._simulation.at(end_s, self._finish_run, self._run)

    def _run_s(self, run: "_Run", count: int) -> float:
        return self._time_model.decodes_s(run.decodes, run.prefix_tokens, count)

    def _iterations_within(self, run: "_Run", seconds: float) -> int:
        """How many whole iterations of the run end within `seconds` of its start."""
        low, high = 0, run.count + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._run_s(run, middle) <= seconds:
                low = middle
            else:
                high = middle
        return low

    def publish(self) -> None:
        """The load becomes visible to the reporter, with the requests that it counts."""
        drained, self._drained = self._drained, []
        dropped = self.state.pool.cache.dropped
        told = dropped.since(self._dropped_total)
        self._dropped_total = dropped.total
        self.reporter.publish(self.state.load(), drained, told)


@dataclass(slots=True, eq=False)
class _Watched:
    """An iteration of a group of one that lasts `seconds`, with a safepoint each `interval_s`."""

    microbatch: Microbatch
    start_s: float
    seconds: float
    interval_s: float


@dataclass(slots=True, eq=False)
class _Run:
    """`count` decode iterations of the same requests as one event."""

    start_s: float
    decodes: int
    prefix_tokens: int
    count: int
