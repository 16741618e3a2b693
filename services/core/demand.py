"""Demand that waits at the scheduler, as the memory manager learns it."""

from dataclasses import dataclass, fields, replace


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
