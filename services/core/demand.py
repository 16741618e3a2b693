"""What waits at the scheduler, in the words that it and the memory manager share."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """What the scheduler tells of one model.

    `queued_tokens` of KV need the queued requests before they can run; `refused` and
    `refused_tokens` are of the last seconds; `arriving_tokens_per_s` is the KV that arriving
    requests need before they can run.
    """

    model: str
    queued: int = 0
    queued_tokens: int = 0
    refused: int = 0
    refused_tokens: int = 0
    arriving_tokens_per_s: float = 0.0
