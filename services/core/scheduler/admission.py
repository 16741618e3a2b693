"""Admission control of the scheduler: decides which requests are refused, with which Retry-After.

An ask is a gateway's request for an assignment. A resumed request has run before and sent output; a
requeued request was assigned, and returned by its worker or lost before its first output.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from services.core.ask import AVOIDED_MAX, RefusalReason
from services.core.ids import NAME_LENGTH_MAX
from services.core.prefix.block_hash import THIN_MAX
from services.core.scheduler.adapter_places import supports
from services.core.scheduler.assignments import Totals
from services.core.scheduler.class_rules import NO_CLASSES, ClassRules
from services.core.scheduler.group_table import REGROUP_S, GroupTable, ModelGroups
from services.core.scheduler.lateness import Estimate, Lateness
from services.core.scheduler.queue import Waiting, WaitQueue
from services.core.scheduler.rate import RATE_WINDOW_S, ClassRates, retry_after_s
from services.core.scheduler.vocabulary import Asked, Late, SendRefusal
from services.core.service import Service

TOKENS_MAX = 2**31 - 1
AWAY_RETRY_S = 10.0
"""Retry-After while no worker serves a model; about the start time of a worker."""
WAVE_MARGIN = 2
"""Safety factor on the measured pace, which varies: requests that start together end together."""
WAITING_MODELS_MAX = 256
"""Most models with waiting requests, as each may have as many as the limit of the queue."""
_OVERLOAD = (RefusalReason.QUEUE_FULL, RefusalReason.EXPIRED, RefusalReason.TOO_LATE)


@dataclass(frozen=True, slots=True)
class NotAdmitted:
    """A refusal: its reason, and a message with cause and remedy.

    `retry_after_s` None: a retry is pointless, or `Admission.retry_after_s` computes it
    (`is_overload`). `late`: the numbers of a refusal for lateness.
    """

    reason: RefusalReason
    message: str
    retry_after_s: float | None = None
    late: Late | None = None

    @property
    def is_overload(self) -> bool:
        """Whether more KV memory would have avoided the refusal."""
        return self.reason in _OVERLOAD


@dataclass(slots=True)
class Admission:
    """Decides which requests may wait in the queue, by its length and the known groups.

    Reads the caller's queue, groups and rates, and counts refusals in `totals`.
    """

    queue: WaitQueue
    groups: GroupTable
    # Dispatch rates over all models.
    rates: ClassRates
    # Most waiting requests of each model.
    queue_limit: int
    queue_deadline_s: float
    lateness: Lateness
    rules: ClassRules = NO_CLASSES
    totals: Totals = field(default_factory=Totals)
    # KV tokens that each model lacks even if all its groups merge.
    shortfalls: dict[str, int] = field(default_factory=dict)

    def refusal(
        self,
        ask: Asked,
        model: ModelGroups | None,
        deadline_start_s: float,
        was_assigned: bool,
        estimate: Estimate | None = None,
    ) -> NotAdmitted | None:
        """The refusal of a request for `model`; None if it may wait.

        `deadline_start_s`, `was_assigned`: as in `Waiting`. `estimate`: None if it is never
        late. Only requests that were never assigned are refused for lack of slots or as late. If
        the model's last group has left, a new request waits for `REGROUP_S`, a requeued request
        until its deadline, and a resumed request without a limit.
        """
        refused = None
        if model is not None:
            refused = self._refuse_too_large(ask, model)
            if refused is None and _is_new(ask):
                refused = check_adapter(ask, model)
        elif _is_new(ask):
            refused = self._refuse_unserved(ask, ask.now_s)
        # Output of a resumed request has been sent to its client: it has no deadline and no limit.
        if refused is not None or ask.resumed:
            return refused
        if ask.now_s - deadline_start_s >= self._deadline_s(ask.service):
            return self._expired(ask.service)
        if was_assigned:
            return None
        if self.lateness.factor:
            late = self._refuse_late(ask, model, deadline_start_s, estimate)
            return late or self._refuse_queue_full(ask)
        return self._refuse_queue_full(ask) or self._refuse_too_late(ask, model, deadline_start_s)

    def displaced(self, ask: Asked, was_assigned: bool) -> tuple[Waiting, NotAdmitted] | None:
        """The request that an admitted `ask` displaces from a full queue, with that refusal."""
        taken = None if ask.resumed or was_assigned else self._taken_slots(ask)
        if taken is None:
            return None
        waiting = self.queue.victim_for(ask.model, ask.service)
        assert waiting is not None, "a full queue refuses requests that displace none"
        alike = waiting.ask.service.service_class is ask.service.service_class
        by = "a request of an owner with fewer requests" if alike else "a more urgent request"
        return waiting, NotAdmitted(
            RefusalReason.QUEUE_FULL, f"{taken} are taken; {by} displaced this one; retry later"
        )

    def late_waiting(
        self, name: str, now_s: float, walk: bool
    ) -> list[tuple[Waiting, NotAdmitted]]:
        """The waiting requests for the model `name` that are too late; see `Lateness`."""
        model = self.groups.of_model(name)
        if model is None:
            return []
        short = bool(self.shortfalls.get(name))
        late = self.lateness.late_waiting(name, model, short, now_s, walk)
        return [(waiting, _too_late(reason)) for waiting, reason in late]

    def next_refusal(self, name: str, now_s: float) -> tuple[Waiting, NotAdmitted] | None:
        """A waiting request for the model `name` that must be refused now, with its refusal.

        This is an expired request, else the first request in the queue if no group can hold it: it
        may have arrived before any group of its model was known. Resumed requests that wait for a
        larger group are skipped.
        """
        for oldest in self.queue.oldest(name):
            if now_s - oldest.deadline_start_s >= self._deadline_s(oldest.ask.service):
                return oldest, self._expired(oldest.ask.service)
        model = self.groups.of_model(name)
        if model is None:
            return self._next_unserved(name, now_s)
        for waiting in self.queue.in_order(name):
            if model.can_hold(waiting.ask):
                break
            if (refused := self._refuse_too_large(waiting.ask, model)) is not None:
                return waiting, refused
        return self._next_without_adapter(name, model, now_s)

    def _next_without_adapter(
        self, name: str, model: ModelGroups, now_s: float
    ) -> tuple[Waiting, NotAdmitted] | None:
        """A resumed request whose adapter no group has supported for as long as others wait.

        Resumed requests have no deadline, and are first in the queue.
        """
        for waiting in self.queue.in_order(name):
            ask = waiting.ask
            if not ask.resumed:
                return None
            refused = check_adapter(ask, model)
            if refused is not None and now_s - ask.now_s >= self._deadline_s(ask.service):
                return waiting, refused
        return None

    def retry_after_s(self, ask: Asked, now_s: float) -> float:
        """Seconds until the requests before `ask` have left the queue, at the recent rates.

        The queue of its model counts; while no group of the model is known, that of all models.
        If the policy uses classes: the longer of the time for the requests of its class, and of
        the time for all classes that may precede it.
        """
        rules, service, queue = self.rules, ask.service, self.queue
        model = self.groups.of_model(ask.model)
        rates = self.rates if model is None else model.meter.dispatched
        waits = []
        for classes in {rules.rate_classes(service), rules.classes_ahead(service)}:
            of_model = model is not None
            queued = queue.demand(ask.model, classes)[0] if of_model else queue.count(classes)
            waits.append(retry_after_s(queued, rates.per_s(classes, now_s)))
        return max(waits)

    def refuse(
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
        self.totals.refused[refused.reason] += 1
        self.totals.refused_of_class[service_class] += 1
        message, wait_s, booked, retry = refused.message, refused.retry_after_s, False, None
        model = self.groups.of_model(ask.model)
        if refused.is_overload:
            if model is not None and refused.reason is not RefusalReason.EXPIRED and start_tokens:
                retry = self.lateness.retry(ask, model, start_tokens, arrival_s, now_s)
            wait_s, booked = retry or (self.retry_after_s(ask, now_s), False)
            if refused.late is not None and model is not None:
                self.totals.refused_late[ask.model, service_class, refused.late.by] += 1
                model.meter.late.note(service_class, refused.late, wait_s, now_s)
                message += f"; retry in {wait_s:.0f} s"
        return SendRefusal(
            ask.request_id,
            message,
            wait_s,
            reason=refused.reason,
            stream_id=stream_id,
            booked=booked,
            estimated=ask.estimated,
            late=refused.late,
        )

    def _next_unserved(self, name: str, now_s: float) -> tuple[Waiting, NotAdmitted] | None:
        """The first new request whose model's groups have not come within `REGROUP_S`.

        It has waited since the last group left, or since it arrived before any group was known.
        """
        left_s = self.groups.left_s(name)
        if left_s is not None and now_s < left_s + REGROUP_S:
            return None
        if left_s is None and not self.groups.models:
            return None
        for waiting in self.queue.in_order(name):
            asked_s = waiting.ask.now_s
            due = now_s >= asked_s + REGROUP_S if left_s is None else asked_s >= left_s
            if due and _is_new(waiting.ask) and not waiting.was_assigned:
                refused = self._refuse_unserved(waiting.ask, now_s)
                return None if refused is None else (waiting, refused)
        return None

    def _refuse_unserved(self, ask: Asked, now_s: float) -> NotAdmitted | None:
        """Refuse a new request of an unserved model, unless its last group has just left."""
        left_s = self.groups.left_s(ask.model)
        if left_s is not None and now_s < left_s + REGROUP_S:
            longest = self.groups.longest_served(ask.model)
            return check_size(ask.prompt_tokens, ask.max_tokens, longest)
        return check_model(ask.model, self.groups.models, self.groups.models_served)

    def _refuse_too_large(self, ask: Asked, model: ModelGroups) -> NotAdmitted | None:
        """Refuse a request that no group can hold; a resumed request, if no group ever could."""
        longest = model.index.tokens_max
        if ask.resumed and longest is not None:
            longest = max(longest, self.groups.longest_served(ask.model))
        return check_size(ask.prompt_tokens, ask.max_tokens, longest)

    def _refuse_late(
        self,
        ask: Asked,
        model: ModelGroups | None,
        deadline_start_s: float,
        estimate: Estimate | None,
    ) -> NotAdmitted | None:
        """Refuse a new request that would get its first token too late."""
        if model is None:
            return None
        short = bool(self.shortfalls.get(ask.model))
        late = self.lateness.late(ask, model, deadline_start_s, estimate, short)
        return None if late is None else _too_late(late)

    def _refuse_too_late(
        self, ask: Asked, model: ModelGroups | None, deadline_start_s: float
    ) -> NotAdmitted | None:
        """Refuse a new request that would expire anyway, if no merge can provide more KV.

        An ask with `failed` is not refused either: it proves an earlier assignment, which a
        restarted scheduler does not remember. Nor are batch requests, whose deadline is long.
        """
        if self.rules.is_batch(ask.service):
            return None
        if model is None or ask.failed is not None or not self.shortfalls.get(ask.model):
            return None
        left_s = deadline_start_s + self.queue_deadline_s - ask.now_s
        window_s = max(RATE_WINDOW_S, self.queue_deadline_s)
        rate_per_s = model.meter.pace.per_s(ask.now_s, window_s)
        if rate_per_s is None:
            return None
        queued = self.queue.demand(ask.model, self.rules.classes_ahead(ask.service))[0]
        return check_wait(queued, rate_per_s, left_s)

    def _refuse_queue_full(self, ask: Asked) -> NotAdmitted | None:
        """Refuse a new request if the queue is full and it can displace no other request."""
        taken = self._taken_slots(ask)
        if taken is None or self.queue.victim_for(ask.model, ask.service) is not None:
            return None
        return NotAdmitted(RefusalReason.QUEUE_FULL, f"{taken} are taken; retry later")

    def _taken_slots(self, ask: Asked) -> str | None:
        """Describe the queue slots of the model if all are taken, for a message; else None."""
        batch_limit, queue = self.rules.batch_queue_limit, self.queue
        queued = queue.demand(ask.model)[0]
        if queued >= self.queue_limit:
            return f"all {self.queue_limit} queue slots of the model"
        if not queued and len(queue.models()) >= WAITING_MODELS_MAX:
            return f"the queues of all {WAITING_MODELS_MAX} models"
        batch, service_class = self.rules.is_batch(ask.service), ask.service.service_class
        if batch and queue.demand(ask.model, (service_class,))[0] >= batch_limit:
            return f"all {batch_limit} queue slots for batch requests"
        return None

    def _deadline_s(self, service: Service) -> float:
        """Longest wait of a request of this class."""
        if self.rules.is_batch(service):
            return self.rules.batch_queue_deadline_s
        return self.queue_deadline_s

    def _expired(self, service: Service) -> NotAdmitted:
        return NotAdmitted(
            RefusalReason.EXPIRED,
            f"no worker had room within {self._deadline_s(service):g} s; retry later",
        )


def _is_new(ask: Asked) -> bool:
    """Whether the request was never assigned to a worker, as far as its gateway reports."""
    return not ask.resumed and ask.failed is None


def check_fields(ask: Asked) -> NotAdmitted | None:
    """Refuse an ask with fields that no correct gateway sends."""
    # Protobuf allows these values, but they would break arithmetic and bounded tables here.
    if not 1 <= len(ask.request_id) <= NAME_LENGTH_MAX:
        cause = f"request_id must have 1 to {NAME_LENGTH_MAX} characters"
    elif not 1 <= len(ask.model) <= NAME_LENGTH_MAX:
        cause = f"model must have 1 to {NAME_LENGTH_MAX} characters"
    elif not 1 <= ask.prompt_tokens <= TOKENS_MAX:
        cause = f"prompt_tokens is {ask.prompt_tokens}, but must be at least 1"
    elif not 1 <= ask.max_tokens <= TOKENS_MAX:
        cause = f"max_tokens is {ask.max_tokens}, but must be at least 1"
    elif not (math.isfinite(ask.waited_s) and 0 <= ask.excused_s <= ask.waited_s):
        cause = f"waited_s {ask.waited_s}, excused_s {ask.excused_s}: need 0 <= excused <= waited"
    elif len(ask.prefix.hashes) > THIN_MAX:
        cause = f"the prefix has {len(ask.prefix.hashes)} hashes, but may have at most {THIN_MAX}"
    elif len(ask.avoided) > AVOIDED_MAX or not math.isfinite(ask.avoided_s):
        cause = f"at most {AVOIDED_MAX} avoided_addresses are allowed, and avoided_s must be finite"
    elif ask.failed is not None and ask.failed.epoch < 0:
        cause = f"refused_epoch is {ask.failed.epoch}, but must be 0 or more"
    elif (fault := ask.service.fault() or ask.adapter_fault()) is not None:
        cause = fault
    else:
        return None
    return NotAdmitted(RefusalReason.INVALID, f"invalid request: {cause}")


def check_model(
    model: str, known_models: Collection[str], served_before: Collection[str]
) -> NotAdmitted | None:
    """Refuse a model that no group serves, unless no group serves any model yet.

    A retry makes sense: gateways ask only for models that they are configured to serve.
    """
    if not known_models or model in known_models:
        return None
    if model in served_before:
        return NotAdmitted(
            RefusalReason.UNKNOWN_MODEL,
            "the workers of this model are unavailable; retry shortly",
            AWAY_RETRY_S,
        )
    # Names no other models: the client's key may not permit them.
    return NotAdmitted(
        RefusalReason.UNKNOWN_MODEL,
        "no worker serves this model yet; start one, or choose another model of /v1/models",
        AWAY_RETRY_S,
    )


def check_adapter(ask: Asked, model: ModelGroups) -> NotAdmitted | None:
    """Refuse a request with an adapter that no group of its model can load."""
    adapter, loads = ask.adapter, model.index.loads.values()
    if adapter is None or any(supports(load, adapter) for load in loads):
        return None
    rank_max = max(load.group.adapter_rank_max for load in loads)
    if rank_max:
        cause = f"loads adapters of rank {adapter.rank}, only up to {rank_max}"
        remedy = f"set their 'adapter_rank_max' to {adapter.rank} or more"
    else:
        cause, remedy = "loads adapters", "start workers with `engine: vllm` and 'adapter_slots'"
    return NotAdmitted(
        RefusalReason.UNKNOWN_MODEL,
        f"no worker of {ask.model} {cause}, as '{adapter.name}' needs; {remedy}",
        AWAY_RETRY_S,
    )


def check_size(prompt_tokens: int, max_tokens: int, longest: int | None) -> NotAdmitted | None:
    """Refuse a sequence longer than `longest`, the tokens that the largest group can hold.

    `longest` None: no group is known, so nothing is refused.
    """
    if longest is None or prompt_tokens + max_tokens <= longest:
        return None
    return NotAdmitted(
        RefusalReason.TOO_LARGE,
        f"the prompt has {prompt_tokens} tokens and up to {max_tokens} more are requested, "
        f"but the longest sequence that a worker can hold is {longest} tokens; "
        "shorten the prompt or request fewer tokens",
    )


def _too_late(late: Late) -> NotAdmitted:
    return NotAdmitted(
        RefusalReason.TOO_LATE,
        f"the first token may take up to {late.wait_s:.1f} s, but is due in"
        f" {max(0.0, late.left_s):.1f} s: {late.ahead_tokens} tokens are ahead, and"
        f" {late.rate:.0f} start per second, limited by {late.by}",
        late=late,
    )


def check_wait(queued: int, rate_per_s: float, left_s: float) -> NotAdmitted | None:
    """Refuse a request that would expire in the queue.

    `queued` requests precede it, the queue dispatches `rate_per_s`, and its deadline is `left_s`
    seconds away.
    """
    if queued <= WAVE_MARGIN * rate_per_s * left_s:
        return None
    return NotAdmitted(
        RefusalReason.QUEUE_FULL,
        f"{queued} requests wait already, more than twice as many as all workers start within"
        f" {left_s:g} s at their recent pace; retry later",
    )
