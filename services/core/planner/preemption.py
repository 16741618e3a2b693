"""Decides whether arriving online requests interrupt a batch-only iteration (ConServe Algorithm 2).

The engine checks between layers. An iteration continues if its rest, and then all waiting prompts,
are predicted to end within the least slack, the time until the first of their deadlines (the
published condition is inverted). Online requests are those of all classes except `batch`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from services.core.cost.model import CostModel
from services.core.planner.batch import Batch
from services.core.planner.budget import Budget
from services.core.request import Request


class Preempt(StrEnum):
    """When online requests interrupt a batch-only iteration; `DEADLINE`: if any would be late."""

    OFF = "off"
    DEADLINE = "deadline"
    ALWAYS = "always"


class PreemptedWork(StrEnum):
    """Whether an interrupted iteration is suspended and resumes at its layer, or runs again."""

    RESUME = "resume"
    DISCARD = "discard"


SUSPENDED_WAIT_FACTOR = 4.0
"""A suspended iteration is discarded once it has waited this many times its run time, so that the
lost run time is at most a fifth of both together."""
REMAINING_SHARE_MIN = 0.1
"""Lower bound of the remaining share of an iteration: its predicted time may be too short."""


def should_discard(ran_s: float, waited_s: float) -> bool:
    """Whether to discard a suspended iteration that ran for `ran_s` and waited for `waited_s`."""
    # Under steady online load it might never resume, and its sequences cannot join other iterations
    # while it is suspended.
    return waited_s > SUSPENDED_WAIT_FACTOR * ran_s


def remaining_s(predicted_s: float, ran_s: float) -> float:
    """Estimated remaining seconds of an iteration that was predicted to take `predicted_s`."""
    return max(REMAINING_SHARE_MIN * predicted_s, predicted_s - ran_s)


@dataclass(frozen=True, slots=True)
class OnlineRequest:
    """A waiting online request: prompt tokens, and seconds until its first token is due."""

    prompt_tokens: int
    slack_s: float

    @classmethod
    def of(cls, request: Request, now_s: float) -> "OnlineRequest":
        """Create it from `request`; `now_s` is on the clock of `request.arrival_s`."""
        target_s = request.service.ttft_s
        waited_s = request.waited_s + now_s - request.arrival_s
        return cls(len(request.prompt_ids), inf if target_s is None else target_s - waited_s)


def should_preempt(
    policy: Preempt,
    batch: Batch,
    elapsed_s: float,
    waiting: Iterable[OnlineRequest],
    cost_model: CostModel | None,
    budget: Budget | None = None,
) -> bool:
    """Whether the batch-only iteration `batch`, which has run for `elapsed_s`, must stop now.

    `budget` corrects the predictions of `cost_model`; None: no corrections.
    """
    requests = tuple(waiting)
    if policy is Preempt.OFF or not requests:
        return False
    least_s = min(request.slack_s for request in requests)
    # Without a cost model the remaining time is unknown: stop for any request with a deadline.
    if policy is Preempt.ALWAYS or cost_model is None:
        return policy is Preempt.ALWAYS or least_s < inf
    corrections = budget or Budget()
    mixed = any(len(chunk.token_ids) > 1 for chunk in batch.chunks)
    whole_s = cost_model.batch_s((chunk.start, len(chunk.token_ids)) for chunk in batch.chunks)
    prompts_s = cost_model.batch_s((0, request.prompt_tokens) for request in requests)
    # If the predictions are exact, the result is the same at each layer, since remaining time and
    # slack shrink alike. The lower bound of `remaining_s` stops iterations that take longer.
    left = remaining_s(corrections.scale(mixed) * whole_s, elapsed_s)
    return left + corrections.mixed_scale * prompts_s > least_s
