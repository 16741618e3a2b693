"""Planner of `scheduling: bros`: the packing of BROS as published (BROS §4.2, Algorithm 1).

*Residual time* is the time until the deadline of a request's next token. Online requests, running
and waiting, are packed by residual time while the iteration ends within the least residual time.
Batch requests follow, oldest first (BROS sorts them by the amount of swapped KV). A batch request
that does not fit replaces the online request with the most residual time. Prompts are not chunked
to fit in time, only at `max_batch_tokens`.

Deviations, since the published algorithm starves some requests: residual times that cannot be met
do not bound an iteration; the most urgent request runs even if its cost exceeds the bound; a
waiting request without free KV blocks does not end the packing; the first batch request of an
otherwise empty iteration always fits; and residual time reserves at most `tpot_s` for each later
token of a token group. Two requests write to the same KV block only with `block_sharing`
(`shared_tails.py`); batch requests yield theirs to online ones. Pipelines of merged workers are
planned as with `conserve`.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from services.core.cost.model import TOKEN_COSTS
from services.core.planner import deadline
from services.core.planner.budget import Spent
from services.core.planner.config import IterationConfig
from services.core.planner.feedback import Feedback
from services.core.planner.harvester import Harvester, Ready
from services.core.planner.packing import AdaptiveSlots
from services.core.planner.plan import Plan
from services.core.planner.sequence import Phase, Sequence
from services.core.planner.sequence_table import SequenceTable


class _Chosen(NamedTuple):
    """The next `tokens` tokens of `sequence`, after `prefix` cached tokens."""

    sequence: Sequence
    prefix: int
    tokens: int


@dataclass(slots=True)
class _Packed:
    """The iteration that is being packed: its online and batch sequences, and their cost."""

    spent: Spent  # cost and tokens so far
    limit_s: float  # bound on the cost, in seconds
    slots: int  # maximum number of sequences
    online: list[_Chosen] = field(default_factory=list)
    batch: list[_Chosen] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.online or self.batch)

    @property
    def full(self) -> bool:
        return len(self.online) + len(self.batch) >= self.slots

    def tokens_of(self, sequence: Sequence) -> int:
        """Tokens of the sequence that would run: all remaining, up to the token budget."""
        return min(sequence.remaining, self.spent.tokens_left)

    def fits(self, sequence: Sequence) -> bool:
        """Whether the sequence fits within slots, token budget and time bound."""
        tokens = self.tokens_of(sequence)
        if self.full or not tokens:
            return False
        return self.spent.with_chunk_s(sequence.computed, tokens) <= self.limit_s

    def is_late_with(self, sequence: Sequence) -> bool:
        """Whether the iteration would exceed the time bound with this sequence."""
        tokens = self.tokens_of(sequence)
        return self.spent.with_chunk_s(sequence.computed, tokens) > self.limit_s

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the iteration."""
        chosen = _Chosen(sequence, sequence.computed, self.tokens_of(sequence))
        self.spent.add(chosen.prefix, chosen.tokens)
        (self.online if sequence.online else self.batch).append(chosen)

    def drop_preempted(self) -> None:
        """Remove sequences that were preempted since they were added."""
        for row in (self.online, self.batch):
            for lost in [entry for entry in row if entry.sequence.phase is not Phase.RUNNING]:
                row.remove(lost)
                self.spent.remove(lost.prefix, lost.tokens)

    def make_room(self, sequence: Sequence) -> bool:
        """Make room for a batch sequence, replacing an online sequence if needed; False if none."""
        if self.empty or self.fits(sequence):
            return True
        # Algorithm 1, lines 22 to 32: replace the online request with the most residual time.
        replaced = self.pop_online()
        if replaced is None or self.fits(sequence):
            return replaced is not None
        self.add(replaced)
        return False

    def pop_online(self) -> Sequence | None:
        """Remove the online sequence with the most residual time; None without online sequences."""
        if not self.online:
            return None
        chosen = self.online.pop()
        self.spent.remove(chosen.prefix, chosen.tokens)
        return chosen.sequence


@dataclass(slots=True)
class BrosPlanner:
    """Plans iterations of a single worker as published by BROS; for comparisons."""

    config: IterationConfig
    sequence_table: SequenceTable
    feedback: Feedback
    harvester: Harvester = field(init=False)
    slots: AdaptiveSlots = field(init=False)

    def __post_init__(self) -> None:
        self.harvester = Harvester(self.config, self.sequence_table, self.feedback)
        self.slots = AdaptiveSlots(self.config.max_running)

    def schedule(self, plan: Plan, _in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs and allocate its blocks; no other iteration is in flight."""
        config = self.config
        ready = self.harvester.scan(plan.planned_s)
        limit_s = self._least_residual_s(ready, plan.planned_s)
        spent = Spent(config.cost_model or TOKEN_COSTS, config.max_batch_tokens)
        packed = _Packed(spent, limit_s if config.cost_model else inf, self.slots.limit)
        self.slots.observe(self._add_online(packed, ready, plan.planned_s))
        self._add_batch(packed, ready)
        for sequence, _, tokens in packed.online + packed.batch:
            if sequence.remaining == 1:
                plan.decodes.append(sequence)
            else:  # fewer tokens may remain: admission found a cached prefix
                plan.add(sequence, min(tokens, sequence.remaining))
        if config.cost_model is not None:
            plan.cost_s = plan.predicted_s = spent.seconds

    def _least_residual_s(self, ready: Ready, now_s: float) -> float:
        """The least residual time of online requests that can be met, waiting ones included."""
        model, scale = self.config.cost_model or TOKEN_COSTS, self.feedback.budget.mixed_scale
        least_s = ready.least_residual_s
        waiting = (sequence for sequence in self.sequence_table.waiting if sequence.online)
        for sequence in (*ready.prefills, *waiting):
            residual_s = sequence.due_s - now_s
            cost_s = scale * model.chunk_s(sequence.computed, sequence.remaining)
            # A deadline that is missed in any case must not shorten iterations.
            if cost_s <= residual_s < least_s:
                least_s = residual_s
        return least_s

    def _add_online(self, packed: _Packed, ready: Ready, now_s: float) -> bool:
        """Pack online sequences by residual time; returns whether the time bound excluded any."""
        pending = deque(
            sorted(ready.decodes + ready.prefills, key=lambda seq: self._residual_s(seq, now_s))
        )
        has_room = True
        while not packed.full:
            while pending and pending[0].phase is not Phase.RUNNING:
                pending.popleft()
            sequence = self._next_online(pending, has_room, now_s)
            if sequence is None:
                return False
            if sequence.phase is Phase.WAITING:
                sequence = self._next_that_fits()
                has_room = sequence is not None
                if sequence is None:
                    continue  # no waiting request fits: pack only running requests
            if not (packed.fits(sequence) or packed.empty):
                return packed.is_late_with(sequence)
            if sequence in pending:  # also a preempted sequence that starts again
                pending.remove(sequence)
            self._start(packed, sequence)
        return False

    def _next_that_fits(self) -> Sequence | None:
        """The next waiting online sequence that fits, possibly by preempting batch sequences."""
        config = self.config
        first = self.sequence_table.next_to_admit(config.max_running, config.overtaken_max)
        return first if first is not None and first.online else None

    def _start(self, packed: _Packed, sequence: Sequence) -> None:
        """Allocate the blocks of an online sequence, and add it unless it was preempted itself."""
        if sequence.phase is Phase.RUNNING:
            self._take_block(packed, sequence)
        else:
            self.sequence_table.admit(sequence, self.config.max_running)
        if sequence.phase is Phase.RUNNING:
            packed.add(sequence)

    def _next_online(
        self, pending: deque[Sequence], has_room: bool, now_s: float
    ) -> Sequence | None:
        """The more urgent of the first running and the first waiting sequence (BROS Figure 8)."""
        queue = self.sequence_table.waiting
        waiting = queue[0] if has_room and queue and queue[0].online else None
        if not pending or waiting is None:
            return pending[0] if pending else waiting
        first = pending[0]
        return (
            first if self._residual_s(first, now_s) <= self._residual_s(waiting, now_s) else waiting
        )

    def _residual_s(self, sequence: Sequence, now_s: float) -> float:
        return deadline.residual_or_implied_s(sequence, now_s, self.feedback.budget.iteration_s)

    def _add_batch(self, packed: _Packed, ready: Ready) -> None:
        """Pack batch sequences, oldest first; they may replace online sequences."""
        table, config = self.sequence_table, self.config
        for sequence in ready.batch_decodes + ready.batch_prefills:
            if sequence.phase is not Phase.RUNNING:
                continue
            # Batch work preempts nothing while online work is in the iteration, and for a shared
            # tail that was lost, nothing while any other work is.
            keeps = packed.online or (packed.batch and sequence.remaining > 1)
            if keeps and table.ledger.least_room <= 0 and sequence.lacks_block(config.block_size):
                continue
            if not packed.make_room(sequence):
                return
            self._take_block(packed, sequence)
            if sequence.phase is Phase.RUNNING:
                packed.add(sequence)
        while True:
            first = table.next_to_admit(config.max_running, config.overtaken_max)
            if first is None or first.online or not packed.make_room(first):
                return
            packed.add(table.admit(first, config.max_running))

    def _take_block(self, packed: _Packed, sequence: Sequence) -> None:
        if sequence.lacks_block(self.config.block_size) and self.sequence_table.grow(sequence):
            packed.drop_preempted()
