"""How free chunks are spread over the KV tails of a stage's layers."""

from collections.abc import Sequence

import numpy as np

from services.worker.engine.memory.arena import Arena, Handles
from services.worker.engine.memory.kv_range import KvRange


def raise_tails(
    arena: Arena, ranges: Sequence[KvRange], chunks_max: int | None, *, cold: bool
) -> tuple[int, int]:
    """Map free chunks at the tails of `ranges`, the shortest first; (chunks, calls of the arena).

    All of them end at one level, or above it if they were, and none grows beyond `chunks_max`;
    what does not suffice for another chunk in every range stays free.
    """
    mapped = np.array([kv_range.mapped_chunks for kv_range in ranges])
    level = _common_level(mapped, arena.free_chunks)
    if chunks_max is not None:
        level = min(level, chunks_max)
    lacking = np.maximum(level - mapped, 0)
    handles = arena.free_handles(int(lacking.sum()))
    calls = 0
    parts = np.split(handles, np.cumsum(lacking)[:-1])
    for kv_range, part in zip(ranges, parts, strict=True):
        if len(part):
            calls += kv_range.map_tail(part, cold=cold)
    return len(handles), calls


def _common_level(heights: Handles, supply: int) -> int:
    """The highest level to which `supply` can raise all `heights` that are lower."""
    ordered = np.sort(heights).tolist()
    count, total = len(ordered), sum(ordered)
    # Only the lowest `count` are raised, if the others are above the level that these reach.
    while (supply + total) // count < ordered[count - 1]:
        count -= 1
        total -= ordered[count]
    return (supply + total) // count
