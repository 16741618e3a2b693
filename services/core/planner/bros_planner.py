"""The planner of `scheduling: bros`: BROS's packing as printed (BROS §4.2).

The comments name lines of its Algorithm 1.

Online requests, those that run and those that wait together, go by their residual time, as long as
the iteration ends within the least one. Batch requests follow, oldest first: swapped KV, by which
BROS sorts them, does not exist here. One that does not fit takes the turn of the online request
with most time left. Prompts are not cut to fit in time, only where `max_batch_tokens` ends.

Some things are added where the printed algorithm leaves requests without service: residual times
that cannot be kept bound nothing, the most urgent request runs even if its cost exceeds the bound,
one that finds no KV does not end the search, an iteration in which nothing else runs takes what it
can, and the later tokens of a group count with their target where iterations take longer. KV
blocks are not shared by two requests; batch requests lose theirs to online ones. Merged groups run
as with `conserve`.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from services.core.cost.model import TOKENS
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
    """`tokens` tokens of `sequence`, after `prefix` others."""

    sequence: Sequence
    prefix: int
    tokens: int


@dataclass(slots=True)
class _Packed:
    """What an iteration holds so far: sequences and their tokens, online ones before batch ones."""

    spent: Spent
    limit_s: float
    slots: int
    online: list[_Chosen] = field(default_factory=list)
    batch: list[_Chosen] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.online or self.batch)

    @property
    def full(self) -> bool:
        return len(self.online) + len(self.batch) >= self.slots

    def tokens_of(self, sequence: Sequence) -> int:
        """Its whole prompt, or as much of it as the iteration has tokens left for."""
        return min(sequence.remaining, self.spent.tokens_left)

    def fits(self, sequence: Sequence) -> bool:
        """Whether it can join within the bound."""
        tokens = self.tokens_of(sequence)
        if self.full or not tokens:
            return False
        return self.spent.with_chunk_s(sequence.computed, tokens) <= self.limit_s

    def is_late_with(self, sequence: Sequence) -> bool:
        """Whether the iteration would exceed the bound with it."""
        tokens = self.tokens_of(sequence)
        return self.spent.with_chunk_s(sequence.computed, tokens) > self.limit_s

    def add(self, sequence: Sequence) -> None:
        """It joins."""
        chosen = _Chosen(sequence, sequence.computed, self.tokens_of(sequence))
        self.spent.add(chosen.prefix, chosen.tokens)
        (self.online if sequence.online else self.batch).append(chosen)

    def drop_preempted(self) -> None:
        """Leave out sequences that have lost their blocks."""
        for row in (self.online, self.batch):
            for lost in [one for one in row if one.sequence.phase is not Phase.RUNNING]:
                row.remove(lost)
                self.spent.drop(lost.prefix, lost.tokens)

    def make_room(self, sequence: Sequence) -> bool:
        """Whether a batch sequence can join, alone or for an online one (lines 22 to 32)."""
        if self.empty or self.fits(sequence):
            return True
        replaced = self.pop_online()
        if replaced is None or self.fits(sequence):
            return replaced is not None
        self.add(replaced)
        return False

    def pop_online(self) -> Sequence | None:
        """Take the online sequence with most time left out; None without any."""
        if not self.online:
            return None
        chosen = self.online.pop()
        self.spent.drop(chosen.prefix, chosen.tokens)
        return chosen.sequence


@dataclass(slots=True)
class BrosPlanner:
    """Fills one iteration after the other. `SloPlanner` is ours."""

    config: IterationConfig
    sequence_table: SequenceTable
    feedback: Feedback
    harvester: Harvester = field(init=False)
    slots: AdaptiveSlots = field(init=False)

    def __post_init__(self) -> None:
        self.harvester = Harvester(self.config, self.sequence_table, self.feedback)
        self.slots = AdaptiveSlots(self.config.max_running)

    def schedule(self, plan: Plan, _in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs, and take the blocks for it; nothing runs beside it."""
        config = self.config
        ready = self.harvester.scan(plan.planned_s)
        limit_s = self._least_residual_s(ready, plan.planned_s)
        spent = Spent(config.cost_model or TOKENS, config.max_batch_tokens)
        packed = _Packed(spent, limit_s if config.cost_model else inf, self.slots.now)
        self.slots.observe(self._add_online(packed, ready, plan.planned_s))
        self._add_batch(packed, ready)
        for sequence, _, tokens in packed.online + packed.batch:
            if sequence.remaining == 1:
                plan.decodes.append(sequence)
            else:  # a prefix may have been found in the cache
                plan.add(sequence, min(tokens, sequence.remaining))
        if config.cost_model is not None:
            plan.cost_s = plan.predicted_s = spent.seconds

    def _least_residual_s(self, ready: Ready, now_s: float) -> float:
        """The least residual time of those that can be kept, first tokens included."""
        model, scale = self.config.cost_model or TOKENS, self.feedback.budget.mixed_scale
        least_s = ready.least_slack_s
        line = (one for one in self.sequence_table.waiting if one.online)
        for sequence in (*ready.prefills, *line):
            slack_s = sequence.due_s - now_s
            cost_s = scale * model.chunk_s(sequence.computed, sequence.remaining)
            if cost_s <= slack_s < least_s:
                least_s = slack_s
        return least_s

    def _add_online(self, packed: _Packed, ready: Ready, now_s: float) -> bool:
        """Add online sequences by residual time; returns whether the bound ended that."""
        pending = deque(
            sorted(ready.decodes + ready.prefills, key=lambda one: self._residual_s(one, now_s))
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
                    continue
            if not (packed.fits(sequence) or packed.empty):
                return packed.is_late_with(sequence)
            if pending and pending[0] is sequence:
                pending.popleft()
            self._start(packed, sequence)
        return False

    def _next_that_fits(self) -> Sequence | None:
        """The online sequence that finds KV and a place now, from batch ones if need be."""
        config = self.config
        found = self.sequence_table.next_to_admit(config.max_running, config.overtaken_max)
        return found if found is not None and found.online else None

    def _start(self, packed: _Packed, sequence: Sequence) -> None:
        """Have an online sequence in the iteration, unless it loses its blocks for another one."""
        if sequence.phase is Phase.RUNNING:
            self._take_block(packed, sequence)
        else:
            self.sequence_table.admit(sequence, self.config.max_running)
        if sequence.phase is Phase.RUNNING:
            packed.add(sequence)

    def _next_online(
        self, pending: deque[Sequence], has_room: bool, now_s: float
    ) -> Sequence | None:
        """The more urgent one of the first that runs and the first that waits (Figure 8)."""
        line = self.sequence_table.waiting
        waits = line[0] if has_room and line and line[0].online else None
        if not pending or waits is None:
            return pending[0] if pending else waits
        first = pending[0]
        return first if self._residual_s(first, now_s) <= self._residual_s(waits, now_s) else waits

    def _residual_s(self, sequence: Sequence, now_s: float) -> float:
        return deadline.residual_s(sequence, now_s, self.feedback.budget.iteration_s)

    def _add_batch(self, packed: _Packed, ready: Ready) -> None:
        """Add batch sequences, or let them take the turns of online ones; oldest first."""
        table, config = self.sequence_table, self.config
        for sequence in ready.batch_decodes + ready.batch_prefills:
            if sequence.phase is not Phase.RUNNING:
                continue
            if not self._has_blocks(sequence) and table.ledger.least_room <= 0 and packed.online:
                continue
            if not packed.make_room(sequence):
                return
            self._take_block(packed, sequence)
            if sequence.phase is Phase.RUNNING:
                packed.add(sequence)
        while True:
            found = table.next_to_admit(config.max_running, config.overtaken_max)
            if found is None or found.online or not packed.make_room(found):
                return
            packed.add(table.admit(found, config.max_running))

    def _has_blocks(self, sequence: Sequence) -> bool:
        return len(sequence.token_ids) <= sequence.blocks * self.config.block_size

    def _take_block(self, packed: _Packed, sequence: Sequence) -> None:
        if not self._has_blocks(sequence) and self.sequence_table.grow(sequence):
            packed.drop_preempted()
