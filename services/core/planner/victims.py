"""Which sequence loses its blocks when one that runs needs a block and none is free.

A policy is given what runs and what is held, oldest first, and the stages without a free block. It
returns a sequence that has blocks at each of these.
"""

from collections.abc import Callable
from collections.abc import Sequence as Row

from services.core.planner.sequence import Sequence

Victims = Callable[[Row[Sequence], Row[Sequence], Callable[[], frozenset[int]]], Sequence]
"""Takes running sequences (never none), held ones, and what gives the full stages."""


def newest(
    running: Row[Sequence], held: Row[Sequence], full_stages: Callable[[], frozenset[int]]
) -> Sequence:
    """The newest one, so that the oldest always advances (PagedAttention's `recompute`)."""
    last = running[-1]
    if held and held[-1].age > last.age:
        full = full_stages()
        for sequence in reversed(held):
            if sequence.age < last.age:
                break
            if sequence.blocks and not sequence.absent & full:
                return sequence
    return last


def batch_first(
    running: Row[Sequence], held: Row[Sequence], full_stages: Callable[[], frozenset[int]]
) -> Sequence:
    """The newest one of the class `batch`, so that online ones lose nothing before it; else newest.

    One that is held takes no part: its blocks are on their way to another leader.
    """
    found = newest_batch(running)
    return found if found is not None else newest(running, held, full_stages)


def newest_batch(running: Row[Sequence]) -> Sequence | None:
    """The newest running sequence of the class `batch`."""
    return next((one for one in reversed(running) if not one.request.service.online), None)
