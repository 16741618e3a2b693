"""Spreads free chunks over the KV tails of a stage's layers."""

from collections.abc import Sequence

import numpy as np

from services.worker.engine.memory.arena import Arena, Handles
from services.worker.engine.memory.kv_range import KvRange


def raise_tails(
    arena: Arena, ranges: Sequence[KvRange], chunks_max: int | None, *, cold: bool
) -> tuple[int, int]:
    """Map free chunks at the tails of `ranges`, the shortest first; returns (chunks, map calls).

    All ranges grow to one level of at most `chunks_max`; longer ones stay as they are. Chunks that
    do not suffice for another chunk in every range stay free.
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
    # Leave out the highest range while it is above the level that the others reach.
    while (supply + total) // count < ordered[count - 1]:
        count -= 1
        total -= ordered[count]
    return (supply + total) // count
