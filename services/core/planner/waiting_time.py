"""The planner of `scheduling: waiting_time`: the request that has waited longest runs first.

A baseline (BROS §2.2), which preempts by the time since a request's last iteration,
whatever its class. An iteration has at most `max_running` sequences. More than these may hold KV,
as far as it lasts, and take turns; when it does not, the newest one is recomputed later. Merged
groups run as with `fcfs`.
"""

from collections import deque
from dataclasses import dataclass, field

from services.core.planner.config import IterationConfig
from services.core.planner.plan import Plan
from services.core.planner.sequence import Phase, Sequence
from services.core.planner.sequence_table import SequenceTable


@dataclass(slots=True)
class WaitingTimePlanner:
    """Fills one iteration after the other, whoever has waited longest first."""

    config: IterationConfig
    sequence_table: SequenceTable
    # By request: the end of its last iteration, and how many it has been in.
    _ended: dict[str, tuple[float, int]] = field(default_factory=dict)
    _ran: tuple[Sequence, ...] = ()  # in the last iteration

    def schedule(self, plan: Plan, _in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs, and take the blocks for it; nothing runs beside it."""
        self._note_end(plan.planned_s)
        table, config = self.sequence_table, self.config
        holding = config.max_running + config.max_waiting
        budget, preemptions = config.max_batch_tokens, table.preemptions_total
        line = deque(sorted(table.running, key=self._since))
        while budget and len(plan.decodes) + len(plan.prefills) < config.max_running:
            started = False
            first = table.waiting[0] if table.waiting else None
            if table.preemptions_total != preemptions:
                first = None  # a start would only lose its blocks again
            if first is not None and (not line or self._since(first) < self._since(line[0])):
                found = table.next_to_admit(holding, config.overtaken_max)
                if found is not None:
                    line.appendleft(table.admit(found, holding))
                    started = True
            if not line:
                break
            sequence = line.popleft()
            if sequence.phase is Phase.RUNNING and (started or self._has_block(sequence)):
                tokens = min(sequence.remaining, budget)
                budget -= tokens
                if sequence.remaining == 1:
                    plan.decodes.append(sequence)
                else:
                    plan.add(sequence, tokens)
        plan.drop_preempted()
        self._ran = tuple(plan.sequences())

    def _has_block(self, sequence: Sequence) -> bool:
        """Give it a block if it needs one; whether it still runs then."""
        if len(sequence.token_ids) > sequence.blocks * self.config.block_size:
            self.sequence_table.grow(sequence)
        return sequence.phase is Phase.RUNNING

    def _since(self, sequence: Sequence) -> tuple[float, int]:
        """When it began to wait: it arrived, or its last iteration ended; then its iterations."""
        return self._ended.get(sequence.request_id, (sequence.arrival_s, 0))

    def _note_end(self, now_s: float) -> None:
        """The iteration before this one ended at `now_s`, or before it."""
        for sequence in self._ran:
            self._ended[sequence.request_id] = now_s, self._since(sequence)[1] + 1
        known = self.sequence_table.sequences
        if len(self._ended) > 2 * len(known) + 64:
            self._ended = {name: ended for name, ended in self._ended.items() if name in known}
