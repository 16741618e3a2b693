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
