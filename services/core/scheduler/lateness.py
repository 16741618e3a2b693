"""Refuses requests that would get their first token too late, by their predicted wait.

A request has a limit for the time to its first token: its target, or `standard_wait_s` for a
standard request without one, and the queue's deadline. A target that is missed even in an idle
group counts as none. In doubt a request is admitted, unless more requests arrive than start; then
it is refused in doubt, so that those that are admitted are served in time. Requests that could
start now are never refused. While a merge of groups might provide KV memory, only those are refused
that would be late with unlimited memory.
"""

import math
from bisect import bisect
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from services.core.scheduler.assignments import Assignments
from services.core.scheduler.calendar import HORIZON_S, Booking, Calendar, shape_of
from services.core.scheduler.class_rules import ONLINE
from services.core.scheduler.dispatch import has_room, start_blocks
from services.core.scheduler.group_load import GroupLoad
from services.core.scheduler.group_table import GroupTable, ModelGroups
from services.core.scheduler.prediction import RANGES_S, WaitPrediction, backlog_s
from services.core.scheduler.queue import Waiting, WaitQueue
from services.core.scheduler.vocabulary import (
    Asked,
    Late,
    OutcomeReported,
    PredictedWait,
    WaitLimit,
)
from services.core.service import Service, ServiceClass

COMPARED_MAX = 8
"""Groups whose prefill backlog is compared for a prediction."""
SIGNIFICANT = 3.0
"""Standard deviations by which arrivals must exceed the starts to count as overload."""
SHORT_TOKENS = 64
"""Prompt tokens of the request for which `class_waits` predicts."""
MARGIN = 1.25
"""Factor of the wait of a request that is refused in doubt, as others that come later pass it."""
LENIENT = 2.0
"""Factor by which even the optimistic wait must exceed the limit while there is no overload, and of
retries at their booked time; and the limit of a request that misses its target even in an idle
group, as a multiple of its time there."""
ARRIVED_LEAST_S = 1.0
"""Least time over which the rate of arrivals is measured."""
WAITED_S = 1.0
"""Requests that have waited longer when they are asked for were asked for before, unless a gateway
is very slow."""
WALK_S, WALK_REQUEST_S = 0.25, 1e-4
"""Period in which the predictions of all waiting requests are repeated: at least, and for each."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is expected of a new request that may be late.

    `limit_s` is the longest time to its first token. `prediction`: None if unknown. `booking`: the
    one that it uses, for its retry at the booked time. `alone_s`: its time in an idle group.
    `counted`: it has been counted as an arrival before: it is a retry before the time of its
    booking, or is asked for again after a restart of the scheduler.
    """

    limit_s: float
    prediction: WaitPrediction | None
    booking: Booking | None
    alone_s: float
    counted: bool


@dataclass(slots=True)
class Lateness:
    """Limits and predictions of waits; `factor` 0: no request is late.

    Changes none of the caller's queue and groups but the calendars of the models.
    """

    queue: WaitQueue
    groups: GroupTable
    queue_deadline_s: float
    # Multiplies targets; and the limit of standard requests without one, 0: none.
    factor: float = 0.0
    standard_wait_s: float = 0.0

    def limit_s(self, service: Service) -> float | None:
        """Longest time to the first token of a request; None if it is never late."""
        if not self.factor or not service.online:
            return None
        limit_s = math.inf
        if service.ttft_s is not None:
            limit_s = service.ttft_s * self.factor
        elif service.service_class is ServiceClass.STANDARD and self.standard_wait_s:
            limit_s = self.standard_wait_s
        return min(limit_s, self.queue_deadline_s)

    def estimate(
        self, ask: Asked, model: ModelGroups | None, arrival_s: float, start_tokens: int
    ) -> Estimate | None:
        """What is expected of a request that was never assigned; None if it is never late.

        It uses its booking, unless the ask is only an estimate.
        """
        limit_s = self.limit_s(ask.service)
        if limit_s is None or model is None or ask.resumed or ask.failed is not None:
            return None
        calendar, owner, shape = self.calendar(ask, model), ask.service.tenant, shape_of(ask)
        if ask.estimated:
            booking = calendar.due_booking(ask.now_s, owner, shape)
        else:
            model.meter.waits.note_ask(ask)
            booking = calendar.arrive(ask.now_s, owner, shape)
        early = booking is None and calendar.is_retry(owner, shape)
        counted = early or ask.waited_s > WAITED_S
        ahead = self.queue.rules.classes_ahead(ask.service)
        if not self.queue.demand(ask.model, ahead)[0] and self.could_start(ask, model, ask.now_s):
            return Estimate(limit_s, None, booking, 0.0, counted)  # it starts now
        if booking is not None:
            arrival_s = min(arrival_s, booking.arrival_s)
        booked = booking is not None
        prediction = self.predict(ask, model, arrival_s, start_tokens, ask.now_s, booked)
        idle_s = alone_s(ask, model)
        if idle_s > limit_s:
            # No retry helps this request, but it must not keep its place for ever.
            limit_s = max(self.standard_wait_s or math.inf, LENIENT * idle_s)
            limit_s = min(limit_s, self.queue_deadline_s)
        return Estimate(limit_s, prediction, booking, idle_s, counted)

    def predict(
        self,
        ask: Asked,
        model: ModelGroups,
        arrival_s: float,
        start_tokens: int,
        now_s: float,
        booked: bool,
    ) -> WaitPrediction | None:
        """The time to the first token of a new request from now; None if it is unknown.

        Retries that are due before it starts are ahead of it, unless it is such a retry (`booked`).
        """
        waits, service_class = model.meter.waits, ask.service.service_class
        ahead = self.queue.tokens_ahead(ask, arrival_s)
        queued = ahead > 0 or not self.could_start(ask, model, now_s)
        group_s, rate = prefill_s(ask, model), self._rate(service_class, model, now_s)
        if queued and not booked and rate:
            # Owners take turns if classes are on.
            owner = ask.service.tenant if self.queue.rules.enabled else None
            ahead += self.calendar(ask, model).tokens_ahead(
                now_s, owner, ahead + start_tokens, rate
            )
        return waits.predict(
            ahead, start_tokens if queued else 0, group_s, rate, service_class, now_s
        )

    def apply(self, estimate: Estimate, waiting: Waiting, model: ModelGroups) -> None:
        """Set when an admitted request must start, or that it is late in any case."""
        ask = waiting.ask
        # If it comes before its booked time, it does not need that any more.
        self.calendar(ask, model).release(ask.service.tenant, shape_of(ask))
        if estimate.prediction is not None:
            waiting.raw_s = estimate.prediction.raw_s
        waiting.booked = estimate.booking is not None
        due_s = waiting.deadline_start_s + estimate.limit_s
        if ask.now_s + estimate.alone_s > due_s:
            waiting.late = True
        else:
            own_s = prefill_s(ask, model) if estimate.prediction is not None else 0.0
            waiting.latest_s = due_s - own_s

    def note_outcome(self, outcome: OutcomeReported, assignments: Assignments) -> None:
        """Learn from the outcome of a request; no effect if its assignment is forgotten."""
        assigned = assignments.get(outcome.request_id)
        load = self.groups.of_id(assigned.group_id) if assigned is not None else None
        model = self.groups.of_model(load.group.model) if load is not None else None
        if assigned is None or model is None:
            return
        waits, now_s = model.meter.waits, outcome.now_s
        if outcome.output_tokens:
            waits.lengths.add(assigned.keys, outcome.output_tokens, outcome.cut_off)
            tokens = assigned.prompt_tokens + outcome.output_tokens
            waits.interactive.end(outcome.request_id, tokens, now_s)
        elif assigned.raw_s:
            waits.ratios[assigned.service_class].note(assigned.raw_s, outcome.ttft_s, now_s)

    def predictions(self, now_s: float) -> dict[str, Any]:
        """The fields of a snapshot about predictions; none if nothing is predicted."""
        if not self.factor:
            return {}
        ended, bookings, ratios = Counter[str](), 0, {}
        for name in self.groups.models:
            model = self.groups.of_model(name)
            assert model is not None
            for calendar in model.meter.waits.calendars.values():
                ended.update(calendar.ended)
                bookings += len(calendar)
            for cls in ONLINE:
                of_class = model.meter.waits.ratios[cls]
                ratios[name, cls] = tuple(of_class.counts), of_class.total
        return {
            "predicts": True,
            "class_waits": tuple(w for n in self.groups.models for w in self.class_waits(n, now_s)),
            "bookings": bookings,
            "bookings_ended_total": dict(ended),
            "wait_ratios": ratios,
        }

    def retry(
        self, ask: Asked, model: ModelGroups, start_tokens: int, arrival_s: float, now_s: float
    ) -> tuple[float, bool] | None:
        """Retry-After of a request that is refused now, and whether time is booked for it.

        None if nothing is predicted. Without time left until `HORIZON_S`, it is that.
        """
        if self.limit_s(ask.service) is None:
            return None
        prediction = self.predict(ask, model, now_s, start_tokens, now_s, booked=True)
        if prediction is None:
            return None
        calendar, owner, shape = self.calendar(ask, model), ask.service.tenant, shape_of(ask)
        earliest_s = now_s + prediction.ahead_tokens / prediction.rate
        booking = calendar.book(
            *(now_s, owner, shape, start_tokens, earliest_s, prediction.rate), arrival_s=arrival_s
        )
        return (
            (HORIZON_S, False) if booking is None else (float(booking.retry_after_s(now_s)), True)
        )

    def is_overloaded(self, service: Service, model: ModelGroups, now_s: float) -> bool:
        """Whether significantly more tokens arrive than start, by the last seconds.

        Counts only interactive requests for one of these if they go before all others.
        """
        meter, starts = model.meter, model.meter.waits.rate
        rate = starts.per_s(now_s)
        interactive = service.service_class is ServiceClass.INTERACTIVE
        arrived = meter.interactive if interactive and self.queue.rules.by_class else meter.arrived
        requests, _ = arrived.at(now_s)
        # The rate that a cost model predicts is too rough to refuse requests in doubt.
        if not rate or not requests or not starts.measured:
            return False
        # Arrivals are assumed to be independent (Poisson), so that their number varies by its root.
        return arrived.recent_per_s(now_s, ARRIVED_LEAST_S) > rate * (
            1 + SIGNIFICANT / math.sqrt(requests)
        )

    def class_waits(self, name: str, now_s: float) -> list[PredictedWait]:
        """The predicted waits of new requests for the model `name`, by class.

        Those of the owner with the most waiting tokens, which waits longest.
        """
        model, waits = self.groups.of_model(name), list[PredictedWait]()
        if model is None:
            return waits
        for cls in ONLINE:
            ask = Asked("", name, SHORT_TOKENS, 1, service=Service(cls), now_s=now_s, stream_id=0)
            owner = self.queue.busiest_owner(ask)
            ask = replace(ask, service=replace(ask.service, tenant=owner))
            prediction = self.predict(ask, model, now_s, SHORT_TOKENS, now_s, booked=False)
            if prediction is not None:
                limit_s = self.standard_wait_s if cls is ServiceClass.STANDARD else 0.0
                optimistic_s, likely_s = prediction.optimistic_s, prediction.likely_s
                waits.append(PredictedWait(name, cls, optimistic_s, likely_s, limit_s))
        return waits

    def _rate(self, cls: ServiceClass, model: ModelGroups, now_s: float) -> float | None:
        """Tokens per second that start of a class and of those that wait before it."""
        passing = 0.0
        if cls is not ServiceClass.INTERACTIVE and self.queue.rules.by_class:
            passing = model.meter.passing.recent_per_s(now_s, ARRIVED_LEAST_S)
        return model.meter.waits.rate_beside(passing, now_s)

    def calendar(self, ask: Asked, model: ModelGroups) -> Calendar:
        """The bookings for requests of this class, by class only if that orders the queue."""
        by_class = self.queue.rules.by_class
        service_class = ask.service.service_class if by_class else ServiceClass.STANDARD
        return model.meter.waits.calendars[service_class]

    def could_start(self, ask: Asked, model: ModelGroups, now_s: float) -> bool:
        """Whether a group has room for a request and no prefill backlog."""
        return model.pick(ask, now_s, math.inf) is not None

    def late(
        self,
        ask: Asked,
        model: ModelGroups,
        deadline_start_s: float,
        estimate: Estimate | None,
        short: bool,
    ) -> Late | None:
        """Why a new request must be refused; None if it may wait.

        `short`: merges of groups cannot provide the KV that the model lacks.
        """
        if estimate is None or (prediction := estimate.prediction) is None:
            return None
        left_s = deadline_start_s + estimate.limit_s - ask.now_s
        doubt = estimate.booking is None and self.is_overloaded(ask.service, model, ask.now_s)
        wait_s = prediction.safe_s * MARGIN if doubt else prediction.optimistic_s
        if wait_s <= (1.0 if doubt else LENIENT) * left_s or self.could_start(
            ask, model, ask.now_s
        ):
            return None
        by_compute = prediction.by_compute_s > left_s or has_memory(ask, model)
        by = WaitLimit.COMPUTE if by_compute else WaitLimit.MEMORY
        if (by is WaitLimit.MEMORY and not short) or estimate.alone_s > estimate.limit_s:
            return None
        ahead, rate = prediction.ahead_tokens, prediction.rate
        return Late(ahead, rate, wait_s, left_s, by)

    def late_waiting(
        self, name: str, model: ModelGroups, short: bool, now_s: float, walk: bool
    ) -> list[tuple[Waiting, Late]]:
        """The waiting requests of a model that must be refused now.

        Those are late requests, and with `walk` those that would become late; none of a class of
        which no more requests arrive than start.
        """
        waits = model.meter.waits
        overloaded = {
            cls for cls in ONLINE if self.factor and self.is_overloaded(Service(cls), model, now_s)
        }
        if not overloaded:
            return []
        late = list[tuple[Waiting, Late]]()
        ahead = 0
        limits: WaitLimits | None = None
        # In this loop microseconds count: thousands may wait.
        likely = {cls: r.likely(now_s) for cls, r in waits.ratios.items()}
        rates = {cls: self._rate(cls, model, now_s) or math.inf for cls in ServiceClass}
        for waiting in self.queue.in_order(name) if walk else self.queue.late(name):
            start_tokens, cls = waiting.start_tokens, waiting.ask.service.service_class
            wait_s = (ahead + start_tokens) / rates[cls]
            ratio, offset_s = likely[cls][bisect(RANGES_S, wait_s)]
            likely_s = max(0.0, ratio * (wait_s + offset_s) - offset_s)
            left_s = waiting.latest_s - now_s
            if waiting.booked:
                likely_s /= LENIENT
            # Late requests stand behind those of all classes.
            if likely_s > left_s and (waiting.late or cls in overloaded):
                limits = limits or WaitLimits(model, short, now_s)
                if (by := limits.of(waiting)) is not None:
                    late.append((waiting, Late(ahead, rates[cls], likely_s, left_s, by)))
                    if waiting.raw_s:
                        # Without these, only predictions that held would correct later ones.
                        waited_s = now_s - waiting.ask.now_s
                        waits.ratios[cls].note(waiting.raw_s, waited_s + likely_s, now_s)
                    continue
            ahead += start_tokens
        return late


class WaitLimits:
    """What limits the waits of requests in the queue, while the groups of a model do not change."""

    def __init__(self, model: ModelGroups, short: bool, now_s: float) -> None:
        self._model, self._short, self._now_s = model, short, now_s
        index = model.index
        # No request with more tokens can start, and none has memory: that spares most searches.
        self._room_tokens = max(index.room(load) * _slots(load) for load in index.loads.values())
        compared = index.ranked(COMPARED_MAX)
        self._memory_tokens = max(start_blocks(load) * _slots(load) for load in compared)
        self._block_size = min(map(_slots, index.loads.values()))

    def of(self, waiting: Waiting) -> WaitLimit | None:
        """What limits the wait of a request; None if it must not be refused."""
        ask, model = waiting.ask, self._model
        if waiting.latest_s == math.inf or waiting.was_assigned or ask.failed is not None:
            return None
        if not model.can_hold(ask):
            return None
        prompt, output = ask.prompt_tokens, ask.max_tokens
        needed = min(prompt + self._block_size, prompt + output)
        if needed <= self._room_tokens and model.pick(ask, self._now_s, math.inf) is not None:
            return None
        if needed <= self._memory_tokens and has_memory(ask, model):
            return WaitLimit.COMPUTE
        return WaitLimit.MEMORY if self._short else None


def _slots(load: GroupLoad) -> int:
    """Tokens per KV block."""
    return load.group.block_size


def has_memory(ask: Asked, model: ModelGroups) -> bool:
    """Whether a group has the KV blocks for a request, and only its prefill backlog delays it."""
    return any(
        has_room(load, ask.prompt_tokens, ask.max_tokens, start_blocks)
        for load in _compared(ask, model)
    )


def prefill_s(ask: Asked, model: ModelGroups) -> float:
    """Predicted seconds from its start to the first token of a request, in the best group."""
    return min((_ttft_s(load, ask, model) for load in _compared(ask, model)), default=0.0)


def alone_s(ask: Asked, model: ModelGroups) -> float:
    """Predicted seconds to the first token of a request in an idle group; 0 if unknown."""
    return min((_ttft_s(load, ask, model, True) for load in _compared(ask, model)), default=0.0)


def _compared(ask: Asked, model: ModelGroups) -> list[GroupLoad]:
    return model.index_for(ask).ranked(COMPARED_MAX)


def _ttft_s(load: GroupLoad, ask: Asked, model: ModelGroups, idle: bool = False) -> float:
    if model.prefixes is not None:
        cost, hit_tokens = model.prefixes.costs(load), model.prefixes.hit_tokens(load, ask)
    elif load.group.cost_model is not None:
        cost, hit_tokens = load.group.cost_model, 0
    else:
        return 0.0
    alone_s = cost.chunk_s(hit_tokens, ask.prompt_tokens - hit_tokens)
    return alone_s + (0.0 if idle else backlog_s(cost, load, ask.prompt_tokens - hit_tokens))
