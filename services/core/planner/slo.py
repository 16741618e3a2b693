"""The planner of a group of one that keeps deadlines, and fills the time that they leave.

The least residual time of an online decode bounds an iteration (BROS §4.2; with groups of one token
that is the bound of ConServe §4.2). Online decodes go first: all of them if they fit, else the most
urgent. Then come online prefills by deadline, which get `online_chunk_tokens` whatever the bound:
online requests do not lose by it. Batch work fills a part of what is left (`fill`).
Without online work batch work is bounded by what an arrival would have to wait; if arrivals
interrupt it, by `offline_iteration_s`. A microbatch that is suspended goes on beside online decodes
if its rest takes no longer than batch work would get of the iteration.

With `scheduling: conserve` nothing of a prediction is corrected, batch work gets all of the rest,
and all online decodes run (ConServe §4.2 as printed; its Algorithm 2 with `preempt: deadline` and
`preempted_work: discard`).

A batch sequence that does not fit is not in the iteration; it keeps its blocks. Without a cost
model nothing is bounded by time: batch work fills what online work leaves of the token budget.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf

from services.core.cost.model import TOKENS
from services.core.planner import deadline
from services.core.planner.budget import Spent
from services.core.planner.config import IterationConfig
from services.core.planner.feedback import Feedback
from services.core.planner.harvester import Harvester, Ready
from services.core.planner.plan import Plan
from services.core.planner.preemption import remaining_s
from services.core.planner.sequence import Phase
from services.core.planner.sequence_table import SequenceTable


@dataclass(slots=True)
class SloPlanner:
    """Fills one iteration after the other. `SinglePlanner` is the one without deadlines."""

    config: IterationConfig
    sequence_table: SequenceTable
    feedback: Feedback
    harvester: Harvester = field(init=False)

    def __post_init__(self) -> None:
        self.harvester = Harvester(self.config, self.sequence_table, self.feedback)

    def schedule(self, plan: Plan, _in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs, and take the blocks for it; nothing runs beside it."""
        config, table = self.config, self.sequence_table
        model = config.cost_model or TOKENS
        spent = Spent(model, config.max_batch_tokens)
        ready = self.harvester.scan(plan.planned_s)
        line = table.waiting
        waits = bool(line) and line[0].online
        limit_s = self._limit_s(ready, mixed=bool(ready.prefills) or waits)
        unhurt = self._add_decodes(plan, ready, spent, limit_s)
        self._add_prefills(plan, ready, spent, limit_s, admit=unhurt)
        if ready.online or waits:
            joins = bool(ready.prefills or ready.batch_prefills or line)
            self._harvest_slack(plan, ready, spent, self._limit_s(ready, mixed=joins))
        else:
            self.harvester.schedule_batch_only(plan, ready, spent)
        self.harvester.slots.observe(plan.deadline_bound)
        if config.cost_model is not None:
            plan.cost_s = plan.predicted_s = spent.seconds
            if spent.seconds <= self._limit_s(ready, plan.mixed):
                plan.allowed_s = ready.least_slack_s

    def _limit_s(self, ready: Ready, mixed: bool) -> float:
        """Model seconds that an iteration may cost, by whether it is mixed (`Budget`)."""
        if self.config.cost_model is None:
            return inf
        return self.feedback.budget.limit_s(ready.least_slack_s, mixed)

    # --- online work

    def _add_decodes(self, plan: Plan, ready: Ready, spent: Spent, limit_s: float) -> bool:
        """Add online decodes; returns whether no online sequence lost its blocks for others."""
        decodes = ready.decodes
        late = spent.decodes_s(len(decodes), ready.prefix_tokens) > limit_s
        places = min(spent.tokens_left, self.harvester.slots.now)
        plan.deadline_bound = late
        if (late and self.feedback.corrects) or len(decodes) > places:
            decodes = self.harvester.most_urgent(decodes, spent, limit_s, plan.planned_s)
        table, block_size = self.sequence_table, self.config.block_size
        preempted = False
        for sequence in decodes:
            if sequence.phase is not Phase.RUNNING:
                continue
            if len(sequence.token_ids) > sequence.blocks * block_size:
                preempted = table.grow(sequence) or preempted
                if sequence.phase is not Phase.RUNNING:
                    continue
            plan.decodes.append(sequence)
        if preempted:
            plan.drop_preempted()
        spent.add_decodes(len(plan.decodes), sum([one.computed for one in plan.decodes]))
        if not preempted:
            return True
        ready.drop_preempted()
        left = sum(one.online for one in table.running)
        plan.contended, lost = plan.contended or left < ready.online, left < ready.online
        ready.online = left
        return not lost

    def _add_prefills(
        self, plan: Plan, ready: Ready, spent: Spent, limit_s: float, admit: bool
    ) -> None:
        """Add prompts of online requests, begun or waiting, by deadline."""
        config, table = self.config, self.sequence_table
        chunk = config.online_chunk_tokens
        floor = config.max_batch_tokens if chunk is None else chunk
        begun = deque(sorted(ready.prefills, key=deadline.order_s))
        preemptions = table.preemptions_total
        while spent.tokens_left > 0:
            line = table.waiting
            first = line[0] if admit and line and line[0].online else None
            if spent.tokens >= floor and not spent.tokens_within(0, limit_s, 1):
                break
            if begun and (first is None or deadline.order_s(begun[0]) <= deadline.order_s(first)):
                sequence = begun.popleft()
            elif first is not None:
                found = table.next_to_admit(config.max_running, config.overtaken_max)
                if found is None or not found.online:
                    plan.contended, admit = True, False
                    continue
                sequence = table.admit(found, config.max_running)
                ready.online += 1
            else:
                break
            most = min(sequence.remaining, spent.tokens_left)
            within = spent.tokens_within(sequence.computed, limit_s, most)
            tokens = min(most, max(within, floor - spent.tokens))
            if tokens > 0:
                spent.add(sequence.computed, tokens)
                plan.add(sequence, tokens)
        if table.preemptions_total != preemptions:
            ready.drop_preempted()

    # --- batch work

    def _harvest_slack(self, plan: Plan, ready: Ready, spent: Spent, limit_s: float) -> None:
        """Add batch work beside online work, up to the fill level.

        None does while an online request waits for blocks or a place, unless nothing else runs, nor
        beside the prompt of one for which batch work was interrupted.
        """
        table = self.sequence_table
        waits = bool(table.waiting) and table.waiting[0].online
        if not plan:
            self.harvester.schedule_batch_only(plan, ready, spent)
        elif not waits and not (table.suspended and plan.prefills):
            self.harvester.harvest_slack(plan, ready, spent, limit_s)

    def has_time_for(self, suspended: Plan, now_s: float) -> bool:
        """Whether the rest of `suspended` fits in the time that batch work may take at `now_s`.

        Online decodes wait for it as they wait for batch work in their iteration. It does not make
        a prompt of an online request wait, nor one for which there is no room.
        """
        model, budget = self.config.cost_model, self.feedback.budget
        line = self.sequence_table.waiting
        if model is None or (line and line[0].online):
            return False
        ready = self.harvester.scan(now_s)
        if ready.prefills:
            return False
        spent = Spent(model, self.config.max_batch_tokens)
        spent_s = spent.decodes_s(len(ready.decodes), ready.prefix_tokens)
        limit_s = budget.limit_s(ready.least_slack_s, suspended.mixed)
        rest_s = remaining_s(suspended.predicted_s, suspended.ran_s / budget.scale(suspended.mixed))
        return spent_s + rest_s <= self.harvester.target_s(spent_s, limit_s)
