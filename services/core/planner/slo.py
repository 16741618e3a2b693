"""Plans the iterations of a single worker by deadlines, and harvests the slack for batch work.

*Online* requests are those of all classes except `batch`. *Residual time* is the time until the
deadline of a decode's next token; *slack* is what online work leaves of the least residual time,
which bounds an iteration (BROS §4.2; with token groups of size 1 this is the bound of ConServe
§4.2). Online decodes go first: all if they fit, else the most urgent. Online prefills follow by
deadline: up to `online_chunk_tokens` tokens of the iteration regardless of the bound, more within
it. Batch work uses a share of the slack (`harvest.py`). Without online work, the wait that a
request may suffer if it arrives meanwhile bounds an iteration; if arrivals can interrupt it,
`offline_iteration_s` does. A suspended microbatch resumes beside online decodes if its remaining
time fits into the share of batch work.

With `scheduling: conserve` predictions are not corrected, batch work gets all of the slack, and all
online decodes run, as in ConServe §4.2; `preempt: deadline` and `preempted_work: discard` add its
Algorithm 2. Unlike in the paper, the residual time bounds an iteration instead of the TPOT target,
online prefills have a floor of tokens, iterations without online decodes have no TTFT bound, and
batch-only iterations keep their limits.

A batch sequence that does not fit skips the iteration and keeps its blocks. Without a cost model
there is no time bound: batch work uses the token budget that online work leaves.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf

from services.core.cost.model import TOKEN_COSTS
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
    """Plans iterations of a single worker by deadlines; `SinglePlanner` ignores deadlines."""

    config: IterationConfig
    sequence_table: SequenceTable
    feedback: Feedback
    harvester: Harvester = field(init=False)

    def __post_init__(self) -> None:
        self.harvester = Harvester(self.config, self.sequence_table, self.feedback)

    def schedule(self, plan: Plan, _in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs and allocate its blocks; no other iteration is in flight."""
        config, table = self.config, self.sequence_table
        model = config.cost_model or TOKEN_COSTS
        spent = Spent(model, config.max_batch_tokens)
        ready = self.harvester.scan(plan.planned_s)
        queue = table.waiting
        online_waits = bool(queue) and queue[0].online
        # Mixed iterations (with prefills) have their own correction: predict the kind of this one.
        limit_s = self._limit_s(ready, mixed=bool(ready.prefills) or online_waits)
        none_lost = self._add_decodes(plan, ready, spent, limit_s)
        if ready.prefills or online_waits:
            self._add_prefills(plan, ready, spent, limit_s, admit=none_lost)
        if ready.online or online_waits:
            joins = bool(ready.prefills or ready.batch_prefills or queue)
            self._harvest_slack(plan, ready, spent, self._limit_s(ready, mixed=joins))
        else:
            self.harvester.schedule_batch_only(plan, ready, spent)
        self.harvester.slots.observe(plan.deadline_bound)
        if config.cost_model is not None:
            plan.cost_s = plan.predicted_s = spent.seconds
            if spent.seconds <= self._limit_s(ready, plan.mixed):
                plan.allowed_s = ready.least_residual_s

    def _limit_s(self, ready: Ready, mixed: bool) -> float:
        """Cost bound of an iteration in seconds of the cost model; `mixed` if it has prefills."""
        if self.config.cost_model is None:
            return inf
        return self.feedback.budget.limit_s(ready.least_residual_s, mixed)

    # --- online work

    def _add_decodes(self, plan: Plan, ready: Ready, spent: Spent, limit_s: float) -> bool:
        """Add online decodes; returns whether no online sequence was preempted."""
        decodes = ready.decodes
        late = limit_s < inf and spent.decodes_s(len(decodes), ready.prefix_tokens) > limit_s
        places = min(spent.tokens_left, self.harvester.slots.limit)
        plan.deadline_bound = late
        # If not all decodes fit, run the most urgent; ConServe runs all despite the time bound.
        if (late and self.feedback.corrects) or len(decodes) > places:
            decodes = self.harvester.most_urgent(decodes, spent, limit_s, plan.planned_s)
        table, block_size = self.sequence_table, self.config.block_size
        preempted = False
        chosen = plan.decodes
        for sequence in decodes:
            if sequence.phase is not Phase.RUNNING:
                continue
            if sequence.lacks_block(block_size):
                preempted = table.grow(sequence) or preempted
                if sequence.phase is not Phase.RUNNING:
                    continue
            chosen.append(sequence)
        if preempted:
            plan.drop_preempted()
        prefix_tokens = ready.prefix_tokens
        if len(plan.decodes) < len(ready.decodes):
            prefix_tokens = sum([decode.computed for decode in plan.decodes])
        spent.add_decodes(len(plan.decodes), prefix_tokens)
        if not preempted:
            return True
        ready.drop_preempted()
        # Admit nothing after an online sequence has lost its blocks: it would be preempted next.
        left = sum(sequence.online for sequence in table.running)
        plan.contended, lost = plan.contended or left < ready.online, left < ready.online
        ready.online = left
        return not lost

    def _add_prefills(
        self, plan: Plan, ready: Ready, spent: Spent, limit_s: float, admit: bool
    ) -> None:
        """Add prefills of online requests, running or waiting, by deadline."""
        config, table = self.config, self.sequence_table
        chunk = config.online_chunk_tokens
        # Up to this many tokens, decodes included, prompts run regardless of the time bound.
        floor = config.max_batch_tokens if chunk is None else chunk
        begun = deque(sorted(ready.prefills, key=deadline.order_s))
        preemptions = table.preemptions_total
        while spent.tokens_left > 0:
            if spent.tokens >= floor and not spent.tokens_within(0, limit_s, 1):
                break
            first, fitting = table.first_in_need if admit else None, None
            if first is not None and first.online:
                fitting = table.next_to_admit(config.max_running, config.overtaken_max)
                if fitting is None or not fitting.online:
                    # `first` lacks blocks or a slot. That counts only if no begun prompt is due
                    # before it.
                    due = not begun or deadline.order_s(begun[0]) > deadline.order_s(first)
                    plan.contended, fitting = plan.contended or due, None
            # Compare with `fitting`, not `first`: an overtaking prompt is due at its own deadline.
            if begun and (
                fitting is None or deadline.order_s(begun[0]) <= deadline.order_s(fitting)
            ):
                sequence = begun.popleft()
            elif fitting is not None:
                sequence = table.admit(fitting, config.max_running)
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
        """Add batch work beside online work, up to the harvest share.

        No batch work joins while an online request waits for blocks or a slot, or beside an online
        prompt while a microbatch is suspended, unless the iteration is otherwise empty.
        """
        table = self.sequence_table
        first = table.first_in_need
        online_waits = first is not None and first.online
        if not plan:
            self.harvester.schedule_batch_only(plan, ready, spent)
        elif not online_waits and not (table.suspended and plan.prefills):
            self.harvester.harvest_slack(plan, ready, spent, limit_s)

    def has_time_for(self, suspended: Plan, now_s: float) -> bool:
        """Whether the rest of the suspended microbatch fits into the share of batch work at
        `now_s`.

        Online decodes wait for it as they would for batch work in their own iteration. Always False
        if there is an online prompt, running or waiting for blocks or a slot.
        """
        model, budget = self.config.cost_model, self.feedback.budget
        first = self.sequence_table.first_in_need
        if model is None or (first is not None and first.online):
            return False
        ready = self.harvester.scan(now_s)
        if ready.prefills:
            return False
        spent = Spent(model, self.config.max_batch_tokens)
        spent_s = spent.decodes_s(len(ready.decodes), ready.prefix_tokens)
        limit_s = budget.limit_s(ready.least_residual_s, suspended.mixed)
        rest_s = remaining_s(suspended.predicted_s, suspended.ran_s / budget.scale(suspended.mixed))
        return spent_s + rest_s <= self.harvester.target_s(spent_s, limit_s)
