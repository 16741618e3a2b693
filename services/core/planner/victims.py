"""Which sequence loses its blocks when one that runs needs a block and none is free.

A policy is given what runs and what is held, oldest first, and the stages without a free block. It
returns a sequence that has blocks at each of these.
"""

from collections.abc import Callable
from collections.abc import Sequence as Row
from dataclasses import dataclass, replace
from enum import StrEnum

from services.core.line_order import LINES, LineOrder, Scheduling
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


@dataclass(frozen=True, slots=True)
class Precedence:
    """The order of the line, and of those that lose their blocks.

    With `batch_yields`, sequences of the class `batch` give their blocks and places to online
    requests, which wait for nothing else: in a larger group to those that start only if
    `yields_in_pipelines`, since a planner's rounds may hold them. `by_gateway_arrival`: the line counts
    from when a request came to its gateway, not to this worker.
    """

    queue_order: LineOrder
    victims: Victims
    batch_yields: bool
    yields_in_pipelines: bool = False
    by_gateway_arrival: bool = False


PRECEDENCES = {
    Scheduling.FCFS: Precedence(LINES[Scheduling.FCFS], newest, batch_yields=False),
    Scheduling.PRIORITY: Precedence(LINES[Scheduling.PRIORITY], batch_first, batch_yields=True),
    Scheduling.SLO: Precedence(LINES[Scheduling.SLO], batch_first, True, True, True),
    Scheduling.ROUND_ROBIN: Precedence(LINES[Scheduling.ROUND_ROBIN], newest, batch_yields=False),
    Scheduling.CONSERVE: Precedence(LINES[Scheduling.CONSERVE], batch_first, True, True, True),
    Scheduling.BROS: Precedence(LINES[Scheduling.BROS], most_slack, True, True, True),
    Scheduling.WAITING_TIME: Precedence(LINES[Scheduling.WAITING_TIME], newest, batch_yields=False),
    Scheduling.PREFILL_FIRST: Precedence(
        LINES[Scheduling.PREFILL_FIRST], newest, batch_yields=False
    ),
}


def precedence_of(scheduling: Scheduling, victims: VictimRule) -> Precedence:
    """The precedence of a planner; with `slo`, `victims` says who gives blocks up after batch."""
    found = PRECEDENCES[scheduling]
    if scheduling is Scheduling.SLO and victims is VictimRule.SLACK:
        return replace(found, victims=most_slack)
    return found
