"""Demand that waits at the scheduler, as the memory manager learns it."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

RATE_RISE = 1.1
"""A rate of arrivals is news if it is so many times the one that was told."""


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """The scheduler's report about one model.

    The `queued` requests need `queued_tokens` of KV before they can run. `refused` requests of the
    last seconds needed `refused_tokens`. `arriving_tokens_per_s` is the KV that arriving requests
    need before they can run. `batch_queued` requests that need `batch_queued_tokens` wait beside
    those: where classes count, batch requests are no demand, and have no part in the other numbers.
    """

    model: str
    queued: int = 0
    queued_tokens: int = 0
    refused: int = 0
    refused_tokens: int = 0
    arriving_tokens_per_s: float = 0.0
    batch_queued: int = 0
    batch_queued_tokens: int = 0

    def plus(self, other: "ModelDemand") -> "ModelDemand":
        """What both report together of one model."""
        assert self.model == other.model
        names = [one.name for one in fields(self) if one.name != "model"]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})


def is_news(told: Iterable[ModelDemand], demands: Iterable[ModelDemand]) -> bool:
    """Whether the memory manager must learn of `demands` at once, after what it was `told`.

    A rate of arrivals moves with every request and as time passes: only a higher one is urgent.
    """
    before, now = ({one.model: one for one in each} for each in (told, demands))
    for model in before.keys() | now.keys():
        was, one = (each.get(model) or ModelDemand(model) for each in (before, now))
        if replace(was, arriving_tokens_per_s=one.arriving_tokens_per_s) != one:
            return True
        if one.arriving_tokens_per_s > RATE_RISE * was.arriving_tokens_per_s:
            return True
    return False
