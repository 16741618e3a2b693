"""The scheduler's state machine: queues requests of gateways, and assigns them to worker groups.

A request stays in a bounded queue until a group has room for it (late binding). Every ask (request
for an assignment) ends exactly once: assigned, refused or withdrawn. Asks are idempotent by
request id: repeating the ask of a waiting request returns its ticket, repeating that of an
assigned request returns its assignment.

`admission` decides whether an ask may wait, `queue` which request is next, and `dispatch` with
`group_index` (or `prefix_ranking`, by cached prefixes) which group runs it. `group_table` holds
the groups and their load, `assignments` the recent assignments. Only this module changes them, an
event at a time.

Terms: a requeued request was returned by its worker or lost before its first output; a resumed
request has sent output before. Online requests are all except those of the class batch. An
epoch numbers the configurations of a group.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf

from services.core.ask import RefusalReason
from services.core.cost.model import CostModel
from services.core.demand import ModelDemand
from services.core.overtaking import OVERTAKEN_MAX, count_overtaken, next_to_start
from services.core.report import OtherRoom
from services.core.request import admission_blocks
from services.core.scheduler.admission import Admission, NotAdmitted, check_fields
from services.core.scheduler.assignments import Assigned, Assignments, Totals
from services.core.scheduler.class_rules import ALL, NO_CLASSES, ClassRules
from services.core.scheduler.dispatch import ScoreFunction, could_hold, kv_share
from services.core.scheduler.group_load import GROWTH_BLOCKS, GroupLoad
from services.core.scheduler.group_table import DemandMeter, GroupTable, ModelGroups
from services.core.scheduler.lateness import WALK_S, Lateness
from services.core.scheduler.lengths import keys_of
from services.core.scheduler.queue import Waiting, WaitQueue
from services.core.scheduler.rate import ClassRates
from services.core.scheduler.vocabulary import (
    Asked,
    Command,
    Event,
    GatewayGone,
    GroupJoined,
    GroupLeft,
    LoadLost,
    LoadReported,
    OutcomeReported,
    SendAssignment,
    SendProceed,
    SendRefusal,
    SendTicket,
    ServingGroup,
    ShortfallsReported,
    Snapshot,
    Ticked,
    Withdrawn,
)
from services.core.service import ServiceClass

REQUEUES_MAX = 3
"""How often workers may return a request to the queue; later assignments are not returnable."""
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

    # Most requests that wait, and how long an online request may wait.
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
    # When the predictions of all waiting requests are due again.
    _walk_due_s: float = -inf

    def __post_init__(self) -> None:
        holds = self.lateness > 0
        self._groups = GroupTable(self.score, self.growth_blocks, self.ttft, self.rules, holds)
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
        )

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
            case Withdrawn() | GatewayGone():
                self._cancel(event)
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
        return sum(load.is_fresh(now_s) for load in self._groups.loads)

    def snapshot(self, now_s: float) -> Snapshot:
        """Counters and gauges for metrics and heartbeats."""
        loads, totals = list(self._groups.loads), self._totals
        # Metrics need an entry for every model and class, so that absent series read as 0.
        return Snapshot(
            queued=len(self._queue),
            oldest_wait_s=self._oldest_wait_s(ALL, now_s),
            groups_known=len(loads),
            groups_serving=self.groups_serving(now_s),
            reserved_blocks=sum(load.reserved_blocks for load in loads),
            dispatch_rate_per_s=self._rates.overall.per_s(now_s),
            assigned_total=totals.assigned,
            withdrawn_total=totals.withdrawn,
            returned_total=totals.returned,
            refused_total=dict(totals.refused),
            prompt_tokens_total=totals.prompt_tokens,
            cached_tokens_total=totals.cached_tokens,
            queue_deadline_s=self.queue_deadline_s,
            wants_prefixes=self.ttft is not None,
            queued_by_model={
                model: self._queue.demand(model)[0]
                for model in sorted({*self._groups.models, *self._queue.models()})
            },
            queued_by_class={cls: self._queue.count((cls,)) for cls in ALL},
            oldest_wait_s_by_class={cls: self._oldest_wait_s((cls,), now_s) for cls in ALL},
            refused_total_by_class=dict(totals.refused_of_class),
            refused_late_total=dict(totals.refused_late),
            retries_broken_total=totals.retries_broken,
            **self._admission.lateness.predictions(now_s),
        )

    def _oldest_wait_s(self, classes: Collection[ServiceClass], now_s: float) -> float:
        oldest_s = self._queue.oldest_deadline_start_s(classes)
        return max(0.0, now_s - oldest_s) if oldest_s is not None else 0.0

    def demands(self, now_s: float) -> tuple[ModelDemand, ...]:
        """Demand per model: waiting requests, recent refusals and the arrival rate."""
        demands = []
        for name in self._groups.models:
            model = self._groups.of_model(name)
            assert model is not None
            # Groups merge and drop layers for online demand alone: report batch demand separately.
            queued, queued_tokens = self._queue.demand(name, self.rules.demand_classes)
            total, total_tokens = self._queue.demand(name)
            refused, refused_tokens = model.meter.refused.at(now_s)
            rate = model.meter.arrived_tokens_per_s(now_s)
            demand = ModelDemand(
                name,
                queued,
                queued_tokens,
                refused,
                refused_tokens,
                rate,
                total - queued,
                total_tokens - queued_tokens,
            )
            if demand != ModelDemand(name):
                demands.append(demand)
        return tuple(demands)

    def has_room(self, ask: Asked, now_s: float) -> bool:
        """Whether a group could start a request now, regardless of the queue."""
        model = self._groups.of_model(ask.model)
        return model is not None and model.pick(ask, now_s, inf) is not None

    def room(self, model: str, worker_id: str, now_s: float) -> OtherRoom:
        """Room for the requests of a worker that shuts down, in the other groups of its model."""
        return self._groups.room(model, worker_id, now_s)

    def check_invariants(self) -> None:
        """Raise AssertionError if the parts of the state contradict each other."""
        self._queue.check_invariants()
        self._groups.check_invariants()
        self._assignments.check_invariants()
        waiting = [w for model in self._queue.models() for w in self._queue.in_order(model)]
        assert sum(not w.was_assigned for w in waiting) <= self.queue_limit
        assert not any(self._queue.get(request_id) for request_id in self._assignments)

    # --- asks

    def _ask(self, ask: Asked) -> list[Command]:
        if self._queue.get(ask.request_id) is not None:
            # The gateway has reconnected: direct the answer to its new stream.
            self._queue.move(ask.request_id, ask.stream_id)
            return [SendTicket(ask.stream_id, ask.request_id)]
        if (invalid := check_fields(ask)) is not None:
            return [self._refusal(ask, ask.stream_id, invalid, ask.now_s)]
        arrival_s, requeues, was_assigned = ask.now_s - ask.waited_s, 0, False
        returned = ask.failed is not None and ask.failed.returned
        if (remembered := self._assignments.get(ask.request_id)) is not None:
            if (repeated := self._repeat(ask, remembered)) is not None:
                return [repeated]
            # A requeued request keeps its arrival time, so that it keeps its rank in the queue.
            arrival_s = min(arrival_s, remembered.arrival_s)
            requeues, was_assigned = remembered.requeues + returned, True
        if ask.resumed or ask.excused_s:
            # The request has run, even if this scheduler has restarted and forgotten it.
            was_assigned = True
            self._suspend_failed_group(ask)
        self._totals.returned += returned
        return self._admit(ask, arrival_s, requeues, was_assigned)

    def _repeat(self, ask: Asked, remembered: Assigned) -> SendAssignment | None:
        """Repeat the remembered assignment, or forget it and return None if it is invalid.

        An assignment is invalid once it has failed or its group has moved to another epoch.
        """
        failed, load = ask.failed, self._groups.at_epoch(*remembered.group_and_epoch)
        if load is not None:
            if failed is None or (failed.group_id, failed.epoch) != remembered.group_and_epoch:
                group, requeues = load.group, remembered.requeues
                return self._assignment(ask.stream_id, ask.request_id, group, requeues)
            if not failed.returned:
                # The worker is dead, or at a newer epoch than the known group: without this, the
                # next dispatch would choose the same group again.
                self._groups.forget_report(load)
        self._forget(ask.request_id)
        return None

    def _suspend_failed_group(self, ask: Asked) -> None:
        """Stop dispatch to the group whose worker lost a request, until its next load report.

        The gateway may know an older epoch. If the group has another leader by now, that leader
        gets no requests until its next report, which is due within about a second.
        """
        failed = ask.failed
        if failed is None or failed.returned:
            return
        if (load := self._groups.of_id(failed.group_id)) is not None:
            self._groups.forget_report(load)

    def _admit(
        self, ask: Asked, arrival_s: float, requeues: int, was_assigned: bool
    ) -> list[Command]:
        """Queue a request or refuse it."""
        model = self._groups.of_model(ask.model)
        start_tokens = _start_tokens(ask, model)
        deadline_start_s = arrival_s
        if ask.excused_s:
            # The deadline restarts when a worker fails: time before was not spent in this queue.
            deadline_start_s = max(arrival_s, ask.now_s - ask.waited_s + ask.excused_s)
        estimate = None
        if not was_assigned:
            estimate = self._admission.lateness.estimate(ask, model, arrival_s, start_tokens)
        refused = self._admission.refusal(ask, model, deadline_start_s, was_assigned, estimate)
        meter = self._demand_meter(ask)
        # Count as demand each request that more KV memory could serve, once: an estimated ask that
        # is not refused is followed by another.
        counts = refused.is_overload if refused is not None else not ask.estimated
        if meter is not None and not was_assigned and counts:
            meter.note_arrival(ask.service, start_tokens, ask.now_s)
        first_s = arrival_s
        if estimate is not None and estimate.booking is not None:
            first_s = min(arrival_s, estimate.booking.arrival_s)
            self._totals.retries_broken += refused is not None
        if refused is not None:
            if meter is not None and refused.is_overload:
                meter.refused.add(start_tokens, ask.now_s)
            return [self._refusal(ask, ask.stream_id, refused, ask.now_s, start_tokens, first_s)]
        if ask.estimated:
            return [SendProceed(request_id=ask.request_id, stream_id=ask.stream_id)]
        # A retry at its booked time has the rank of its first try.
        waiting = Waiting(
            *(ask, ask.stream_id, first_s, deadline_start_s, start_tokens),
            requeues=requeues,
            was_assigned=was_assigned,
        )
        if model is not None and estimate is not None:
            self._admission.lateness.apply(estimate, waiting, model)
        return self._enqueue(waiting, model)

    def _enqueue(self, waiting: Waiting, model: ModelGroups | None) -> list[Command]:
        """Queue an admitted request, then dispatch from the queue of its model."""
        ask = waiting.ask
        displaced = self._admission.displaced(ask, waiting.was_assigned)
        refusals = (
            [] if displaced is None else [self._refuse_waiting_request(*displaced, ask.now_s)]
        )
        paced = model is not None and not self.rules.is_batch(ask.service)
        # The pace is measured only while requests wait: see QueuePace.
        if model is not None and paced and not self._waiting_online(ask.model):
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

    def _cancel(self, event: Withdrawn | GatewayGone) -> None:
        """Withdraw a request, or the waiting requests of a lost gateway."""
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
            self._forget(request_id)

    # --- dispatch

    def _tick(self, now_s: float) -> list[Command]:
        for request_id in self._assignments.expired(now_s):
            self._forget(request_id)
        self._groups.check_liveness(now_s)
        commands: list[Command] = []
        walk = now_s >= self._walk_due_s
        if walk:
            self._walk_due_s = now_s + WALK_S
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
        picked: GroupLoad | None = None
        held_tokens = inf  # groups that can hold this many tokens are kept for an overtaken request
        kept_tokens = inf  # groups that can hold this many tokens start no batch request
        spread = False  # skip groups with a prefill backlog

        def pick_group(waiting: Waiting) -> bool:
            nonlocal picked, spread
            ask, below_tokens = waiting.ask, held_tokens
            if self.rules.is_batch(ask.service):
                below_tokens = min(held_tokens, kept_tokens)
            spread = spread or now_s < waiting.spread_until_s
            if now_s < waiting.alone_until_s:
                # The request may crash an engine: start it where no other request runs.
                picked = model.index_for(ask).idle(ask.prompt_tokens, ask.max_tokens, now_s)
            else:
                avoided = waiting.avoided(now_s)
                picked = model.pick(ask, now_s, below_tokens, avoided, spread=spread)
            return picked is not None

        def hold_groups(waiting: Waiting) -> bool:
            """Keep groups for an overtaken request; returns whether all groups are kept."""
            nonlocal held_tokens
            # A request that waits for an idle group must not block the queue.
            if now_s < waiting.alone_until_s:
                return False
            held_tokens = min(held_tokens, waiting.ask.prompt_tokens + waiting.ask.max_tokens)
            return model.index.tokens_min >= held_tokens

        def could_use(waiting: Waiting) -> bool:
            ask = waiting.ask
            return picked is not None and could_hold(picked, ask.prompt_tokens, ask.max_tokens)

        while True:
            commands += self._refuse_waiting(name, now_s)
            # An assignment changes room and ranking, so each round starts from the head again.
            held_tokens, kept_tokens = inf, self._tokens_kept_from_batch(name, model)
            spread = False
            queue = (w for w in self._queue.in_order(name) if model.can_hold(w.ask))
            first = next_to_start(queue, pick_group, self.overtaken_max, hold_groups)
            if first is None or picked is None:
                return commands
            count_overtaken(self._queue.in_order(name), first, could_use)
            commands.append(self._assign(first, picked, model, now_s))

    def _waiting_online(self, name: str) -> int:
        """Number of waiting requests of a model; without batch requests if `rules` use classes."""
        return self._queue.demand(name, self.rules.demand_classes)[0]

    def _tokens_kept_from_batch(self, name: str, model: ModelGroups) -> float:
        """Sequence length in tokens: groups that can hold it start no batch request.

        It is the length of the shortest waiting online request. `inf` if none waits, or if groups
        are partitioned by class (`batch_groups`), since those never compete.
        """
        least = inf
        if not self.rules.enabled or model.partitioned or not self._waiting_online(name):
            return least
        tokens_min = model.index.tokens_min
        for waiting in self._queue.in_order(name):
            if waiting.ask.service.online:
                least = min(least, waiting.ask.prompt_tokens + waiting.ask.max_tokens)
                if least <= tokens_min:
                    break  # every group can hold this: all of them are kept already
        return least

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
        return self._refusal(ask, waiting.stream_id, refused, now_s, tokens, arrival_s)

    def _assign(
        self, waiting: Waiting, load: GroupLoad, model: ModelGroups, now_s: float
    ) -> SendAssignment:
        ask, group = waiting.ask, load.group
        self._queue.start(ask.request_id)
        tokens_max = ask.prompt_tokens + ask.max_tokens
        # Reserve the first blocks only: a running request allocates more, and may be preempted.
        blocks = admission_blocks(ask.prompt_tokens, tokens_max, group.block_size)
        computed = model.reserve(load, ask, blocks, now_s)
        self._totals.prompt_tokens += ask.prompt_tokens
        self._totals.cached_tokens += ask.prompt_tokens - computed
        self._assignments.remember(
            ask.request_id,
            Assigned(
                *(group.group_id, group.epoch, waiting.arrival_s, now_s, waiting.requeues),
                *(waiting.raw_s, ask.service.service_class, keys_of(ask) if self.lateness else ()),
                ask.prompt_tokens,
            ),
        )
        if self.lateness and ask.service.service_class is ServiceClass.INTERACTIVE:
            model.meter.waits.interactive.start(ask.request_id, now_s)
        if now_s < waiting.alone_until_s:
            load.make_exclusive(ask.request_id, now_s)
        self._rates.note(ask.service.service_class, now_s)
        model.meter.dispatched.note(ask.service.service_class, now_s)
        if not self.rules.is_batch(ask.service):
            model.meter.note_start(waiting.start_tokens, now_s)
        self._totals.assigned += 1
        return self._assignment(waiting.stream_id, ask.request_id, group, waiting.requeues)

    def _assignment(
        self, stream_id: int, request_id: str, group: ServingGroup, requeues: int
    ) -> SendAssignment:
        model = self._groups.of_model(group.model)
        # Returning a request helps only if another group might take it.
        has_others = model is not None and len(model.index.loads) > 1
        return SendAssignment(
            request_id,
            group.group_id,
            group.epoch,
            group.worker_id,
            group.address,
            returnable=has_others and requeues < REQUEUES_MAX,
            stream_id=stream_id,
        )

    def _forget(self, request_id: str) -> None:
        """Forget the assignment of a request, and release its reservation, if any."""
        assigned = self._assignments.forget(request_id)
        if assigned is not None:
            self._groups.release(assigned.group_id, request_id)

    def _refusal(
        self,
        ask: Asked,
        stream_id: int,
        refused: NotAdmitted,
        now_s: float,
        start_tokens: int = 0,
        arrival_s: float = 0.0,
    ) -> SendRefusal:
        """Count a refusal, and book time for a retry if the request could start then."""
        service_class = ask.service.service_class
        self._totals.refused[refused.reason] += 1
        self._totals.refused_of_class[service_class] += 1
        if refused.late is not None:
            self._totals.refused_late[ask.model, service_class, refused.late.by] += 1
        wait_s, booking = refused.retry_after_s, None
        if refused.is_overload:
            model = self._groups.of_model(ask.model)
            if model is not None and refused.reason is not RefusalReason.EXPIRED and start_tokens:
                lateness = self._admission.lateness
                booking = lateness.book(ask, model, start_tokens, arrival_s, now_s)
            if booking is not None:
                wait_s = float(booking.retry_after_s(now_s))
            else:
                wait_s = self._admission.retry_after_s(ask, now_s)
        return SendRefusal(
            ask.request_id,
            refused.message,
            wait_s,
            reason=refused.reason,
            stream_id=stream_id,
            booked=booking is not None,
            late=refused.late,
        )


def _start_tokens(ask: Asked, model: ModelGroups | None) -> int:
    """KV tokens that must be free before a request can start, in whole blocks."""
    block_size = model.index.block_size if model is not None else 1
    tokens_max = ask.prompt_tokens + ask.max_tokens
    return admission_blocks(ask.prompt_tokens, tokens_max, block_size) * block_size
