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
    lacking = _lacking(ranges, arena.free_chunks, chunks_max)
    handles = arena.free_handles(int(lacking.sum()))
    calls = 0
    for kv_range, part in _parts(ranges, handles, lacking):
        calls += kv_range.map_tail(part, cold=cold)
    return len(handles), calls


def prepare_tails(
    arena: Arena, ranges: Sequence[KvRange], coming: Handles
) -> list[tuple[KvRange, int]]:
    """Prepare what `raise_tails` would map once the handles `coming` are free, too.

    Returns which ranges will grow, and by how many chunks.
    """
    lacking = _lacking(ranges, arena.free_chunks + len(coming), None)
    handles = arena.free_handles(int(lacking.sum()), coming)
    grown = _parts(ranges, handles, lacking)
    for kv_range, part in grown:
        kv_range.prepare_tail(part)
    return [(kv_range, len(part)) for kv_range, part in grown]


def _lacking(ranges: Sequence[KvRange], supply: int, chunks_max: int | None) -> Handles:
    """How many chunks each range grows by."""
    mapped = np.array([kv_range.mapped_chunks for kv_range in ranges])
    level = _common_level(mapped, supply)
    if chunks_max is not None:
        level = min(level, chunks_max)
    return np.maximum(level - mapped, 0)


def _parts(
    ranges: Sequence[KvRange], handles: Handles, lacking: Handles
) -> list[tuple[KvRange, Handles]]:
    """Each range that grows, with its part of the handles."""
    parts = np.split(handles, np.cumsum(lacking)[:-1])
    return [(one, part) for one, part in zip(ranges, parts, strict=True) if len(part)]


def _common_level(heights: Handles, supply: int) -> int:
    """The highest level to which `supply` can raise all `heights` that are lower."""
    ordered = np.sort(heights).tolist()
    count, total = len(ordered), sum(ordered)
    # Leave out the highest range while it is above the level that the others reach.
    while (supply + total) // count < ordered[count - 1]:
        count -= 1
        total -= ordered[count]
    return (supply + total) // count
