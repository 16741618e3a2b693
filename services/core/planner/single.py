"""Planners of workers that are not part of a pipeline, for policies without deadlines.

Decodes go first, then running prefills, then waiting requests (`overtaking.py`) while blocks and
token budget last. When a decode finds no free block, a request is preempted and recomputed later:
by default the newest, so that the oldest always advances (`victims.py`).

*Online* requests are those of all classes except `batch`. If batch work yields under the policy
(`Precedence`), running and waiting prompts of online requests come before those of batch requests,
which use the rest of the token budget.
"""

from collections import deque
from dataclasses import dataclass

from services.core.planner.config import IterationConfig
from services.core.planner.plan import Plan
from services.core.planner.sequence import Phase, Sequence
from services.core.planner.sequence_table import SequenceTable

_ONLINE, _BATCH = frozenset({True}), frozenset({False})
"""Values of `Sequence.online` that a step of a plan admits."""
ALL_CLASSES = _ONLINE | _BATCH
_BY_KIND, _TOGETHER = (_ONLINE, _BATCH), (ALL_CLASSES,)


@dataclass(slots=True)
class SinglePlanner:
    """Plans the iterations of a single worker. `PipelinePlanner` is the pipeline counterpart."""

    config: IterationConfig
    sequence_table: SequenceTable

    def schedule(self, plan: Plan, _in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs and allocate its blocks; no other iteration is in flight."""
        preempted = self._add_decodes(plan.decodes, self.sequence_table.running)
        budget = self.config.max_batch_tokens - len(plan.decodes)
        table = self.sequence_table
        for kind in _BY_KIND if table.precedence.batch_yields else _TOGETHER:
            # A batch iteration was interrupted for this prompt: add no batch work that delays it.
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
        # More sequences than `max_batch_tokens` can only remain from a pipeline before a split.
        for sequence in running[: self.config.max_batch_tokens]:
            tokens = len(sequence.token_ids)
            if tokens - sequence.computed != 1:
                continue
            if tokens > sequence.blocks * block_size:
                preempted = self.sequence_table.grow(sequence) or preempted
                if sequence.phase is not Phase.RUNNING:
                    continue
            decodes.append(sequence)
        if preempted:  # some victim policies may preempt a sequence that was added
            decodes[:] = [decode for decode in decodes if decode.phase is Phase.RUNNING]
        return preempted

    def _add_prefills(self, plan: Plan, budget: int, kind: frozenset[bool]) -> int:
        """Continue running prefills; returns the remaining token budget."""
        for sequence in self.sequence_table.running:
            remaining = len(sequence.token_ids) - sequence.computed
            if remaining > 1 and budget and sequence.online in kind:
                tokens = min(remaining, budget)
                plan.add(sequence, tokens)
                budget -= tokens
        return budget

    def _admit(self, plan: Plan, budget: int, kind: frozenset[bool]) -> int:
        """Admit waiting sequences that fit; returns the remaining token budget.

        May preempt batch sequences, also those in `plan`.
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

    If either has no work, the other runs instead.
    """

    online_next: bool = True

    def schedule(self, plan: Plan, _in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs and allocate its blocks; no other iteration is in flight."""
        turn = self.online_next
        for online in (turn, not turn):
            self._schedule_class(plan, online)
            if plan:
                self.online_next = not online
                return

    def _schedule_class(self, plan: Plan, online: bool) -> None:
        config, table = self.config, self.sequence_table
        running = [sequence for sequence in table.running if sequence.online is online]
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
        """Whether a waiting online sequence at the overtaking bound blocks batch admissions."""
        queue, most = self.sequence_table.waiting, self.config.overtaken_max
        return any(waiting.online and waiting.overtaken >= most for waiting in queue)


@dataclass(slots=True)
class PrefillFirstPlanner(SinglePlanner):
    """Runs prompts without decodes beside them: a baseline of BROS, and vLLM's former policy.

    An iteration runs whole prompts while any fit, and decodes otherwise, first come, first served.
    A prompt of more than `max_batch_tokens` tokens runs in chunks in consecutive iterations. Merged
    groups run as with `fcfs`.
    """

    def schedule(self, plan: Plan, _in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs and allocate its blocks; no other iteration is in flight."""
        self._admit_whole(plan, self._add_prefills(plan, self.config.max_batch_tokens, ALL_CLASSES))
        if not plan:
            self._add_decodes(plan.decodes, self.sequence_table.running)

    def _admit_whole(self, plan: Plan, budget: int) -> None:
        """Admit waiting sequences while the next fits unchunked into the token `budget`.

        A preempted sequence runs its prompt and output so far as a prompt again.
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
