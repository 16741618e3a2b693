"""Batch sequences that rest at a worker while another one leads.

They gave their KV up when the configuration ended, so that only that of online requests moves. A
worker that leads no longer keeps them: they wait in its planner, which plans nothing, and go on
when it leads again. Nobody reads less for it: their streams stay where they are. A group that stays
merged for `shelf_max_s` gets them, as any sequence without KV; so it does at once if the worker is
leaving. If the worker dies, their gateways ask elsewhere.

A sequence that has begun nowhere may go back to the scheduler meanwhile, as any that waits.

A worker that goes on leading deals its batch sequences to all new leaders, as it does with others.
"""

from services.core.changeover.configuration import Configuration
from services.core.changeover.member_context import MemberContext
from services.core.planner.sequence import Sequence


class Shelf:
    """The batch sequences that rest, and since when this worker has not led."""

    def __init__(self, context: MemberContext) -> None:
        self._context = context
        self._names: frozenset[str] = frozenset()
        self._since_s: float | None = None

    @property
    def due_s(self) -> float | None:
        """When the leader gets what rests here; None if nothing does."""
        if self._since_s is None or self._context.planner.sequences.keys().isdisjoint(self._names):
            return None
        return self._since_s + self._context.planner.config.shelf_max_s

    def fill(self, new: Configuration) -> frozenset[str]:
        """A change begins; returns the sequences that are not to be handed over with it."""
        context = self._context
        was, self._names = self._names, frozenset()
        if new.leads:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = context.now_s
        if any(context.worker_id in group.draining for group in new.groups):
            return self._names
        sequences = context.planner.sequences.values()
        rests = frozenset(one.request_id for one in sequences if self._may_rest(one))
        if new.leads:
            return rests & was
        self._names = rests
        return rests

    def take_due(self) -> list[str]:
        """The sequences that have rested for too long, oldest first; they rest no more."""
        due_s, context = self.due_s, self._context
        if due_s is None or context.now_s < due_s:
            return []
        sequences = context.planner.sequences
        found = [sequences[name] for name in self._names if name in sequences]
        self._names = frozenset()
        return [one.request_id for one in sorted(found, key=lambda one: one.age)]

    def _may_rest(self, sequence: Sequence) -> bool:
        """Whether it is batch work that yields, and has given its blocks back."""
        yields = self._context.planner.sequence_table.precedence.batch_yields
        return yields and not sequence.request.service.online and not sequence.blocks
