"""Which layers' KV has to travel between which workers when layers change hands."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.core.groups.layer_map import Stage


@dataclass(frozen=True, slots=True)
class Transfer:
    """KV of one request in layers `first_layer .. end_layer - 1` goes to another worker."""

    source: str
    destination: str
    first_layer: int
    end_layer: int


def transfers_between(old: Sequence[Stage], new: Sequence[Stage]) -> tuple[Transfer, ...]:
    """What moves for a request that `old` stages held and `new` stages are to run."""
    return tuple(
        Transfer(
            source.worker_id,
            target.worker_id,
            max(source.first_layer, target.first_layer),
            min(source.end_layer, target.end_layer),
        )
        for source in old
        for target in new
        if source.worker_id != target.worker_id
        and max(source.first_layer, target.first_layer) < min(source.end_layer, target.end_layer)
    )
