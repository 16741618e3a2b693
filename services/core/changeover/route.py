"""Computes the KV transfers between workers that a change of layer ranges requires."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.core.groups.layer_map import Stage


@dataclass(frozen=True, slots=True)
class Transfer:
    """Transfer of a sequence's KV of layers `first_layer` to `end_layer` - 1 between workers."""

    source: str
    destination: str
    first_layer: int
    end_layer: int


def transfers_between(old: Sequence[Stage], new: Sequence[Stage]) -> tuple[Transfer, ...]:
    """The transfers for a sequence with KV at `old` stages that will run at `new` stages."""
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
