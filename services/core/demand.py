"""KV cache demand of queued requests, which the scheduler reports to the memory manager.

The memory manager decides by it whether to merge groups, which drops duplicate parameters of a
model to make room for KV cache (a *drop*, KunServe).
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

_RATES = ("arriving_tokens_per_s", "prompt_tokens_per_s", "output_tokens_per_s", "tpot_s")
RATE_RISE = 1.1
"""Report an arrival rate at once if it exceeds the last reported rate by this factor."""


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """Demand for a single model.

    The `queued` requests need `queued_tokens` tokens of KV cache before they can run. The `refused`
    requests of the last seconds needed `refused_tokens`. `arriving_tokens_per_s` is the KV demand
    of new arrivals. If the scheduling policy distinguishes service classes, `batch_queued` and
    `batch_queued_tokens` count queued requests of the class `batch`, and the other fields exclude
    them, since batch requests never trigger a drop. `first_queued_tokens`: KV that the first of the
    `queued` requests needs. Started requests had `prompt_tokens_per_s` to compute, and
    `output_tokens_per_s` are expected of them; `tpot_s` is the least target of a time per token
    among them, 0 if none has one.
    """

    model: str
    queued: int = 0
    queued_tokens: int = 0
    refused: int = 0
    refused_tokens: int = 0
    arriving_tokens_per_s: float = 0.0
    batch_queued: int = 0
    batch_queued_tokens: int = 0
    first_queued_tokens: int = 0
    prompt_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    tpot_s: float = 0.0

    def plus(self, other: "ModelDemand") -> "ModelDemand":
        """Sum of two reports about the same model.

        Of the first requests, the larger one counts, and of the targets the tighter one.
        """
        assert self.model == other.model
        names = [counter.name for counter in fields(self) if counter.name != "model"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        first = max(self.first_queued_tokens, other.first_queued_tokens)
        tpot_s = min(filter(None, (self.tpot_s, other.tpot_s)), default=0.0)
        return replace(self, **sums | {"first_queued_tokens": first, "tpot_s": tpot_s})


def is_urgent_change(reported: Iterable[ModelDemand], demands: Iterable[ModelDemand]) -> bool:
    """Whether `demands` differ so much from the last `reported` ones to be reported at once."""
    before, now = ({demand.model: demand for demand in report} for report in (reported, demands))
    for model in before.keys() | now.keys():
        old, new = (report.get(model) or ModelDemand(model) for report in (before, now))
        # Roles follow the mix of the load, which is not urgent.
        rates = {name: getattr(new, name) for name in _RATES}
        if replace(old, **rates) != new:
            return True
        # The arrival rate changes with every request and decays with time: report only a rise.
        if new.arriving_tokens_per_s > RATE_RISE * old.arriving_tokens_per_s:
            return True
    return False
