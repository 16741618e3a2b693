"""A simulated worker: one planner of `services.core`, whose iterations take modelled time."""

from dataclasses import dataclass
from typing import Protocol

from services.core.iteration.config import IterationConfig
from services.core.iteration.events import EmitToken, Load, RefuseRequest, RequestArrived
from services.core.iteration.state import IterationState
from services.core.request import Request
from sim.engine import Simulation
from sim.time_model import TimeModel

FILLER = -1
"""The token that is sampled each time; it is nobody's stop token."""
RUN_MIN = 2
"""Fewer certain decodes are not worth a jump."""


@dataclass(frozen=True, slots=True)
class Delays:
    """What lies between the services, in seconds.

    `ask_s` from the client to the scheduler, `start_s` from there to the worker's planner,
    `token_s` from the planner to the client, `report_s` from a worker to the scheduler. A worker
    reports `report_pause_s` after a change, and `heartbeat_s` after its last report.
    """

    ask_s: float = 0.002
    start_s: float = 0.002
    token_s: float = 0.001
    report_s: float = 0.0005
    report_pause_s: float = 0.005
    heartbeat_s: float = 0.5


class Listener(Protocol):
    """Who hears what an instance has to tell."""

    def note_token(self, token: EmitToken) -> None:
        """A first or last token leaves the planner."""
        ...

    def note_refused(self, refusal: RefuseRequest) -> None:
        """The planner takes a request not."""
        ...

    def note_report(self, name: str, load: Load, received: tuple[str, ...]) -> None:
        """A load report leaves the worker."""
        ...


class Instance:
    """Drives its planner as the engine's loop does: drain the inbox, plan, run, publish.

    While only decodes run, many iterations are one event; an arrival cuts it short at the end of
    the iteration in which it falls. Reports inside such a jump are left out: only the number of
    free blocks changes in it, and it never lasts longer than a heartbeat.
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
    ) -> None:
        self.name = name
        self.state = IterationState(config)
        self.iterations = 0
        self.iterations_fast_forwarded = 0
        self._simulation = simulation
        self._time_model = time_model
        self._delays = delays
        self._listener = listener
        self._fast_forward = fast_forward
        self._inbox: list[Request] = []
        self._drained: list[str] = []
        self._received: list[str] = []
        self._load = self.state.load()
        self._idle = True
        self._run: _Run | None = None
        self._report_due = False
        self._reported_s = 0.0

    def start(self, offset_s: float) -> None:
        """Report for the first time, `offset_s` from now; then go on with heartbeats."""
        self._simulation.after(offset_s, self._heartbeat)

    def receive(self, request: Request) -> None:
        """A request reaches the inbox; the planner sees it before its next iteration."""
        self._inbox.append(request)
        if self._idle:
            self._begin()
        elif self._run is not None:
            self._cut_short(self._run)

    # --- iterations

    def _begin(self) -> None:
        self._idle = False
        self._drain()
        if self._fast_forward and (runway := self.state.decode_runway()) >= RUN_MIN:
            self._begin_run(runway)
            return
        shape = self.state.plan_shape()
        if shape is None:
            self._idle = True
            if self._drained:
                self._publish()
            return
        self._simulation.after(self._time_model.iteration_s(shape), self._finish)

    def _drain(self) -> None:
        now_s = self._simulation.now_s
        for request in self._inbox:
            self._drained.append(request.request_id)
            for command in self.state.handle(RequestArrived(now_s, request)):
                assert isinstance(command, RefuseRequest)
                self._listener.note_refused(command)
        self._inbox.clear()

    def _finish(self) -> None:
        self.iterations += 1
        for token in self.state.finish_filled(FILLER):
            self._listener.note_token(token)
        self._publish()
        self._begin()

    # --- jumps over plain decodes

    def _begin_run(self, runway: int) -> None:
        running = self.state.running
        prefix_tokens = sum([sequence.computed for sequence in running])
        run = _Run(self._simulation.now_s, len(running), prefix_tokens, runway)
        most_s = self._delays.heartbeat_s
        if self._run_s(run, runway) > most_s:
            run.count = max(1, self._iterations_within(run, most_s))
        self._run = run
        self._simulation.at(run.start_s + self._run_s(run, run.count), self._finish_run, run)

    def _finish_run(self, run: "_Run") -> None:
        if self._run is not run:
            return
        self._run = None
        self.iterations += run.count
        self.iterations_fast_forwarded += run.count
        self.state.advance_decodes(run.count, FILLER)
        self._publish()
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

    # --- reports

    def _publish(self) -> None:
        """The load becomes visible to the reporter, with the requests that it counts."""
        self._load = self.state.load()
        if self._drained:
            self._received += self._drained
            self._drained = []
        if not self._report_due:
            self._report_due = True
            self._simulation.after(self._delays.report_pause_s, self._report_change)

    def _report_change(self) -> None:
        self._report_due = False
        self._report()

    def _heartbeat(self) -> None:
        due_s = self._reported_s + self._delays.heartbeat_s
        if due_s <= self._simulation.now_s or not self._reported_s:
            self._report()
            due_s = self._simulation.now_s + self._delays.heartbeat_s
        self._simulation.at(due_s, self._heartbeat)

    def _report(self) -> None:
        received, self._received = self._received, []
        self._reported_s = self._simulation.now_s
        self._listener.note_report(self.name, self._load, tuple(received))


@dataclass(slots=True, eq=False)
class _Run:
    """`count` decode iterations of the same requests as one event."""

    start_s: float
    decodes: int
    prefix_tokens: int
    count: int
