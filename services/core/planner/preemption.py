"""Preemption of batch-only iterations by online requests (ConServe Algorithm 2).

The check runs between layers. The paper's early-exit condition is inverted; here an iteration
continues if it and all waiting prompts end within the least slack.
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
    """When an online request interrupts a batch-only iteration."""

    OFF = "off"
    DEADLINE = "deadline"
    ALWAYS = "always"


class PreemptedWork(StrEnum):
    """What happens to an interrupted iteration: it resumes at its layer, or runs again."""

    RESUME = "resume"
    DISCARD = "discard"


SUSPENDED_WAIT_FACTOR = 4.0
"""A suspended microbatch is discarded after it has waited this many times its run time. So at most
a fifth of the time of batch work is lost to recomputation."""
REMAINING_SHARE_MIN = 0.1
"""Lower bound of the remaining share of a suspended microbatch: predictions are not exact."""


def is_abandoned(ran_s: float, waited_s: float) -> bool:
    """Whether to discard a microbatch that ran for `ran_s`, then waited for `waited_s`."""
    # Under steady online load it might never resume. Its sequences then progress faster as part of
    # other iterations than by keeping its partial results.
    return waited_s > SUSPENDED_WAIT_FACTOR * ran_s


def remaining_s(predicted_s: float, ran_s: float) -> float:
    """Estimated remaining seconds of a suspended microbatch of `predicted_s` seconds in total."""
    return max(REMAINING_SHARE_MIN * predicted_s, predicted_s - ran_s)


@dataclass(frozen=True, slots=True)
class OnlineRequest:
    """A waiting online request: prompt tokens, and seconds until its first-token deadline."""

    prompt_tokens: int
    slack_s: float

    @classmethod
    def of(cls, request: Request, now_s: float) -> "OnlineRequest":
        """The request at `now_s`, on the clock of its `arrival_s`."""
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
    """Whether the preemptible iteration `batch`, running for `elapsed_s`, must end at this layer.

    `budget` corrects the predictions of `cost_model`.
    """
    requests = tuple(waiting)
    if policy is Preempt.OFF or not requests:
        return False
    least_s = min(request.slack_s for request in requests)
    # Without a cost model the remaining time is unknown: any deadline interrupts.
    if policy is Preempt.ALWAYS or cost_model is None:
        return policy is Preempt.ALWAYS or least_s < inf
    scales = budget or Budget()
    mixed = any(len(chunk.token_ids) > 1 for chunk in batch.chunks)
    whole_s = cost_model.batch_s((chunk.start, len(chunk.token_ids)) for chunk in batch.chunks)
    theirs_s = cost_model.batch_s((0, request.prompt_tokens) for request in requests)
    # While the predictions hold, the answer is the same at each layer: the remaining time shrinks
    # like the slack. The lower bound of `remaining_s` lets an overrunning iteration yield in time.
    left = remaining_s(scales.scale(mixed) * whole_s, elapsed_s)
    return left + scales.mixed_scale * theirs_s > least_s
