"""Which sequence loses its blocks when one that runs needs a block and none is free.

A policy is given what runs and what is held, oldest first, and the stages without a free block. It
returns a sequence that has blocks at each of these.
"""

from collections.abc import Callable
from collections.abc import Sequence as Row
from enum import StrEnum

from services.core.planner.sequence import Sequence

Victims = Callable[[Row[Sequence], Row[Sequence], Callable[[], frozenset[int]]], Sequence]
"""Takes running sequences (never none), held ones, and what gives the full stages."""


class VictimRule(StrEnum):
    """Which online sequence loses its blocks after all of the class `batch`."""

    NEWEST = "newest"
    SLACK = "slack"


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


def most_slack(
    running: Row[Sequence], held: Row[Sequence], full_stages: Callable[[], frozenset[int]]
) -> Sequence:
    """The newest one of the class `batch`; else the one whose next token is due last (BROS §5.2).

    Of those that are promised nothing the newest one is first. The oldest one is spared, so that it
    always advances: two that are due in turn would else take each other's blocks for ever.
    """
    found = newest_batch(running)
    if found is not None or len(running) == 1:
        return found or newest(running, held, full_stages)
    return max(running[1:], key=lambda one: (one.due_s, one.age))


def newest_batch(running: Row[Sequence]) -> Sequence | None:
    """The newest running sequence of the class `batch`."""
    return next((one for one in reversed(running) if not one.request.service.online), None)
