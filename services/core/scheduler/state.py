"""The scheduler's state machine: queues requests of gateways, and assigns them to worker groups.

A request stays in a bounded queue until a group has room for it (late binding). Every ask (request
for an assignment) ends exactly once: assigned, refused or withdrawn. Asks are idempotent by
request id: repeating the ask of a waiting request returns its ticket, repeating that of an
assigned request returns its assignment.

`admission` decides whether an ask may wait, and `assigner` which request starts next and where:
`queue` orders the requests, `dispatch` with `group_index` (or `prefix_ranking`, by cached prefixes)
the groups. `group_table` holds the groups and their load, `assignments` the recent assignments.
Only this module changes them, an event at a time.

Terms: a requeued request was returned by its worker or lost before its first output; a resumed
request has sent output before. Online requests are all except those of the class batch. An
epoch numbers the configurations of a group.
"""

from dataclasses import dataclass, field
from math import inf

from services.core.cost.model import CostModel
from services.core.demand import ModelDemand
from services.core.overtaking import OVERTAKEN_MAX
from services.core.report import OtherRoom
from services.core.request import admission_blocks
from services.core.scheduler.admission import Admission, NotAdmitted, check_fields
from services.core.scheduler.assigner import Assigner
from services.core.scheduler.assignments import Assignments, Totals
from services.core.scheduler.class_rules import NO_CLASSES, ClassRules
from services.core.scheduler.dispatch import ScoreFunction, has_room, kv_share, start_blocks
from services.core.scheduler.group_load import GROWTH_BLOCKS
from services.core.scheduler.group_table import DemandMeter, GroupTable, ModelGroups
from services.core.scheduler.lateness import WALK_REQUEST_S, WALK_S, Lateness
from services.core.scheduler.prediction import UNKNOWN_OUTPUT
from services.core.scheduler.queue import Waiting, WaitQueue
from services.core.scheduler.rate import ClassRates
from services.core.scheduler.state_reports import StateReports
from services.core.scheduler.vocabulary import (
    Asked,
    Command,
    Event,
    GatewayGone,
    GroupJoined,
    GroupLeft,
    LateRefusals,
    LoadLost,
    LoadReported,
    OutcomeReported,
    RequestPlaced,
    SendProceed,
    SendRefusal,
    SendTicket,
    ShortfallsReported,
    Snapshot,
    Ticked,
    Withdrawn,
)
from services.core.service import ServiceClass

ALONE_S = 10.0
"""How long a request with `alone`, which may crash an engine, waits for an idle group."""
SPREAD_S = 5.0
"""Default time for which resumed requests wait for a group without a prefill backlog."""


@dataclass(slots=True)
class SchedulerState:
    """Admission, queue and dispatch of a scheduler.

    With `ttft`, dispatch prefers the group with the lowest predicted TTFT, including prefix cache
    hits; `score` breaks ties. If `rules` enable classes, no batch request starts in a group that
    could hold a waiting online request.

    Resumed requests arrive in bursts, when their worker is lost or shuts down, and each must
    recompute its whole prefill. To spread a burst over groups, they wait for up to `spread_s`
    while every group with room has a prefill backlog, and so do the requests behind them.
    """

    # Most requests that wait for a model, and how long an online request may wait.
    queue_limit: int
    queue_deadline_s: float
    # Ranks groups; the lowest score is best.
    score: ScoreFunction = kv_share
    # How often a request may be overtaken; see `overtaking`.
    overtaken_max: int = OVERTAKEN_MAX
    # KV blocks kept free per running request; see `GroupLoad`.
    growth_blocks: float = GROWTH_BLOCKS
    # Cost model that predicts TTFT; None: dispatch by `score` alone.
    ttft: CostModel | None = None
    # Rules by service class.
    rules: ClassRules = NO_CLASSES
    # How long resumed requests wait for a group without a backlog.
    spread_s: float = SPREAD_S
    # Factor of the targets by which requests are late, 0: none is; and the limit of the predicted
    # wait of standard requests without a target, 0: none.
    lateness: float = 0.0
    standard_wait_s: float = 0.0
    # Least prompt tokens for which a prefill group hands a request over; see `RoleDispatch`.
    hand_over_min_tokens: int | None = None
    # Serving groups with their load.
    _groups: GroupTable = field(init=False)
    # Waiting requests of all models.
    _queue: WaitQueue = field(init=False)
    _admission: Admission = field(init=False)
    # Dispatch rates over all models, for Retry-After.
    _rates: ClassRates = field(default_factory=ClassRates)
    # Recent assignments, for repeated asks.
    _assignments: Assignments = field(default_factory=Assignments)
    # Counters for metrics.
    _totals: Totals = field(default_factory=Totals)
    _assigner: Assigner = field(init=False)
    _reports: StateReports = field(init=False)
    # When the predictions of all waiting requests are due again.
    _walk_due_s: float = -inf

    def __post_init__(self) -> None:
        holds = self.lateness > 0
        self._groups = GroupTable(
            *(self.score, self.growth_blocks, self.ttft, self.rules, holds),
            self.hand_over_min_tokens,
        )
        self._queue = WaitQueue(self.rules)
        self._admission = Admission(
            self._queue,
            self._groups,
            self._rates,
            self.queue_limit,
            self.queue_deadline_s,
            Lateness(
                *(self._queue, self._groups, self.queue_deadline_s),
                *(self.lateness, self.standard_wait_s),
            ),
            self.rules,
            self._totals,
        )
        self._assigner = Assigner(
            *(self._queue, self._groups, self.rules, self.overtaken_max, self.lateness > 0),
            *(self._assignments, self._rates, self._totals),
        )
        self._reports = StateReports(self._groups, self._queue, self._admission)

    def handle(self, event: Event) -> list[Command]:
        """Apply an event; returns the commands that the driver must send, in order."""
        match event:
            case Asked():
                return self._ask(event)
            case LoadReported():
                load = self._groups.apply_report(event)
                return [] if load is None else self._dispatch(load.group.model, event.now_s)
            case Ticked():
                return self._tick(event.now_s)
            case Withdrawn() | GatewayGone() | RequestPlaced():
                self._note_request(event)
            case GroupJoined():
                self._groups.join(event.group, event.now_s)
            case GroupLeft():
                self._groups.leave(event.group_id, event.now_s)
            case LoadLost():
                self._groups.suspend(event)
            case ShortfallsReported():
                self._admission.shortfalls = event.shortfalls
            case OutcomeReported():
                self._admission.lateness.note_outcome(event, self._assignments)
        return []

    def groups_serving(self, now_s: float) -> int:
        """Number of groups whose leader's load report is fresh, so that requests can start."""
        return self._reports.groups_serving(now_s)

    def snapshot(self, now_s: float) -> Snapshot:
        """Counters and gauges for metrics and heartbeats."""
        return self._reports.snapshot(now_s)

    def demands(self, now_s: float) -> tuple[ModelDemand, ...]:
        """Demand per model: waiting requests, recent refusals and the arrival rate."""
        return self._reports.demands(now_s)

    def late_refusals(self, now_s: float) -> list[LateRefusals]:
        """The latest refusals for lateness, by model and class."""
        return self._reports.late_refusals(now_s)

    def has_room(self, ask: Asked, now_s: float) -> bool:
        """Whether a group is without prefill work and has KV for a request; for audits.

        KV that is kept for interactive requests does not count. Unlike dispatch, this does not
        rank groups or hold requests back.
        """
        model = self._groups.of_model(ask.model)
        return model is not None and any(
            load.is_fresh(now_s)
            and not load.prefill_tokens
            and has_room(load, ask.prompt_tokens, ask.max_tokens, start_blocks)
            and not model.is_kept_from(ask, load)
            for load in model.index.loads.values()
        )

    def room(self, model: str, worker_id: str, outage: bool, now_s: float) -> OtherRoom:
        """Room for the requests of a worker that shuts down or has an outage, in other groups."""
        return self._groups.room(model, worker_id, outage, now_s)

    def check_invariants(self) -> None:
        """Raise AssertionError if the parts of the state contradict each other."""
        self._queue.check_invariants()
        self._groups.check_invariants()
        self._assignments.check_invariants()
        for model in self._queue.models():
            new = sum(not w.was_assigned for w in self._queue.in_order(model))
            assert new <= self.queue_limit
        assert not any(self._queue.get(request_id) for request_id in self._assignments)

    # --- asks

    def _ask(self, ask: Asked) -> list[Command]:
        queued = self._queue.get(ask.request_id) is not None
        if ask.estimated and (queued or self._assignments.get(ask.request_id) is not None):
            # It is delayed: the gateway has asked in earnest since, and that ask stays as it is.
            return [SendProceed(request_id=ask.request_id, stream_id=ask.stream_id)]
        if queued:
            # The gateway has reconnected: direct the answer to its new stream.
            self._queue.move(ask.request_id, ask.stream_id)
            return [SendTicket(ask.stream_id, ask.request_id)]
        if (invalid := check_fields(ask)) is not None:
            return [self._admission.refuse(ask, ask.stream_id, invalid, ask.now_s)]
        arrival_s, requeues, was_assigned = ask.now_s - ask.waited_s, 0, False
        deadline_start_s, booked = arrival_s, False
        returned = ask.failed is not None and ask.failed.returned
        if (remembered := self._assignments.get(ask.request_id)) is not None:
            if (repeated := self._assigner.repeat(ask, remembered)) is not None:
                return [repeated]
            # A requeued request keeps its arrival time, so that it keeps its rank in the queue.
            arrival_s, booked = min(arrival_s, remembered.arrival_s), remembered.booked
            if not booked:
                deadline_start_s = arrival_s
            requeues, was_assigned = remembered.requeues + returned, True
        if ask.resumed or ask.excused_s:
            # The request has run, even if this scheduler has restarted and forgotten it.
            was_assigned = True
            self._assigner.suspend_failed_group(ask)
        self._totals.returned += returned
        if ask.excused_s:
            # The deadline restarts when a worker fails: time before was not spent in this queue.
            deadline_start_s = max(deadline_start_s, ask.now_s - ask.waited_s + ask.excused_s)
        waiting = Waiting(
            *(ask, ask.stream_id, arrival_s, deadline_start_s),
            requeues=requeues,
            was_assigned=was_assigned,
            booked=booked,
        )
        return self._admit(waiting)

    def _admit(self, waiting: Waiting) -> list[Command]:
        """Queue a request or refuse it."""
        ask, arrival_s, was_assigned = waiting.ask, waiting.arrival_s, waiting.was_assigned
        deadline_start_s = waiting.deadline_start_s
        model = self._groups.of_model(ask.model)
        waiting.start_tokens = start_tokens = _start_tokens(ask, model)
        estimate = None
        if not was_assigned:
            estimate = self._admission.lateness.estimate(ask, model, arrival_s, start_tokens)
        refused = self._admission.refusal(ask, model, deadline_start_s, was_assigned, estimate)
        meter = self._demand_meter(ask)
        # Count as demand each request that more KV memory could serve, once: an estimated ask that
        # is not refused is followed by another, and clients may retry before their time.
        counts = refused.is_overload if refused is not None else not ask.estimated
        counted = estimate is not None and estimate.counted
        if meter is not None and not was_assigned and counts and not counted:
            meter.note_arrival(ask, start_tokens, ask.now_s)
        if estimate is not None and estimate.booking is not None:
            # A retry at its booked time has the rank of its first try.
            waiting.arrival_s = min(arrival_s, estimate.booking.arrival_s)
            self._totals.retries_broken += refused is not None
        if refused is not None:
            if meter is not None and refused.is_overload and not counted:
                meter.refused.add(start_tokens, ask.now_s)
            refuse = self._admission.refuse
            return [refuse(ask, ask.stream_id, refused, ask.now_s, start_tokens, waiting.arrival_s)]
        if ask.estimated:
            return [SendProceed(request_id=ask.request_id, stream_id=ask.stream_id)]
        if self.rules.has_buckets(ask.service):
            waiting.length = _expected_tokens(ask, model)
        if model is not None and estimate is not None:
            self._admission.lateness.apply(estimate, waiting, model)
            if ask.service.service_class is ServiceClass.INTERACTIVE:
                model.meter.passing.add(start_tokens, ask.now_s)
        return self._enqueue(waiting, model)

    def _enqueue(self, waiting: Waiting, model: ModelGroups | None) -> list[Command]:
        """Queue an admitted request, then dispatch from the queue of its model."""
        ask = waiting.ask
        displaced = self._admission.displaced(ask, waiting.was_assigned)
        refusals = (
            [] if displaced is None else [self._refuse_waiting_request(*displaced, ask.now_s)]
        )
        # The pace is measured only while requests wait: see QueuePace.
        waits = self._queue.demand(ask.model, self.rules.demand_classes)[0]
        if model is not None and not waits and not self.rules.is_batch(ask.service):
            model.meter.begin_pace(ask.now_s)
        self._queue.push(self._held_back(waiting))
        ticket = SendTicket(ask.stream_id, ask.request_id)
        return [*refusals, ticket, *self._dispatch(ask.model, ask.now_s)]

    def _held_back(self, waiting: Waiting) -> Waiting:
        """Set until when a request waits for a group that is idle or without a backlog."""
        if waiting.ask.alone:
            waiting.alone_until_s = waiting.ask.now_s + ALONE_S
        if waiting.ask.resumed:
            waiting.spread_until_s = waiting.ask.now_s + self.spread_s
        return waiting

    def _demand_meter(self, ask: Asked) -> DemandMeter | None:
        """The demand meter of the model; None for an unknown model or a batch request."""
        model = self._groups.of_model(ask.model)
        return None if model is None or self.rules.is_batch(ask.service) else model.meter

    def _note_request(self, event: Withdrawn | GatewayGone | RequestPlaced) -> None:
        """Withdraw a request or the waiting requests of a lost gateway, or note a move."""
        if isinstance(event, RequestPlaced):
            self._assigner.place(event)
            return
        if isinstance(event, Withdrawn):
            self._withdraw(event.request_id)
            return
        for request_id in self._queue.of_stream(event.stream_id):
            self._withdraw(request_id)

    def _withdraw(self, request_id: str) -> None:
        if self._queue.get(request_id) is not None:
            self._queue.remove(request_id)
            self._totals.withdrawn += 1
        else:
            self._assigner.forget(request_id)

    # --- dispatch

    def _tick(self, now_s: float) -> list[Command]:
        for request_id in self._assignments.expired(now_s):
            self._assigner.forget(request_id)
        self._groups.check_liveness(now_s)
        commands: list[Command] = []
        walk = now_s >= self._walk_due_s
        if walk:
            self._walk_due_s = now_s + max(WALK_S, WALK_REQUEST_S * len(self._queue))
        for model in self._queue.models():
            commands += self._dispatch(model, now_s)
            for late in self._admission.late_waiting(model, now_s, walk):
                commands.append(self._refuse_waiting_request(*late, now_s))
        return commands

    def _dispatch(self, name: str, now_s: float) -> list[Command]:
        """Assign waiting requests of a model while a group has room for the next request."""
        model = self._groups.of_model(name)
        if model is None:
            return self._refuse_waiting(name, now_s)
        commands = list[Command]()
        model.remove_expired(now_s)
        while True:
            commands += self._refuse_waiting(name, now_s)
            # An assignment changes room and ranking, so each choice starts from the head again.
            start = self._assigner.next_start(name, model, now_s)
            if start is None:
                return commands
            commands.append(self._assigner.assign(*start, model, now_s))

    def _refuse_waiting(self, model: str, now_s: float) -> list[Command]:
        """Refuse expired requests, and those at the head of the queue that no group can hold."""
        self._queue.mark_late(model, now_s)
        commands: list[Command] = []
        while (refused := self._admission.next_refusal(model, now_s)) is not None:
            commands.append(self._refuse_waiting_request(*refused, now_s))
        return commands

    def _refuse_waiting_request(
        self, waiting: Waiting, refused: NotAdmitted, now_s: float
    ) -> SendRefusal:
        """Remove a request from the queue, and return its refusal."""
        ask = waiting.ask
        self._queue.remove(ask.request_id)
        meter = self._demand_meter(ask)
        if meter is not None and refused.is_overload:
            meter.refused.add(waiting.start_tokens, now_s)
        # A displaced retry with a booking keeps the rank of its first try.
        arrival_s, tokens = waiting.arrival_s, waiting.start_tokens
        return self._admission.refuse(ask, waiting.stream_id, refused, now_s, tokens, arrival_s)


def _expected_tokens(ask: Asked, model: ModelGroups | None) -> int:
    """Prompt and expected output tokens of a request, for its bucket."""
    output = ask.max_tokens * UNKNOWN_OUTPUT
    if model is not None:
        output = model.meter.waits.expected_output(ask)
    return ask.prompt_tokens + round(output)


def _start_tokens(ask: Asked, model: ModelGroups | None) -> int:
    """KV tokens that must be free before a request can start, in whole blocks."""
    block_size = model.index.block_size if model is not None else 1
    tokens_max = ask.prompt_tokens + ask.max_tokens
    return admission_blocks(ask.prompt_tokens, tokens_max, block_size) * block_size
