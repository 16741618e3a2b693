"""Victim policies: which sequence is preempted when a running sequence finds no free block.

A *stage* is a worker of a pipeline; all have blocks of each running sequence. A *held* sequence is
not planned and may be *absent* from stages, without blocks there, while its KV moves. A policy
receives the running and the held sequences, oldest first, and a function that returns the stages
without a free block. It returns a sequence that has blocks at each of these stages.

A sequence whose KV has copies in host memory loses little, so it is preempted before others of its
class, except for the oldest sequence, which always advances. The victim may be in the iteration
that is being planned; planners remove it there (`Plan.drop_preempted`).
"""

from collections.abc import Callable
from collections.abc import Sequence as Row
from dataclasses import dataclass, replace
from enum import StrEnum

from services.core.planner.sequence import Sequence
from services.core.queue_order import QUEUE_ORDERS, QueueOrder, Scheduling

VictimPolicy = Callable[[Row[Sequence], Row[Sequence], Callable[[], frozenset[int]]], Sequence]
"""Takes running (not empty) and held sequences, and a function that returns the full stages."""


class VictimRule(StrEnum):
    """Which online sequence is preempted when no batch sequence is left."""

    NEWEST = "newest"
    SLACK = "slack"


def newest(
    running: Row[Sequence], held: Row[Sequence], full_stages: Callable[[], frozenset[int]]
) -> Sequence:
    """The newest sequence, running or held, so that the oldest always advances.

    A sequence with copies in host memory goes first.
    """
    saved = next((sequence for sequence in reversed(running[1:]) if sequence.is_saved), None)
    if saved is not None:
        return saved
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
    """The newest batch sequence; without batch sequences the newest of all."""
    # Held batch sequences are exempt: their KV is moving between workers.
    victim = newest_batch(running)
    return victim if victim is not None else newest(running, held, full_stages)


def most_slack(
    running: Row[Sequence], held: Row[Sequence], full_stages: Callable[[], frozenset[int]]
) -> Sequence:
    """The newest batch sequence; else the sequence with the latest deadline (BROS §5.2).

    Sequences without a target are preempted first, the newest before the others.
    """
    victim = newest_batch(running)
    if victim is not None or len(running) == 1:
        return victim or newest(running, held, full_stages)
    # The oldest is exempt, so that it always advances: otherwise two sequences with alternating
    # deadlines could preempt each other forever.
    return max(running[1:], key=lambda sequence: (sequence.due_s, sequence.age))


def newest_batch(running: Row[Sequence]) -> Sequence | None:
    """The newest running batch sequence; those with copies in host memory go first."""
    batch = [sequence for sequence in running if not sequence.online]
    saved = next((sequence for sequence in reversed(batch[1:]) if sequence.is_saved), None)
    return saved or (batch[-1] if batch else None)


@dataclass(frozen=True, slots=True)
class Precedence:
    """Queue order and victim policy of a scheduling policy."""

    queue_order: QueueOrder
    victims: VictimPolicy
    # Batch sequences are preempted if online requests need their blocks or slots.
    batch_yields: bool
    # An online request that starts may preempt batch sequences in pipelines, too. Only
    # `SloPipelinePlanner` allows that: the rounds of `PipelinePlanner` may contain these sequences.
    yields_in_pipelines: bool = False
    # The queue order uses arrival times at the gateway instead of at this worker.
    by_gateway_arrival: bool = False


PRECEDENCES = {
    Scheduling.FCFS: Precedence(QUEUE_ORDERS[Scheduling.FCFS], newest, batch_yields=False),
    Scheduling.PRIORITY: Precedence(
        QUEUE_ORDERS[Scheduling.PRIORITY], batch_first, batch_yields=True
    ),
    Scheduling.SLO: Precedence(QUEUE_ORDERS[Scheduling.SLO], batch_first, True, True, True),
    Scheduling.ROUND_ROBIN: Precedence(
        QUEUE_ORDERS[Scheduling.ROUND_ROBIN], newest, batch_yields=False
    ),
    Scheduling.CONSERVE: Precedence(
        QUEUE_ORDERS[Scheduling.CONSERVE], batch_first, True, True, True
    ),
    Scheduling.BROS: Precedence(QUEUE_ORDERS[Scheduling.BROS], most_slack, True, True, True),
    Scheduling.WAITING_TIME: Precedence(
        QUEUE_ORDERS[Scheduling.WAITING_TIME], newest, batch_yields=False
    ),
    Scheduling.PREFILL_FIRST: Precedence(
        QUEUE_ORDERS[Scheduling.PREFILL_FIRST], newest, batch_yields=False
    ),
}


def precedence_of(scheduling: Scheduling, victims: VictimRule) -> Precedence:
    """The precedence of a policy; `victims` selects the online victims of `slo`."""
    precedence = PRECEDENCES[scheduling]
    if scheduling is Scheduling.SLO and victims is VictimRule.SLACK:
        return replace(precedence, victims=most_slack)
    return precedence
