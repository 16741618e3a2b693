"""When an iteration of batch work gives way to requests that somebody waits for.

ConServe's Algorithm 2, looked at between layers. Its early exit is printed the wrong way round: an
iteration goes on if it and all that waits end within the least slack.
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
    """When an iteration that runs only batch work is interrupted by an online request."""

    OFF = "off"
    DEADLINE = "deadline"
    ALWAYS = "always"


class PreemptedWork(StrEnum):
    """What becomes of an iteration that was interrupted: it goes on later, or runs again."""

    RESUME = "resume"
    DISCARD = "discard"


SUSPENDED_WAIT_FACTOR = 4.0
"""A suspended microbatch is given up after so many times the seconds that it had run. So at most a
fifth of the time of batch work is spent on what runs again."""
REMAINING_SHARE_MIN = 0.1
"""Part of a suspended microbatch that is taken to be left at least: predictions are not exact."""


def is_abandoned(ran_s: float, waited_s: float) -> bool:
    """Whether a microbatch that ran for `ran_s`, then waited for `waited_s`, is discarded.

    Under a steady load somebody online can always run. Its sequences then have more from a share
    of the other iterations than from what the microbatch has computed.
    """
    return waited_s > SUSPENDED_WAIT_FACTOR * ran_s


def remaining_s(predicted_s: float, ran_s: float) -> float:
    """Seconds that a suspended microbatch has yet to run, of `predicted_s` in all."""
    return max(REMAINING_SHARE_MIN * predicted_s, predicted_s - ran_s)


@dataclass(frozen=True, slots=True)
class OnlineRequest:
    """An online request that waits: its prompt's tokens, and the seconds until its deadline."""

    prompt_tokens: int
    slack_s: float

    @classmethod
    def of(cls, request: Request, now_s: float) -> "OnlineRequest":
        """The request as it waits at `now_s`, by the clock of its `arrival_s`."""
        target_s = request.service.ttft_s
        waited_s = request.waited_s + now_s - request.arrival_s
        return cls(len(request.prompt_ids), inf if target_s is None else target_s - waited_s)


def gives_way(
    policy: Preempt,
    batch: Batch,
    elapsed_s: float,
    waiting: Iterable[OnlineRequest],
    cost_model: CostModel | None,
    budget: Budget | None = None,
) -> bool:
    """Whether `batch`, a preemptible iteration that has run for `elapsed_s`, ends here.

    Predictions of the model are corrected as those of `budget`. While they hold, the answer stays
    the same: what is left of the iteration shrinks as the slack does. One that takes longer has
    `REMAINING_SHARE_MIN` left until it ends, so that it gives way in time if it is asked again.

    Without a cost model nobody knows how long it lasts, so that a deadline is kept by giving way.
    """
    requests = tuple(waiting)
    if policy is Preempt.OFF or not requests:
        return False
    least_s = min(one.slack_s for one in requests)
    if policy is Preempt.ALWAYS or cost_model is None:
        return policy is Preempt.ALWAYS or least_s < inf
    scales = budget or Budget()
    mixed = any(len(chunk.token_ids) > 1 for chunk in batch.chunks)
    whole_s = cost_model.batch_s((chunk.start, len(chunk.token_ids)) for chunk in batch.chunks)
    theirs_s = cost_model.batch_s((0, one.prompt_tokens) for one in requests)
    left = remaining_s(scales.scale(mixed) * whole_s, elapsed_s)
    return left + scales.mixed_scale * theirs_s > least_s
