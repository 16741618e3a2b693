"""How many of a model's workers should compute prompts, for `roles: auto` (`roles.py`).

By the cost model: the seconds per second that arriving prompts and answers take (DistServe §4.1
places workers by the same two rates), and whether mixed workers keep the tightest target of a time
per token beside a chunk of a prompt: chunked prefill then bounds what prompts delay.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.core.cost.model import CostModel
from services.core.demand import ModelDemand
from services.core.overload.events import GroupUse

LOAD_MAX, LOAD_KEPT_MAX = 0.75, 0.9
"""Greatest load of prefill workers, and of decode workers: to get roles, and to keep them."""
TIGHT, TIGHT_KEPT = 1.0, 0.8
"""Time of a mixed iteration, over the target, above which workers get roles, and keep them."""
DECODES_MAX = 1024
"""Most requests of a decode worker that are considered."""


@dataclass(frozen=True, slots=True)
class RoleNeed:
    """Load of prompts and of answers, in workers that they keep busy.

    `tightness`: the time of decodes beside a chunk of a prompt, without roles, over the tightest
    target of a time per token; 0 without a target.
    """

    prompts: float
    answers: float
    tightness: float

    def prefill_share(self) -> float:
        """Share of the workers that should compute prompts, in [0, 1]."""
        both = self.prompts + self.answers
        return self.prompts / both if both else 0.0

    def fits(self, prefill: int, decode: int, present: bool) -> bool:
        """Whether so many workers carry the load with a reserve; `present`: they have roles."""
        most = LOAD_KEPT_MAX if present else LOAD_MAX
        return self.prompts <= most * prefill and self.answers <= most * decode

    def mixed_keeps(self, present: bool) -> bool:
        """Whether mixed workers keep the tightest target; `present`: they have roles now."""
        return self.tightness <= (TIGHT_KEPT if present else TIGHT)


def need_of(
    demand: ModelDemand, uses: Sequence[GroupUse], costs: CostModel, chunk_tokens: int
) -> RoleNeed:
    """The need of workers by `demand`; `uses` are single workers of the same costs.

    `chunk_tokens`: prompt tokens of an iteration beside decodes.
    """
    running = sum(use.running for use in uses)
    used = sum(use.used_tokens for use in uses)
    context = used // running if running else 0
    token_s = costs.beyond_knee.chunk_s(0, chunk_tokens) / chunk_tokens
    target_s = demand.tpot_s
    most = max(1, uses[0].capacity_tokens // max(1, context))
    decodes = _decodes_within(costs, context, target_s, min(most, DECODES_MAX))
    per_s = decodes / costs.decodes_s(decodes, decodes * context)
    beside = max(1, running // len(uses))
    mixed_s = costs.decodes_s(beside, beside * context) + costs.chunk_s(0, chunk_tokens) - costs.lam
    return RoleNeed(
        demand.prompt_tokens_per_s * token_s,
        demand.output_tokens_per_s / per_s,
        mixed_s / target_s if target_s else 0.0,
    )


def _decodes_within(costs: CostModel, context: int, target_s: float, most: int) -> int:
    """The most decodes of an iteration within the target, at least one; `most` without a target."""
    if not target_s:
        return most
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        within = costs.decodes_s(middle, middle * context) <= target_s
        low, high = (middle, high) if within else (low, middle)
    return low
