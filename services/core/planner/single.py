"""The single planner: chooses what an iteration of a group of one runs.

Decodes go first, then prefills that have begun, then waiting requests by `overtaking` while
blocks and token budget last. When a decode finds no free block, the newest running request is
preempted and recomputed later (policy `recompute`), so the oldest always advances.

Where batch sequences yield (`precedence`), prefills and starts of online requests come before those
of the class `batch`, which fill what is left of the token budget. They do not join the prompt of a
request for which batch work was interrupted: it would wait for them instead.
"""

from collections import deque
from dataclasses import dataclass

from services.core.planner.config import IterationConfig
from services.core.planner.plan import Plan
from services.core.planner.sequence import Phase, Sequence
from services.core.planner.sequence_table import SequenceTable

_ONLINE, _BATCH = frozenset({True}), frozenset({False})
ALL_CLASSES = _ONLINE | _BATCH
_BY_KIND, _TOGETHER = (_ONLINE, _BATCH), (ALL_CLASSES,)


@dataclass(slots=True)
class SinglePlanner:
    """Fills one iteration after the other. `PipelinePlanner` is the pipeline counterpart."""

    config: IterationConfig
    sequence_table: SequenceTable

    def schedule(self, plan: Plan, _in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs, and take the blocks for it; nothing runs beside it."""
        preempted = self._add_decodes(plan.decodes, self.sequence_table.running)
        budget = self.config.max_batch_tokens - len(plan.decodes)
        table = self.sequence_table
        for kind in _BY_KIND if table.precedence.batch_yields else _TOGETHER:
            if kind is _BATCH and plan.prefills and table.suspended:
                break
            if len(plan.decodes) < len(table.running):
                budget = self._add_prefills(plan, budget, kind)
            if table.waiting and not preempted:
                budget = self._admit(plan, budget, kind)

    def _add_decodes(self, decodes: list[Sequence], running: list[Sequence]) -> bool:
        """Add every decode of `running`, oldest first; returns whether a sequence was preempted."""
        preempted = False
        block_size = self.config.block_size
        # More than fit in a batch can only have come from a larger group.
        for sequence in running[: self.config.max_batch_tokens]:
            tokens = len(sequence.token_ids)
            if tokens - sequence.computed != 1:
                continue
            if tokens > sequence.blocks * block_size:
                preempted = self.sequence_table.grow(sequence) or preempted
                if sequence.phase is not Phase.RUNNING:
                    continue
            decodes.append(sequence)
        if preempted:  # by a policy perhaps one that was added
            decodes[:] = [one for one in decodes if one.phase is Phase.RUNNING]
        return preempted

    def _add_prefills(self, plan: Plan, budget: int, kind: frozenset[bool]) -> int:
        """Continue prefills that have begun; returns the tokens left in the budget."""
        for sequence in self.sequence_table.running:
            remaining = len(sequence.token_ids) - sequence.computed
            if remaining > 1 and budget and sequence.online in kind:
                tokens = min(remaining, budget)
                plan.add(sequence, tokens)
                budget -= tokens
        return budget

    def _admit(self, plan: Plan, budget: int, kind: frozenset[bool]) -> int:
        """Start waiting sequences that fit, as far as possible in the order of the line.

        Returns the tokens left in the budget. Batch sequences of the plan may lose their blocks.
        """
        config, table = self.config, self.sequence_table
        preemptions = table.preemptions_total
        while budget and table.waiting and table.waiting[0].online in kind:
            sequence = table.next_to_admit(config.max_running, config.overtaken_max)
            if sequence is None:
                break
            table.admit(sequence, config.max_running)
            tokens = min(sequence.remaining, budget)
            plan.add(sequence, tokens)
            budget -= tokens
        if table.preemptions_total != preemptions:
            plan.drop_preempted()
        return budget


@dataclass(slots=True)
class RoundRobinPlanner(SinglePlanner):
    """Alternates iterations of online and of batch work; a baseline of BROS, for comparisons.

    A kind that has nothing to run leaves its turn to the other.
    """

    online_next: bool = True

    def schedule(self, plan: Plan, _in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs, and take the blocks for it; nothing runs beside it."""
        turn = self.online_next
        for online in (turn, not turn):
            self._schedule_class(plan, online)
            if plan:
                self.online_next = not online
                return

    def _schedule_class(self, plan: Plan, online: bool) -> None:
        config, table = self.config, self.sequence_table
        running = [one for one in table.running if one.online is online]
        preempted = self._add_decodes(plan.decodes, running)
        budget = config.max_batch_tokens - len(plan.decodes)
        budget = self._add_prefills(plan, budget, frozenset({online}))
        while budget and not preempted and (online or not self._online_is_next()):
            sequence = table.next_to_admit(config.max_running, config.overtaken_max, online)
            if sequence is None:
                return
            table.admit(sequence, config.max_running)
            tokens = min(sequence.remaining, budget)
            plan.add(sequence, tokens)
            budget -= tokens

    def _online_is_next(self) -> bool:
        """Whether no batch sequence starts before an online one, which was overtaken so often."""
        line, most = self.sequence_table.waiting, self.config.overtaken_max
        return any(one.online and one.overtaken >= most for one in line)


@dataclass(slots=True)
class PrefillFirstPlanner(SinglePlanner):
    """Runs prompts alone, which stop decodes meanwhile: the baseline of BROS, as vLLM once was.

    An iteration has whole prompts as long as some fit, and decodes otherwise, first come, first
    served. A prompt of more than `max_batch_tokens` runs in pieces, one iteration after the other.
    Merged groups run as with `fcfs`.
    """

    def schedule(self, plan: Plan, _in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs, and take the blocks for it; nothing runs beside it."""
        self._admit_whole(plan, self._add_prefills(plan, self.config.max_batch_tokens, ALL_CLASSES))
        if not plan:
            self._add_decodes(plan.decodes, self.sequence_table.running)

    def _admit_whole(self, plan: Plan, budget: int) -> None:
        """Start waiting sequences as long as the next one fits whole into the `budget` of tokens.

        One that is to be recomputed runs as a prompt again, with the tokens that it has had.
        """
        config, table = self.config, self.sequence_table
        while budget:
            sequence = table.next_to_admit(config.max_running, config.overtaken_max)
            if sequence is None or (plan and sequence.remaining > budget):
                return
            table.admit(sequence, config.max_running)
            tokens = min(sequence.remaining, budget)
            plan.add(sequence, tokens)
            budget -= tokens
