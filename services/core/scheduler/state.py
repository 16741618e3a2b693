"""The scheduler's decisions: a bounded queue, and late binding to groups with room.

Every ask ends exactly once: assigned, refused or withdrawn. Asking again under the same id is
safe: a waiting request gets its ticket again, an assigned one its assignment.

Theory of operation. `admission` says which asks may wait, `queue` which request is next, `dispatch`
and `group_index` which group takes it, or `prefix_ranking` by what is cached; `group_table` says
which groups there are and what they carry; `bookkeeping` remembers what was assigned. Only this
module changes them, one event at a time.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf

from services.core.cost.model import CostModel
from services.core.demand import ModelDemand
from services.core.overtaking import OVERTAKEN_MAX, next_to_start, start
from services.core.request import admission_blocks
from services.core.scheduler.admission import Admission, NotAdmitted, check_fields
from services.core.scheduler.bookkeeping import Assigned, Assignments, Totals
from services.core.scheduler.class_rules import ALL, NO_CLASSES, ClassRules
from services.core.scheduler.dispatch import ScoreFunction, could_hold, kv_share
from services.core.scheduler.group_load import GROWTH_BLOCKS, GroupLoad
from services.core.scheduler.group_table import DemandMeter, GroupTable, ModelGroups
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
    SendAssignment,
    SendRefusal,
    SendTicket,
    ServingGroup,
    ShortfallsTold,
    Snapshot,
    Ticked,
    Withdrawn,
)
from services.core.service import ServiceClass

RETURNS_MAX = 3
"""Workers that may give a request back; the next one keeps it."""
ALONE_S = 10.0
"""How long a request that is to be alone waits for a group without requests."""
SPREAD_S = 5.0
"""How long requests that have run wait by default for a group with few prompts before it."""


@dataclass(slots=True)
class SchedulerState:
    """Admission, queue and dispatch.

    `score` ranks groups, less is better; with the costs `ttft` the group that gives the first token
    soonest comes first, by what it has cached. `rules` say what classes decide; if anything, no
    batch request starts in a group that could hold an online one that waits here. For
    `overtaken_max` see `overtaking`, for `growth_blocks` `GroupLoad`.

    Requests that have run come many at a time, when their worker is lost or gives them up, and
    each has all of its tokens to compute again. So that the first group that serves does not get
    all of them, they wait for `spread_s` at most while every group with room has prompts enough for
    now; so do those behind them in the line.
    """

    queue_limit: int
    queue_deadline_s: float
    score: ScoreFunction = kv_share
    overtaken_max: int = OVERTAKEN_MAX
    growth_blocks: float = GROWTH_BLOCKS
    ttft: CostModel | None = None
    rules: ClassRules = NO_CLASSES
    spread_s: float = SPREAD_S
    _groups: GroupTable = field(init=False)
    _queue: WaitQueue = field(init=False)
    _admission: Admission = field(init=False)
    _rates: ClassRates = field(default_factory=ClassRates)
    _assignments: Assignments = field(default_factory=Assignments)
    _totals: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        self._groups = GroupTable(self.score, self.growth_blocks, self.ttft, self.rules)
        self._queue = WaitQueue(self.rules)
        self._admission = Admission(
            self._queue,
            self._groups,
            self._rates,
            self.queue_limit,
            self.queue_deadline_s,
            self.rules,
        )

    def handle(self, event: Event) -> list[Command]:
        """Apply one event; return what the driver must send, in order."""
        match event:
            case Asked():
                return self._ask(event)
            case LoadReported():
                load = self._groups.report(event)
                return [] if load is None else self._dispatch(load.group.model, event.now_s)
            case Ticked():
                return self._tick(event.now_s)
            case Withdrawn() | GatewayGone():
                self._give_up(event)
            case GroupJoined():
                self._groups.join(event.group, event.now_s)
            case GroupLeft():
                self._groups.leave(event.group_id, event.now_s)
            case LoadLost():
                self._groups.lose(event)
            case ShortfallsTold():
                self._admission.shortfalls = event.shortfalls
        return []

    def groups_serving(self, now_s: float) -> int:
        """Groups that requests can be placed in: their leaders have reported not long ago."""
        return sum(load.is_fresh(now_s) for load in self._groups.loads)

    def snapshot(self, now_s: float) -> Snapshot:
        """The state in numbers."""
        loads, totals = list(self._groups.loads), self._totals
        return Snapshot(
            queued=len(self._queue),
            oldest_wait_s=self._oldest_wait_s(ALL, now_s),
            groups_known=len(loads),
            groups_serving=self.groups_serving(now_s),
            reserved_blocks=sum(load.reserved_blocks for load in loads),
            dispatch_rate_per_s=self._rates.every.per_s(now_s),
            assigned_total=totals.assigned,
            withdrawn_total=totals.withdrawn,
            returned_total=totals.returned,
            refused_total=dict(totals.refused),
            prompt_tokens_total=totals.prompt_tokens,
            cached_tokens_total=totals.cached_tokens,
            queue_deadline_s=self.queue_deadline_s,
            wants_prefixes=self.ttft is not None,
            queued_by_model={
                model: self._queue.wanted(model)[0]
                for model in sorted({*self._groups.models, *self._queue.models()})
            },
            queued_by_class={one: self._queue.count((one,)) for one in ALL},
            oldest_wait_s_by_class={one: self._oldest_wait_s((one,), now_s) for one in ALL},
            refused_total_by_class=dict(totals.refused_of_class),
        )

    def _oldest_wait_s(self, classes: Collection[ServiceClass], now_s: float) -> float:
        oldest_s = self._queue.oldest_counted_s(classes)
        return max(0.0, now_s - oldest_s) if oldest_s is not None else 0.0

    def demands(self, now_s: float) -> tuple[ModelDemand, ...]:
        """Demand for the groups of each model, now and in the last seconds."""
        found = []
        for name in self._groups.models:
            model = self._groups.of_model(name)
            assert model is not None
            queued, queued_tokens = self._queue.wanted(name, self.rules.demanding)
            every, every_tokens = self._queue.wanted(name)
            refused, refused_tokens = model.meter.refused.at(now_s)
            rate = model.meter.arrived_tokens_per_s(now_s)
            demand = ModelDemand(
                name,
                queued,
                queued_tokens,
                refused,
                refused_tokens,
                rate,
                every - queued,
                every_tokens - queued_tokens,
            )
            if demand != ModelDemand(name):
                found.append(demand)
        return tuple(found)

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        self._queue.check_invariants()
        self._groups.check_invariants()
        self._assignments.check_invariants()
        waiting = [one for model in self._queue.models() for one in self._queue.line(model)]
        assert sum(not one.placed for one in waiting) <= self.queue_limit
        assert not any(self._queue.get(request_id) for request_id in self._assignments)

    # --- asks

    def _ask(self, ask: Asked) -> list[Command]:
        if self._queue.get(ask.request_id) is not None:
            self._queue.move(ask.request_id, ask.stream_id)
            return [SendTicket(ask.stream_id, ask.request_id)]
        if (invalid := check_fields(ask)) is not None:
            return [self._refusal(ask, ask.stream_id, invalid, ask.now_s)]
        arrival_s, returns, placed = ask.now_s - ask.waited_s, 0, False
        returned = ask.failed is not None and ask.failed.returned
        if (remembered := self._assignments.get(ask.request_id)) is not None:
            if (repeated := self._repeat(ask, remembered)) is not None:
                return [repeated]
            arrival_s = min(arrival_s, remembered.arrival_s)
            returns, placed = remembered.returns + returned, True
        if ask.resumed or ask.excused_s:
            placed = True
            self._forget_lost(ask)
        self._totals.returned += returned
        return self._admit(ask, arrival_s, returns, placed)

    def _repeat(self, ask: Asked, remembered: Assigned) -> SendAssignment | None:
        """The same assignment again, or None (and it is forgotten) if it no longer holds.

        It does not hold if it failed or if the group has another epoch by now.
        """
        failed, load = ask.failed, self._groups.at_epoch(*remembered.place)
        if load is not None:
            if failed is None or (failed.group_id, failed.epoch) != remembered.place:
                group, returns = load.group, remembered.returns
                return self._assignment(ask.stream_id, ask.request_id, group, returns)
            if not failed.returned:
                # The worker is ahead of our view, or gone; else it would be offered again.
                self._groups.forget_report(load)
        self._forget(ask.request_id)
        return None

    def _forget_lost(self, ask: Asked) -> None:
        """Forget the load of the worker that a request has lost.

        Its gateway may know an older epoch of the group. If another worker leads it now, that one
        gets nothing until its next report, which is soon.
        """
        failed = ask.failed
        if failed is None or failed.returned:
            return
        if (load := self._groups.of_id(failed.group_id)) is not None:
            self._groups.forget_report(load)

    def _admit(self, ask: Asked, arrival_s: float, returns: int, placed: bool) -> list[Command]:
        """Let a request wait, or refuse it; then serve the line."""
        model = self._groups.of_model(ask.model)
        start_tokens = _start_tokens(ask, model)
        counted_s = arrival_s
        if ask.excused_s:
            counted_s = max(arrival_s, ask.now_s - ask.waited_s + ask.excused_s)
        refused = self._admission.refusal(ask, model, counted_s, placed)
        meter = self._demand_meter(ask)
        if meter is not None and not placed and (refused is None or refused.for_want_of_room):
            meter.arrived.add(start_tokens, ask.now_s)
        if refused is not None:
            if meter is not None and refused.for_want_of_room:
                meter.refused.add(start_tokens, ask.now_s)
            return [self._refusal(ask, ask.stream_id, refused, ask.now_s)]
        displaced = self._admission.displaced(ask, placed)
        refusals = [] if displaced is None else [self._end(*displaced, ask.now_s)]
        paced = model is not None and not self.rules.is_batch(ask.service)
        if model is not None and paced and not self._waiting_online(ask.model):
            model.meter.pace.begin(ask.now_s)
        waiting = Waiting(
            ask, ask.stream_id, arrival_s, counted_s, start_tokens, returns=returns, placed=placed
        )
        if ask.alone:
            waiting.alone_until_s = ask.now_s + ALONE_S
        if ask.resumed:
            waiting.spread_until_s = ask.now_s + self.spread_s
        self._queue.push(waiting)
        ticket = SendTicket(ask.stream_id, ask.request_id)
        return [*refusals, ticket, *self._dispatch(ask.model, ask.now_s)]

    def _demand_meter(self, ask: Asked) -> DemandMeter | None:
        """What measures the demand for a model; None if a request is no demand for known groups."""
        model = self._groups.of_model(ask.model)
        return None if model is None or self.rules.is_batch(ask.service) else model.meter

    def _give_up(self, event: Withdrawn | GatewayGone) -> None:
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
        for request_id in self._assignments.lapsed(now_s):
            self._forget(request_id)
        self._groups.watch(now_s)
        commands: list[Command] = []
        for model in self._queue.models():
            commands += self._dispatch(model, now_s)
        return commands

    def _dispatch(self, name: str, now_s: float) -> list[Command]:
        """Serve the line of a model for as long as some group has room for the next request."""
        model = self._groups.of_model(name)
        if model is None:
            return self._refuse_waiting(name, now_s)
        commands = list[Command]()
        model.drop_lapsed(now_s)
        picked: GroupLoad | None = None
        held_tokens = inf  # groups that can hold so many wait for a request that holds the line
        kept_tokens = inf  # groups that can hold so many start no batch request
        spread = False  # groups that are behind start nothing

        def fits(waiting: Waiting) -> bool:
            nonlocal picked, spread
            ask, below_tokens = waiting.ask, held_tokens
            if self.rules.is_batch(ask.service):
                below_tokens = min(held_tokens, kept_tokens)
            spread = spread or now_s < waiting.spread_until_s
            if now_s < waiting.alone_until_s:
                picked = model.index_for(ask).idle(ask.prompt_tokens, ask.max_tokens, now_s)
            else:
                avoided = waiting.avoided(now_s)
                picked = model.pick(ask, now_s, below_tokens, avoided, spread=spread)
            return picked is not None

        def holds_all(waiting: Waiting) -> bool:
            nonlocal held_tokens
            if now_s < waiting.alone_until_s:
                return False
            held_tokens = min(held_tokens, waiting.ask.prompt_tokens + waiting.ask.max_tokens)
            return model.index.tokens_min >= held_tokens

        def wants(waiting: Waiting) -> bool:
            ask = waiting.ask
            return picked is not None and could_hold(picked, ask.prompt_tokens, ask.max_tokens)

        while True:
            commands += self._refuse_waiting(name, now_s)
            held_tokens, kept_tokens = inf, self._kept_from_batch(name, model)
            spread = False
            line = (one for one in self._queue.line(name) if model.can_hold(one.ask))
            first = next_to_start(line, fits, self.overtaken_max, holds_all)
            if first is None or picked is None:
                return commands
            start(self._queue.line(name), first, wants)
            commands.append(self._assign(first, picked, model, now_s))

    def _waiting_online(self, name: str) -> int:
        """How many requests of a model wait that are not batch requests, where classes count."""
        return self._queue.wanted(name, self.rules.demanding)[0]

    def _kept_from_batch(self, name: str, model: ModelGroups) -> float:
        """Groups that can hold so many tokens are kept for an online request that waits.

        Groups that are divided by class never want the same one.
        """
        least = inf
        if not self.rules.on or model.divided or not self._waiting_online(name):
            return least
        tokens_min = model.index.tokens_min
        for waiting in self._queue.line(name):
            if waiting.ask.service.online:
                least = min(least, waiting.ask.prompt_tokens + waiting.ask.max_tokens)
                if least <= tokens_min:
                    break  # all groups can hold it
        return least

    def _refuse_waiting(self, model: str, now_s: float) -> list[Command]:
        """Refuse requests that are late, and the first of the line while no group can hold it."""
        commands: list[Command] = []
        while (hopeless := self._admission.refusal_in_line(model, now_s)) is not None:
            commands.append(self._end(*hopeless, now_s))
        return commands

    def _end(self, waiting: Waiting, refused: NotAdmitted, now_s: float) -> SendRefusal:
        """Take a request out of the queue and refuse it."""
        ask = waiting.ask
        self._queue.remove(ask.request_id)
        meter = self._demand_meter(ask)
        if meter is not None and refused.for_want_of_room:
            meter.refused.add(waiting.start_tokens, now_s)
        return self._refusal(ask, waiting.stream_id, refused, now_s)

    def _assign(
        self, waiting: Waiting, load: GroupLoad, model: ModelGroups, now_s: float
    ) -> SendAssignment:
        ask, group = waiting.ask, load.group
        self._queue.start(ask.request_id)
        tokens_max = ask.prompt_tokens + ask.max_tokens
        blocks = admission_blocks(ask.prompt_tokens, tokens_max, group.block_size)
        computed = model.reserve(load, ask, blocks, now_s)
        self._totals.prompt_tokens += ask.prompt_tokens
        self._totals.cached_tokens += ask.prompt_tokens - computed
        self._assignments.remember(
            ask.request_id,
            Assigned(group.group_id, group.epoch, waiting.arrival_s, now_s, waiting.returns),
        )
        if now_s < waiting.alone_until_s:
            load.keep_for(ask.request_id, now_s)
        self._rates.note(ask.service.service_class, now_s)
        model.meter.dispatched.note(ask.service.service_class, now_s)
        if not self.rules.is_batch(ask.service):
            model.meter.pace.note(now_s)
        self._totals.assigned += 1
        return self._assignment(waiting.stream_id, ask.request_id, group, waiting.returns)

    def _assignment(
        self, stream_id: int, request_id: str, group: ServingGroup, returns: int
    ) -> SendAssignment:
        model = self._groups.of_model(group.model)
        elsewhere = model is not None and len(model.index.loads) > 1
        return SendAssignment(
            request_id,
            group.group_id,
            group.epoch,
            group.worker_id,
            group.address,
            returnable=elsewhere and returns < RETURNS_MAX,
            stream_id=stream_id,
        )

    def _forget(self, request_id: str) -> None:
        """Drop the memory of an assignment, and its reservation if it still has one."""
        assigned = self._assignments.forget(request_id)
        if assigned is not None:
            self._groups.release(assigned.group_id, request_id)

    def _refusal(
        self, ask: Asked, stream_id: int, refused: NotAdmitted, now_s: float
    ) -> SendRefusal:
        self._totals.refused[refused.reason] += 1
        self._totals.refused_of_class[ask.service.service_class] += 1
        wait_s = refused.retry_after_s
        if refused.for_want_of_room:
            wait_s = self._admission.retry_after_s(ask, now_s)
        return SendRefusal(
            ask.request_id,
            refused.message,
            wait_s,
            reason=refused.reason,
            stream_id=stream_id,
        )


def _start_tokens(ask: Asked, model: ModelGroups | None) -> int:
    """KV in tokens that must be free before a request can run."""
    block_size = model.index.block_size if model is not None else 1
    tokens_max = ask.prompt_tokens + ask.max_tokens
    return admission_blocks(ask.prompt_tokens, tokens_max, block_size) * block_size
