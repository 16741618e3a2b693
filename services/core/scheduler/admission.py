"""Which asks are refused, and when a retry is sensible."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from services.core.ask import AVOIDED_MAX, RefusalReason
from services.core.prefix.block_hash import THIN_MAX
from services.core.scheduler.class_rules import NO_CLASSES, ClassRules
from services.core.scheduler.group_table import REGROUP_S, GroupTable, ModelGroups
from services.core.scheduler.queue import Waiting, WaitQueue
from services.core.scheduler.rate import RATE_WINDOW_S, ClassRates, retry_after_s
from services.core.scheduler.vocabulary import Asked
from services.core.service import Service

TOKENS_MAX = 2**31 - 1
NAME_LENGTH_MAX = 256
AWAY_RETRY_S = 10.0
"""About what the restart of a worker takes."""
WAVE_MARGIN = 2
"""Requests that started together end together: up to half of a rate may be still to come."""
_FOR_WANT_OF_ROOM = (RefusalReason.QUEUE_FULL, RefusalReason.EXPIRED)


@dataclass(frozen=True, slots=True)
class NotAdmitted:
    """A refusal without its address: the reason and one sentence of cause and remedy.

    `retry_after_s` is None if a retry is pointless, or if the queue says when it is sensible.
    """

    reason: RefusalReason
    message: str
    retry_after_s: float | None = None

    @property
    def for_want_of_room(self) -> bool:
        """Whether the request would be served if there were more room."""
        return self.reason in _FOR_WANT_OF_ROOM


@dataclass(slots=True)
class Admission:
    """Decides which requests may wait, from what waits already and which groups there are.

    `rates` are those of assignments of all models. The queue, the groups and the rates belong to
    the caller, and are only read here.
    """

    queue: WaitQueue
    groups: GroupTable
    rates: ClassRates
    queue_limit: int
    queue_deadline_s: float
    rules: ClassRules = NO_CLASSES
    shortfalls: dict[str, int] = field(default_factory=dict)

    def refusal(
        self, ask: Asked, model: ModelGroups | None, counted_s: float, placed: bool
    ) -> NotAdmitted | None:
        """Why a request for `model` may not wait; None if it may.

        `counted_s`, `placed`: as in Waiting.

        For want of room only newcomers are refused. They wait also for groups that have just left;
        one that was assigned before, for workers that have been away for longer: until its
        deadline, or if it has run, for as long as its gateway wants, also for a worker as large as
        its own was.
        """
        refused = None
        if model is not None:
            refused = self._too_large(ask, model)
        elif _is_newcomer(ask):
            refused = self._away(ask, ask.now_s)
        if refused is not None or ask.resumed:
            return refused
        if ask.now_s - counted_s >= self._deadline_s(ask.service):
            return self._expired(ask.service)
        if placed:
            return None
        return self._no_place(ask.service) or self._too_late(ask, model, counted_s)

    def displaced(self, ask: Asked, placed: bool) -> tuple[Waiting, NotAdmitted] | None:
        """The request that leaves a full queue so that `ask`, which may wait, gets its place."""
        taken = None if ask.resumed or placed else self._taken(ask.service)
        if taken is None:
            return None
        waiting = self.queue.giving_way(ask.service)
        assert waiting is not None, "a full queue refuses those for which no place is found"
        alike = waiting.ask.service.service_class is ask.service.service_class
        come = "one of an owner that has fewer" if alike else "a more urgent request"
        return waiting, NotAdmitted(
            RefusalReason.QUEUE_FULL, f"{taken} are taken, and {come} has come; retry later"
        )

    def refusal_in_line(self, name: str, now_s: float) -> tuple[Waiting, NotAdmitted] | None:
        """A request that waits for the model `name` and must not any longer, and why.

        That is the longest-waiting one if its deadline is over, else the first of the line if no
        group can hold it: it may have been asked before any group of its model was known. Those
        that wait for a larger group are passed over.
        """
        for oldest in self.queue.oldest(name):
            if now_s - oldest.counted_s >= self._deadline_s(oldest.ask.service):
                return oldest, self._expired(oldest.ask.service)
        model = self.groups.of_model(name)
        if model is None:
            return self._waits_in_vain(name, now_s)
        for waiting in self.queue.line(name):
            if model.can_hold(waiting.ask):
                break
            if (refused := self._too_large(waiting.ask, model)) is not None:
                return waiting, refused
        return None

    def retry_after_s(self, ask: Asked, now_s: float) -> float:
        """When the line of its model, or the full queue of all models, will have moved on.

        Where classes count, those of its class and all that may stand before it have by then.
        """
        rules, service = self.rules, ask.service
        model = self.groups.of_model(ask.model)
        if model is not None and self._no_place(service) is not None:
            model = None
        rates = self.rates if model is None else model.meter.dispatched
        waits = []
        for classes in {rules.alike(service), rules.not_after(service)}:
            of_model = model is not None
            queue = self.queue
            queued = queue.wanted(ask.model, classes)[0] if of_model else queue.count(classes)
            waits.append(retry_after_s(ask.request_id, queued, rates.per_s(classes, now_s)))
        return max(waits)

    def _waits_in_vain(self, name: str, now_s: float) -> tuple[Waiting, NotAdmitted] | None:
        """The first newcomer of those that wait for groups that have not come back soon."""
        left_s = self.groups.left_s(name)
        if left_s is None or now_s < left_s + REGROUP_S:
            return None
        for waiting in self.queue.line(name):
            if _is_newcomer(waiting.ask) and waiting.ask.now_s >= left_s and not waiting.placed:
                refused = self._away(waiting.ask, now_s)
                return None if refused is None else (waiting, refused)
        return None

    def _away(self, ask: Asked, now_s: float) -> NotAdmitted | None:
        """Refuses a newcomer of a model that no group serves, unless its last one has just left."""
        left_s = self.groups.left_s(ask.model)
        if left_s is not None and now_s < left_s + REGROUP_S:
            longest = self.groups.longest_held(ask.model)
            return check_size(ask.prompt_tokens, ask.max_tokens, longest)
        return check_model(ask.model, self.groups.models, self.groups.served_before)

    def _too_large(self, ask: Asked, model: ModelGroups) -> NotAdmitted | None:
        """Refuses what no group can hold, and what has run if no group ever could."""
        longest = model.index.tokens_max
        if ask.resumed and longest is not None:
            longest = max(longest, self.groups.longest_held(ask.model))
        return check_size(ask.prompt_tokens, ask.max_tokens, longest)

    def _too_late(
        self, ask: Asked, model: ModelGroups | None, counted_s: float
    ) -> NotAdmitted | None:
        """Refuses a newcomer that would expire, where no merge can make room.

        A gateway's word that it was assigned is enough here, as after a restart of the scheduler.
        The limit of the queue holds for what this scheduler does not remember, unless it has run or
        a worker has failed under it. Batch requests have time, and are not refused for that.
        """
        if self.rules.is_batch(ask.service):
            return None
        if model is None or ask.failed is not None or not self.shortfalls.get(ask.model):
            return None
        left_s = counted_s + self.queue_deadline_s - ask.now_s
        window_s = max(RATE_WINDOW_S, self.queue_deadline_s)
        rate_per_s = model.meter.pace.per_s(ask.now_s, window_s)
        if rate_per_s is None:
            return None
        queued = self.queue.wanted(ask.model, self.rules.not_after(ask.service))[0]
        return check_wait(queued, rate_per_s, left_s)

    def _no_place(self, service: Service) -> NotAdmitted | None:
        """Refuses a newcomer if no place in the queue is left to it, even by displacing another."""
        taken = self._taken(service)
        if taken is None or self.queue.giving_way(service) is not None:
            return None
        return NotAdmitted(RefusalReason.QUEUE_FULL, f"{taken} are taken; retry later")

    def _taken(self, service: Service) -> str | None:
        """Which places a newcomer would need and others have, None if there is one for it."""
        batch_limit = self.rules.batch_queue_limit
        if len(self.queue) >= self.queue_limit:
            return f"all {self.queue_limit} places in the queue"
        batch = self.rules.is_batch(service)
        if batch and self.queue.count((service.service_class,)) >= batch_limit:
            return f"all {batch_limit} places for batch requests in the queue"
        return None

    def _deadline_s(self, service: Service) -> float:
        """How long a request may wait."""
        if self.rules.is_batch(service):
            return self.rules.batch_queue_deadline_s
        return self.queue_deadline_s

    def _expired(self, service: Service) -> NotAdmitted:
        return NotAdmitted(
            RefusalReason.EXPIRED,
            f"no worker had room within {self._deadline_s(service):g} s; retry later",
        )


def _is_newcomer(ask: Asked) -> bool:
    """Whether a request has not been at a worker, as far as its gateway tells."""
    return not ask.resumed and ask.failed is None


def check_fields(ask: Asked) -> NotAdmitted | None:
    """Refuses an ask whose fields no correct gateway sends."""
    if not 1 <= len(ask.request_id) <= NAME_LENGTH_MAX:
        cause = f"request_id must have 1 to {NAME_LENGTH_MAX} characters"
    elif not 1 <= len(ask.model) <= NAME_LENGTH_MAX:
        cause = f"model must have 1 to {NAME_LENGTH_MAX} characters"
    elif not 1 <= ask.prompt_tokens <= TOKENS_MAX:
        cause = f"prompt_tokens is {ask.prompt_tokens}, but must be at least 1"
    elif not 1 <= ask.max_tokens <= TOKENS_MAX:
        cause = f"max_tokens is {ask.max_tokens}, but must be at least 1"
    elif not (math.isfinite(ask.waited_s) and 0 <= ask.excused_s <= ask.waited_s):
        cause = f"waited_s is {ask.waited_s} with an excused_s of {ask.excused_s}, not 0 or more"
    elif len(ask.prefix.hashes) > THIN_MAX:
        cause = f"there are {len(ask.prefix.hashes)} hashes of its prefix, above {THIN_MAX}"
    elif len(ask.avoided) > AVOIDED_MAX or not math.isfinite(ask.avoided_s):
        cause = f"avoided_addresses must be at most {AVOIDED_MAX}, and avoided_s finite"
    elif ask.failed is not None and ask.failed.epoch < 0:
        cause = f"refused_epoch is {ask.failed.epoch}, but must be 0 or more"
    elif (fault := ask.service.fault()) is not None:
        cause = fault
    else:
        return None
    return NotAdmitted(RefusalReason.INVALID, f"invalid request: {cause}")


def check_model(
    model: str, known_models: Collection[str], served_before: Collection[str]
) -> NotAdmitted | None:
    """Refuses a model that no group serves, unless no group serves any model yet.

    A model that was `served_before` may come back: a retry is then sensible.
    """
    if not known_models or model in known_models:
        return None
    if model in served_before:
        return NotAdmitted(
            RefusalReason.UNKNOWN_MODEL,
            "the workers that serve this model are away; send the request again shortly",
            AWAY_RETRY_S,
        )
    return NotAdmitted(
        RefusalReason.UNKNOWN_MODEL,
        f"no worker serves this model; choose one of: {', '.join(sorted(known_models))}",
    )


def check_size(prompt_tokens: int, max_tokens: int, longest: int | None) -> NotAdmitted | None:
    """Refuses more than `longest`, the most tokens that some group of the model holds.

    None says that no group is known, and refuses nothing.
    """
    if longest is None or prompt_tokens + max_tokens <= longest:
        return None
    return NotAdmitted(
        RefusalReason.TOO_LARGE,
        f"the prompt has {prompt_tokens} tokens and up to {max_tokens} more were asked for, "
        f"but the longest sequence that a worker can hold is {longest} tokens; "
        "shorten the prompt or ask for fewer tokens",
    )


def check_wait(queued: int, rate_per_s: float, left_s: float) -> NotAdmitted | None:
    """Refuses a request whose place would come too late, of a model that all merges leave short.

    `queued` requests are before it, `rate_per_s` is the line's pace, and its deadline is in
    `left_s`.
    """
    if queued <= WAVE_MARGIN * rate_per_s * left_s:
        return None
    return NotAdmitted(
        RefusalReason.QUEUE_FULL,
        f"{queued} requests wait already, more than twice what all workers together start within"
        f" {left_s:g} s at their recent pace; retry later",
    )
