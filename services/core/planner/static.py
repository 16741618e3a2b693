"""Static batching, a baseline of BucketServe (UELLM): a batch runs until its last request ends.

The next batch starts only then. It has the first waiting requests whose prompts and longest
outputs fit into 0.9 of the KV memory together, so none is preempted. Its prompts run first, then
all decode. Ended requests leave at once: their rows cost nothing further, unlike in the paper.
"""

from collections import deque
from dataclasses import dataclass

from services.core.planner.plan import Plan
from services.core.planner.single import ALL_CLASSES, SinglePlanner

SAFE_SHARE = 0.9
"""Share of the KV memory that a batch may need (BucketServe eq. 5)."""


@dataclass(slots=True)
class StaticPlanner(SinglePlanner):
    """Plans a batch at a time; merged groups run as without `execution: static`."""

    def schedule(self, plan: Plan, _in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs and allocate its blocks; no other iteration is in flight."""
        if not self.sequence_table.running:
            self._form_batch()
        self._add_prefills(plan, self.config.max_batch_tokens, ALL_CLASSES)
        if not plan:
            self._add_decodes(plan.decodes, self.sequence_table.running)

    def _form_batch(self) -> None:
        """Admit the requests of the next batch; a request alone may need all KV memory."""
        config, table = self.config, self.sequence_table
        left = SAFE_SHARE * config.num_blocks * config.block_size
        while True:
            sequence = table.next_to_admit(config.max_running, config.overtaken_max)
            if sequence is None or (table.running and sequence.tokens_max > left):
                return
            table.admit(sequence, config.max_running)
            left -= sequence.tokens_max
