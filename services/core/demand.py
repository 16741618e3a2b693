"""Demand that waits at the scheduler, as the memory manager learns it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """The scheduler's report about one model.

    The `queued` requests need `queued_tokens` of KV before they can run. `refused` requests of the
    last seconds needed `refused_tokens`. `arriving_tokens_per_s` is the KV that arriving requests
    need before they can run.
    """

    model: str
    queued: int = 0
    queued_tokens: int = 0
    refused: int = 0
    refused_tokens: int = 0
    arriving_tokens_per_s: float = 0.0
