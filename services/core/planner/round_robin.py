"""The planner of `scheduling: round_robin`: iterations of online and of batch work alternate.

A baseline of BROS, for comparisons. A kind that has nothing to run leaves its turn to the other.
Merged groups run as with `fcfs`.
"""

from collections import deque
from dataclasses import dataclass

from services.core.planner.plan import Plan
from services.core.planner.single import SinglePlanner


@dataclass(slots=True)
class RoundRobinPlanner(SinglePlanner):
    """Fills one iteration after the other, each with one kind of requests."""

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
