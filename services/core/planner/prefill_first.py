"""The planner of `scheduling: prefill_first`: prompts run alone, and stop decodes meanwhile.

The baseline of BROS, which is vLLM before it ran prompts in chunks: an iteration has whole prompts
as long as some fit, and decodes otherwise, first come, first served. Only a prompt of more than
`max_batch_tokens`, which vLLM refuses, runs in pieces, one iteration after the other. Merged groups
run as with `fcfs`.
"""

from collections import deque
from dataclasses import dataclass

from services.core.planner.plan import Plan
from services.core.planner.single import EVERYBODY, SinglePlanner


@dataclass(slots=True)
class RoundRobinPlanner(SinglePlanner):
    """Alternates iterations of online and of batch work; a baseline of BROS, for comparisons.

    A kind that has nothing to run leaves its turn to the other.
    """

    online_next: bool = True

    def fill(self, plan: Plan, _in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs, and take the blocks for it; nothing runs beside it."""
        turn = self.online_next
        for online in (turn, not turn):
            self._fill_with(plan, online)
            if plan:
                self.online_next = not online
                return

    def _fill_with(self, plan: Plan, online: bool) -> None:
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
    """Fills one iteration after the other, with prompts or with decodes."""

    def fill(self, plan: Plan, _in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs, and take the blocks for it; nothing runs beside it."""
        self._admit_whole(plan, self._add_prefills(plan, self.config.max_batch_tokens, EVERYBODY))
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
