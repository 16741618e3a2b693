"""The planner of `scheduling: waiting_time`: the longest wait since the last iteration runs first.

A baseline (BROS §2.2) that ignores service classes. An iteration runs at most `max_running`
sequences. While blocks last, more sequences may hold KV, and run in turn; when blocks run out, the
newest is preempted and recomputed later. Pipelines of merged workers are planned as with `fcfs`.
"""

from collections import deque
from dataclasses import dataclass, field

from services.core.planner.config import IterationConfig
from services.core.planner.plan import Plan
from services.core.planner.sequence import Phase, Sequence
from services.core.planner.sequence_table import SequenceTable


@dataclass(slots=True)
class WaitingTimePlanner:
    """Plans iterations of a single worker, longest wait first."""

    config: IterationConfig
    sequence_table: SequenceTable
    # Sequence id → end of its last iteration, and the number of its iterations.
    _ended: dict[str, tuple[float, int]] = field(default_factory=dict)
    _ran: tuple[Sequence, ...] = ()  # sequences of the last iteration

    def schedule(self, plan: Plan, _in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs and allocate its blocks; no other iteration is in flight."""
        self._note_end(plan.planned_s)
        table, config = self.sequence_table, self.config
        # More sequences than `max_running` may hold KV: they run in turn.
        holding = config.max_running + config.max_waiting
        budget, preemptions = config.max_batch_tokens, table.preemptions_total
        # Merge running and waiting sequences by the time since which they wait.
        queue = deque(sorted(table.running, key=self._since))
        while budget and len(plan.decodes) + len(plan.prefills) < config.max_running:
            started = False
            first = table.waiting[0] if table.waiting else None
            if table.preemptions_total != preemptions:
                first = None  # blocks are scarce: an admitted sequence would be preempted soon
            if first is not None and (not queue or self._since(first) < self._since(queue[0])):
                fitting = table.next_to_admit(holding, config.overtaken_max)
                if fitting is not None:
                    queue.appendleft(table.admit(fitting, holding))
                    started = True
            if not queue:
                break
            sequence = queue.popleft()
            if sequence.phase is Phase.RUNNING and (started or self._ensure_block(sequence)):
                tokens = min(sequence.remaining, budget)
                budget -= tokens
                if sequence.remaining == 1:
                    plan.decodes.append(sequence)
                else:
                    plan.add(sequence, tokens)
        plan.drop_preempted()
        self._ran = tuple(plan.sequences())

    def _ensure_block(self, sequence: Sequence) -> bool:
        """Allocate a block if needed; False if the sequence itself was preempted."""
        if sequence.lacks_block(self.config.block_size):
            self.sequence_table.grow(sequence)
        return sequence.phase is Phase.RUNNING

    def _since(self, sequence: Sequence) -> tuple[float, int]:
        """Sort key: start of the wait (arrival or end of the last iteration), then iterations."""
        return self._ended.get(sequence.seq_id, (sequence.arrival_s, 0))

    def _note_end(self, now_s: float) -> None:
        """Note the end of the previous iteration; `now_s` is the time of the next plan."""
        for sequence in self._ran:
            self._ended[sequence.seq_id] = now_s, self._since(sequence)[1] + 1
        # Amortised clean-up of ended sequences.
        known = self.sequence_table.sequences
        if len(self._ended) > 2 * len(known) + 64:
            self._ended = {seq_id: end for seq_id, end in self._ended.items() if seq_id in known}
