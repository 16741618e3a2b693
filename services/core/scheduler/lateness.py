"""Refuses requests that would get their first token too late, by their predicted wait.

A request has a limit for the time to its first token: its target, or `standard_wait_s` for a
standard request without one, and the queue's deadline. In doubt a request is admitted, unless more
requests arrive than start; then it is refused in doubt, so that those that are admitted are served
in time. Requests that could start now, and requests that would miss their target in an idle group,
are never refused. While a merge of groups might provide KV memory, only those are refused that
would be late with unlimited memory.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from services.core.scheduler.dispatch import has_room, start_blocks
from services.core.scheduler.group_load import GroupLoad
from services.core.scheduler.group_table import DemandMeter, GroupTable, ModelGroups
from services.core.scheduler.prediction import WaitPrediction, backlog_s
from services.core.scheduler.queue import Waiting, WaitQueue
from services.core.scheduler.vocabulary import Asked
from services.core.service import Service, ServiceClass

COMPARED_MAX = 8
"""Groups whose prefill backlog is compared for a prediction."""
SIGNIFICANT = 3.0
"""Standard deviations by which arrivals must exceed the starts to count as overload."""
WALK_S = 1.0
"""Period in which the predictions of all waiting requests are repeated."""


class Limit(StrEnum):
    """What a wait is limited by."""

    COMPUTE = "compute"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Late:
    """Why a request is refused as late: its predicted wait exceeds `left_s`.

    `start_tokens` per second leave the queue at `rate`, and `ahead_tokens` are before the request.
    `room`: whether a group could start it now; `short`: whether merges cannot provide the memory.
    """

    ahead_tokens: int
    rate: float
    wait_s: float
    left_s: float
    by: Limit
    room: bool
    short: bool


@dataclass(slots=True)
class Lateness:
    """Limits and predictions of waits; `factor` 0: no request is late.

    Reads the caller's queue and groups, and changes neither.
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

    def predict(
        self, ask: Asked, model: ModelGroups, arrival_s: float, start_tokens: int
    ) -> WaitPrediction | None:
        """The time to the first token of a new request from now; None if it is unknown."""
        queued = self.has_queue(ask, model) or not self.could_start(ask, model, ask.now_s)
        ahead = self.queue.tokens_ahead(ask, arrival_s)
        passing = 0.0
        if ask.service.service_class is not ServiceClass.INTERACTIVE and self.queue.rules.by_class:
            passing = model.meter.interactive.per_s(ask.now_s)
        group_s = prefill_s(ask, model)
        return model.meter.waits.predict(ahead, start_tokens, group_s, queued, passing, ask.now_s)

    def has_queue(self, ask: Asked, model: ModelGroups) -> bool:
        """Whether requests wait that a new request must not overtake."""
        return self.queue.tokens_ahead(ask, ask.now_s) > 0

    def could_start(self, ask: Asked, model: ModelGroups, now_s: float) -> bool:
        """Whether a group has room for a request and no prefill backlog."""
        return model.pick(ask, now_s, math.inf) is not None

    def late(
        self,
        ask: Asked,
        model: ModelGroups,
        deadline_start_s: float,
        prediction: WaitPrediction | None,
        short: bool,
    ) -> Late | None:
        """Why a new request must be refused; None if it may wait.

        `short`: merges of groups cannot provide the KV that the model lacks.
        """
        limit_s = self.limit_s(ask.service)
        if limit_s is None or prediction is None or ask.failed is not None:
            return None
        left_s = deadline_start_s + limit_s - ask.now_s
        doubt = is_overloaded(model.meter, ask.now_s)
        wait_s = prediction.safe_s if doubt else prediction.optimistic_s
        if wait_s <= left_s or self.could_start(ask, model, ask.now_s):
            return None
        by_compute = prediction.by_compute_s > left_s or has_memory(ask, model)
        by = Limit.COMPUTE if by_compute else Limit.MEMORY
        if (by is Limit.MEMORY and not short) or alone_s(ask, model) > limit_s:
            return None
        ahead, rate = prediction.ahead_tokens, prediction.rate
        return Late(ahead, rate, wait_s, left_s, by, room=False, short=short)

    def late_waiting(
        self, name: str, model: ModelGroups, short: bool, now_s: float, walk: bool
    ) -> list[tuple[Waiting, Late]]:
        """The waiting requests of a model that must be refused now.

        Those are late requests, and with `walk` those that would become late; none if no more
        requests arrive than start.
        """
        if not self.factor or not is_overloaded(model.meter, now_s):
            return []
        rate = model.meter.waits.rate.per_s(now_s) or math.inf
        late = [
            (waiting, Late(0, rate, now_s - waiting.latest_s, 0.0, Limit.MEMORY, False, short))
            for waiting in self.queue.late(name)
            if self._is_refusable(waiting, model, short, now_s)
        ]
        ahead = 0
        for waiting in self.queue.in_order(name) if walk else ():
            wait_s = (ahead + waiting.start_tokens) / rate
            wait_s *= model.meter.waits.ratios.of(wait_s)[0]
            left_s = waiting.latest_s - now_s
            refusable = self._is_refusable(waiting, model, short, now_s)
            if waiting.late or wait_s <= left_s or not refusable:
                ahead += waiting.start_tokens
                continue
            late.append((waiting, Late(ahead, rate, wait_s, left_s, Limit.MEMORY, False, short)))
        return late

    def _is_refusable(
        self, waiting: Waiting, model: ModelGroups, short: bool, now_s: float
    ) -> bool:
        if (
            waiting.was_assigned
            or waiting.ask.failed is not None
            or not model.can_hold(waiting.ask)
        ):
            return False
        return waiting.latest_s < math.inf and not self.could_start(waiting.ask, model, now_s)


def is_overloaded(meter: DemandMeter, now_s: float) -> bool:
    """Whether significantly more tokens arrive than start, by the last seconds."""
    rate = meter.waits.rate.per_s(now_s)
    requests, _ = meter.arrived.at(now_s)
    if rate is None or not requests:
        return False
    # Arrivals are assumed to be independent (Poisson), so that their number varies by its root.
    return meter.arrived_tokens_per_s(now_s) > rate * (1 + SIGNIFICANT / math.sqrt(requests))


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
