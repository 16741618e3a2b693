"""The scheduler's decisions: a bounded queue, and late binding to groups with room.

Every ask ends exactly once: assigned, refused or withdrawn. Asking again under the same id is
safe: a waiting request gets its ticket again, an assigned one its assignment.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from services.core.ask import RefusalReason
from services.core.demand import ModelDemand
from services.core.overtaking import OVERTAKEN_MAX, next_to_start, start
from services.core.request import admission_blocks
from services.core.scheduler.admission import (
    RATE_WINDOW_S,
    DispatchRate,
    Refused,
    check_fields,
    check_model,
    check_size,
    check_wait,
    retry_after_s,
)
from services.core.scheduler.demand import DemandMeter
from services.core.scheduler.dispatch import ScoreFunction, kv_share
from services.core.scheduler.group_index import GroupIndex
from services.core.scheduler.group_load import GROWTH_BLOCKS, GroupLoad
from services.core.scheduler.queue import Waiting, WaitQueue
from services.core.scheduler.vocabulary import (
    Asked,
    Command,
    Event,
    GatewayGone,
    Group,
    GroupJoined,
    GroupLeft,
    LoadLost,
    LoadReported,
    SendAssignment,
    SendRefusal,
    SendTicket,
    ShortfallsTold,
    Snapshot,
    Ticked,
    Withdrawn,
)
from services.core.steadiness import Attention, Steadiness

REMEMBERED_S = 60.0
REMEMBERED_MAX = 10_000
MODELS_REMEMBERED_MAX = 1_000
RETURNS_MAX = 3
"""Workers that may give a request back; the next one keeps it."""

_FOR_WANT_OF_ROOM = (RefusalReason.QUEUE_FULL, RefusalReason.EXPIRED)


@dataclass(frozen=True, slots=True)
class _Assigned:
    """A recent assignment, kept so that a repeated ask gets the same answer."""

    group_id: str
    epoch: int
    arrival_s: float
    assigned_s: float
    returns: int = 0


@dataclass(slots=True)
class SchedulerState:
    """Admission, queue and dispatch.

    `score` ranks groups, less is better; for `overtaken_max` see `overtaking`, for `growth_blocks`
    `GroupLoad`.
    """

    queue_limit: int
    queue_deadline_s: float
    score: ScoreFunction = kv_share
    overtaken_max: int = OVERTAKEN_MAX
    growth_blocks: int = GROWTH_BLOCKS
    _groups: dict[str, GroupLoad] = field(default_factory=dict)
    _by_model: dict[str, GroupIndex] = field(default_factory=dict)
    _meters: dict[str, DemandMeter] = field(default_factory=dict)
    _group_of_worker: dict[str, str] = field(default_factory=dict)
    _served_before: set[str] = field(default_factory=set)
    _queue: WaitQueue = field(default_factory=WaitQueue)
    _assigned: OrderedDict[str, _Assigned] = field(default_factory=OrderedDict)
    _rate: DispatchRate = field(default_factory=DispatchRate)
    _shortfalls: dict[str, int] = field(default_factory=dict)
    _steadiness: Steadiness = field(default_factory=Steadiness)
    _attention: Attention = field(default_factory=Attention)
    _assigned_total: int = 0
    _withdrawn_total: int = 0
    _returned_total: int = 0
    _refused_total: dict[RefusalReason, int] = field(
        default_factory=lambda: dict.fromkeys(RefusalReason, 0)
    )

    def handle(self, event: Event) -> list[Command]:
        """Apply one event; return what the driver must send, in order."""
        match event:
            case Asked():
                return self._ask(event)
            case LoadReported():
                return self._note_load(event)
            case Ticked():
                return self._tick(event.now_s)
            case Withdrawn() | GatewayGone():
                self._give_up(event)
            case GroupJoined():
                self._join(event.group, event.now_s)
            case GroupLeft():
                self._leave(event.group_id)
            case LoadLost():
                self._lose_load(event)
            case ShortfallsTold():
                self._shortfalls = event.shortfalls
        return []

    def snapshot(self, now_s: float) -> Snapshot:
        """The state in numbers."""
        oldest_s = self._queue.oldest_arrival_s()
        return Snapshot(
            queued=len(self._queue),
            oldest_wait_s=max(0.0, now_s - oldest_s) if oldest_s is not None else 0.0,
            groups_known=len(self._groups),
            groups_serving=sum(load.is_fresh(now_s) for load in self._groups.values()),
            reserved_blocks=sum(load.reserved_blocks for load in self._groups.values()),
            dispatch_rate_per_s=self._rate.per_s(now_s),
            assigned_total=self._assigned_total,
            withdrawn_total=self._withdrawn_total,
            returned_total=self._returned_total,
            refused_total=dict(self._refused_total),
            queue_deadline_s=self.queue_deadline_s,
            queued_by_model={
                model: self._queue.wanted(model)[0]
                for model in sorted({*self._by_model, *self._queue.models()})
            },
        )

    def demands(self, now_s: float) -> tuple[ModelDemand, ...]:
        """Demand for the groups of each model, now and in the last seconds."""
        found = []
        for model, meter in self._meters.items():
            queued, queued_tokens = self._queue.wanted(model)
            refused, refused_tokens = meter.refused.at(now_s)
            rate = meter.arrived_tokens_per_s(now_s)
            if queued or refused or rate:
                found.append(
                    ModelDemand(model, queued, queued_tokens, refused, refused_tokens, rate)
                )
        return tuple(found)

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        self._queue.check_invariants()
        self._steadiness.check_invariants()
        # A request that a worker has given back has had a place already.
        waiting = [one for model in self._queue.models() for one in self._queue.line(model)]
        assert sum(not one.returns for one in waiting) <= self.queue_limit
        assert len(self._assigned) <= REMEMBERED_MAX
        assert not any(self._queue.get(request_id) for request_id in self._assigned)
        for group_id, load in self._groups.items():
            load.check_invariants()
            assert load.group.group_id == group_id
            assert self._by_model[load.group.model].loads[group_id] is load
        assert sum(len(index.loads) for index in self._by_model.values()) == len(self._groups)
        for index in self._by_model.values():
            assert index.loads
            index.check_invariants()
        assert set(self._group_of_worker.values()) <= set(self._groups)
        assert self._meters.keys() == self._by_model.keys()

    # --- asks

    def _ask(self, ask: Asked) -> list[Command]:
        if self._queue.get(ask.request_id) is not None:
            self._queue.move(ask.request_id, ask.stream_id)
            return [SendTicket(ask.stream_id, ask.request_id)]
        invalid = check_fields(ask)
        if invalid is not None:
            return [self._refusal(ask, invalid, ask.now_s)]
        arrival_s, returns = ask.now_s - ask.waited_s, 0
        remembered = self._assigned.get(ask.request_id)
        if remembered is not None:
            repeated = self._repeat(ask, remembered)
            if repeated is not None:
                return [repeated]
            arrival_s = min(arrival_s, remembered.arrival_s)
            returns = remembered.returns + ask.returned
        self._returned_total += ask.returned
        start_tokens = self._start_tokens(ask)
        meter = self._meters.get(ask.model)
        refused = self._refusal_of(ask, arrival_s, returns)
        if (
            meter is not None
            and not returns
            and (refused is None or refused.reason in _FOR_WANT_OF_ROOM)
        ):
            meter.arrived.add(start_tokens, ask.now_s)
        if refused is not None:
            if meter is not None and refused.reason in _FOR_WANT_OF_ROOM:
                meter.refused.add(start_tokens, ask.now_s)
            return [self._refusal(ask, refused, ask.now_s)]
        if meter is not None and not self._queue.wanted(ask.model)[0]:
            meter.pace.begin(ask.now_s)
        self._queue.push(
            Waiting(
                ask.request_id,
                ask.stream_id,
                ask.model,
                ask.prompt_tokens,
                ask.max_tokens,
                arrival_s,
                start_tokens,
                returns=returns,
            )
        )
        return [SendTicket(ask.stream_id, ask.request_id), *self._dispatch(ask.model, ask.now_s)]

    def _repeat(self, ask: Asked, remembered: _Assigned) -> SendAssignment | None:
        """The same assignment again, or None (and it is forgotten) if it no longer holds.

        It does not hold if it failed or if the group has another epoch by now.
        """
        load = self._groups.get(remembered.group_id)
        current = load is not None and load.group.epoch == remembered.epoch
        refused = (ask.refused_group_id, ask.refused_epoch)
        if load is not None and current and refused != (remembered.group_id, remembered.epoch):
            return self._assignment(ask.stream_id, ask.request_id, load.group, remembered.returns)
        if load is not None and current and not ask.returned:
            # The worker is ahead of our view, or gone; without this it would be offered again.
            self._forget_report(load)
        self._forget(ask.request_id)
        return None

    def _refusal_of(self, ask: Asked, arrival_s: float, returns: int) -> Refused | None:
        refused = check_model(ask.model, self._by_model, self._served_before)
        refused = refused or self._check_size(ask.model, ask.prompt_tokens, ask.max_tokens)
        if refused is not None:
            return refused
        if ask.now_s - arrival_s >= self.queue_deadline_s:
            return self._expired()
        if len(self._queue) >= self.queue_limit and not returns:
            return Refused(
                RefusalReason.QUEUE_FULL,
                f"all {self.queue_limit} places in the queue are taken; retry later",
            )
        return self._too_late(ask, arrival_s)

    def _too_late(self, ask: Asked, arrival_s: float) -> Refused | None:
        """Refuses a newcomer that would expire, where no merge can make room.

        A request that had a place before is not refused now.
        """
        meter = self._meters.get(ask.model)
        if meter is None or ask.refused_epoch or not self._shortfalls.get(ask.model):
            return None
        left_s = arrival_s + self.queue_deadline_s - ask.now_s
        window_s = max(RATE_WINDOW_S, self.queue_deadline_s)
        rate_per_s = meter.pace.per_s(ask.now_s, window_s)
        return check_wait(self._queue.wanted(ask.model)[0], rate_per_s, left_s)

    def _check_size(self, model: str, prompt_tokens: int, max_tokens: int) -> Refused | None:
        index = self._by_model.get(model)
        longest = index.tokens_max if index is not None else None
        return check_size(prompt_tokens, max_tokens, longest)

    def _start_tokens(self, ask: Asked) -> int:
        """KV in tokens that must be free before it can run."""
        index = self._by_model.get(ask.model)
        block_size = index.block_size if index is not None else 1
        tokens_max = ask.prompt_tokens + ask.max_tokens
        return admission_blocks(ask.prompt_tokens, tokens_max, block_size) * block_size

    def _give_up(self, event: Withdrawn | GatewayGone) -> None:
        if isinstance(event, Withdrawn):
            self._withdraw(event.request_id)
            return
        for request_id in self._queue.of_stream(event.stream_id):
            self._withdraw(request_id)

    def _withdraw(self, request_id: str) -> None:
        if self._queue.get(request_id) is not None:
            self._queue.remove(request_id)
            self._withdrawn_total += 1
        else:
            self._forget(request_id)

    # --- groups

    def _join(self, group: Group, now_s: float) -> None:
        known = self._groups.get(group.group_id)
        if known is not None and known.group == group:
            return
        # Demand does not change with the groups: its measure survives the model's only group.
        meter = self._meters.get(group.model)
        self._leave(group.group_id)
        load = GroupLoad(group, self.growth_blocks)
        load.flaps = self._steadiness.flaps(group.worker_id, now_s)
        self._groups[group.group_id] = load
        if group.model not in self._by_model:
            self._by_model[group.model] = GroupIndex(self.score)
            self._meters[group.model] = meter or DemandMeter()
        self._by_model[group.model].add(load)
        self._group_of_worker[group.worker_id] = group.group_id

    def _leave(self, group_id: str) -> None:
        load = self._groups.pop(group_id, None)
        if load is None:
            return
        model, worker_id = load.group.model, load.group.worker_id
        self._by_model[model].remove(group_id)
        if not self._by_model[model].loads:
            del self._by_model[model], self._meters[model]
            if len(self._served_before) < MODELS_REMEMBERED_MAX:
                self._served_before.add(model)
        if self._group_of_worker.get(worker_id) == group_id:
            del self._group_of_worker[worker_id]

    def _note_load(self, report: LoadReported) -> list[Command]:
        load = self._groups.get(self._group_of_worker.get(report.worker_id, ""))
        if load is None or load.group.incarnation != report.incarnation:
            return []
        load.note_report(report)
        if not report.passed_on:
            self._steadiness.came(report.worker_id)
        self._by_model[load.group.model].touch(load)
        return self._dispatch(load.group.model, report.now_s)

    def _lose_load(self, lost: LoadLost) -> None:
        if self._attention.awake(lost.now_s):
            self._steadiness.left(lost.worker_id, lost.now_s)
        load = self._groups.get(self._group_of_worker.get(lost.worker_id, ""))
        if load is not None and load.group.incarnation == lost.incarnation:
            self._forget_report(load)

    def _watch_workers(self, now_s: float) -> None:
        """Remember who has fallen silent; rank groups anew whose workers flap, or do so no more."""
        awake = self._attention.look(now_s)
        for load in self._groups.values():
            worker_id = load.group.worker_id
            if awake and load.is_silent(now_s):
                self._steadiness.left(worker_id, now_s)
            flaps = self._steadiness.flaps(worker_id, now_s)
            if flaps is not load.flaps:
                load.flaps = flaps
                self._by_model[load.group.model].touch(load)

    def _forget_report(self, load: GroupLoad) -> None:
        load.forget_report()
        self._by_model[load.group.model].touch(load)

    # --- dispatch

    def _tick(self, now_s: float) -> list[Command]:
        while self._assigned:
            request_id, oldest = next(iter(self._assigned.items()))
            if oldest.assigned_s > now_s - REMEMBERED_S:
                break
            self._forget(request_id)
        self._watch_workers(now_s)
        commands: list[Command] = []
        for index in self._by_model.values():
            index.drop_lapsed(now_s)
        for model in self._queue.models():
            commands += self._dispatch(model, now_s)
        return commands

    def _dispatch(self, model: str, now_s: float) -> list[Command]:
        """Serve the model's line for as long as some group has room for the next request."""
        commands: list[Command] = []
        index = self._by_model.get(model)
        if index is None:
            return self._refuse_heads(model, now_s)
        index.drop_lapsed(now_s)
        picked: GroupLoad | None = None

        def fits(waiting: Waiting) -> bool:
            nonlocal picked
            picked = index.pick(waiting.prompt_tokens, waiting.max_tokens, now_s)
            return picked is not None

        while True:
            commands += self._refuse_heads(model, now_s)
            first = next_to_start(self._queue.line(model), fits, self.overtaken_max)
            if first is None or picked is None:
                return commands
            start(self._queue.line(model), first)
            commands.append(self._assign(first, picked, now_s))

    def _refuse_heads(self, model: str, now_s: float) -> list[Command]:
        """Refuse who is first in the line of its model for as long as that has to be."""
        commands: list[Command] = []
        while (head := self._queue.head(model)) is not None:
            refused = self._refusal_of_head(head, now_s)
            if refused is None:
                break
            self._queue.remove(head.request_id)
            if refused.reason in _FOR_WANT_OF_ROOM and model in self._meters:
                self._meters[model].refused.add(head.start_tokens, now_s)
            commands.append(self._refusal(head, refused, now_s))
        return commands

    def _refusal_of_head(self, head: Waiting, now_s: float) -> Refused | None:
        if now_s - head.arrival_s >= self.queue_deadline_s:
            return self._expired()
        # It may have been asked before any group of its model was known.
        return self._check_size(head.model, head.prompt_tokens, head.max_tokens)

    def _assign(self, waiting: Waiting, load: GroupLoad, now_s: float) -> SendAssignment:
        self._queue.remove(waiting.request_id)
        tokens_max = waiting.prompt_tokens + waiting.max_tokens
        blocks = admission_blocks(waiting.prompt_tokens, tokens_max, load.group.block_size)
        group = load.group
        self._by_model[group.model].reserve(load, waiting.request_id, blocks, now_s)
        if len(self._assigned) >= REMEMBERED_MAX:
            self._assigned.popitem(last=False)
        self._assigned[waiting.request_id] = _Assigned(
            group.group_id, group.epoch, waiting.arrival_s, now_s, waiting.returns
        )
        self._rate.note(now_s)
        meter = self._meters[group.model]
        meter.dispatched.note(now_s)
        meter.pace.note(now_s)
        self._assigned_total += 1
        return self._assignment(waiting.stream_id, waiting.request_id, group, waiting.returns)

    def _assignment(
        self, stream_id: int, request_id: str, group: Group, returns: int
    ) -> SendAssignment:
        elsewhere = len(self._by_model[group.model].loads) > 1
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
        assigned = self._assigned.pop(request_id, None)
        if assigned is not None and (load := self._groups.get(assigned.group_id)) is not None:
            load.release(request_id)
            self._by_model[load.group.model].touch(load)

    # --- refusals

    def _expired(self) -> Refused:
        return Refused(
            RefusalReason.EXPIRED,
            f"no worker had room within {self.queue_deadline_s:g} s; retry later",
        )

    def _refusal(self, asked: Asked | Waiting, refused: Refused, now_s: float) -> SendRefusal:
        self._refused_total[refused.reason] += 1
        wait_s = refused.retry_after_s
        if refused.reason in _FOR_WANT_OF_ROOM:
            wait_s = self._retry_after_s(asked, now_s)
        return SendRefusal(
            asked.request_id,
            refused.message,
            wait_s,
            reason=refused.reason,
            stream_id=asked.stream_id,
        )

    def _retry_after_s(self, asked: Asked | Waiting, now_s: float) -> float:
        """When the line of its model, or the full queue of all models, will have moved on."""
        meter = self._meters.get(asked.model)
        if meter is None or len(self._queue) >= self.queue_limit:
            queued, rate_per_s = len(self._queue), self._rate.per_s(now_s)
        else:
            queued, rate_per_s = self._queue.wanted(asked.model)[0], meter.dispatched.per_s(now_s)
        return retry_after_s(asked.request_id, queued, rate_per_s)
