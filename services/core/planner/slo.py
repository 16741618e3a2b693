"""The planner of a group of one that keeps deadlines, and fills the time that they leave.

The least residual time of an online decode bounds an iteration (BROS §4.2; with groups of one token
that is the bound of ConServe §4.2). Online decodes go first: all of them if they fit, else the most
urgent. Then come online prefills by deadline, which get `online_chunk_tokens` whatever the bound:
online requests do not lose by it. Batch work fills a part of what is left (`fill`).
Without online work batch work is bounded by what an arrival would have to wait; if arrivals
interrupt it, by `offline_iteration_s`. A microbatch that is suspended goes on beside online decodes
if its rest takes no longer than batch work would get of the iteration.

A batch sequence that does not fit is not in the iteration; it keeps its blocks. Without a cost
model nothing is bounded by time: batch work fills what online work leaves of the token budget.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf

from services.core.cost.model import TOKENS, CostModel
from services.core.planner import deadline
from services.core.planner.budget import Spent
from services.core.planner.config import IterationConfig
from services.core.planner.feedback import Feedback
from services.core.planner.fill import CROWDED, offline_limit_s
from services.core.planner.plan import Plan
from services.core.planner.preemption import Preempt, PreemptedWork, left_s
from services.core.planner.sequence import Phase, Sequence
from services.core.planner.sequence_table import SequenceTable

FILLER_TOKENS_MIN = 16
"""A chunk of a batch prompt with fewer tokens, but for its end, costs more than it gives."""
RESERVE = 0.04
"""Part of the blocks that batch starts leave free for the growth of online sequences."""


@dataclass(slots=True)
class _Ready:
    """Running sequences that can go on, oldest first, and how urgent the online decodes are."""

    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[Sequence] = field(default_factory=list)
    batch_decodes: list[Sequence] = field(default_factory=list)
    batch_prefills: list[Sequence] = field(default_factory=list)
    prefix_tokens: int = 0  # of `decodes`
    least_slack_s: float = inf  # of those that are not late
    online: int = 0


@dataclass(slots=True)
class SloPlanner:
    """Fills one iteration after the other. `SinglePlanner` is the one without deadlines."""

    config: IterationConfig
    sequence_table: SequenceTable
    feedback: Feedback

    def fill(self, plan: Plan, _in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs, and take the blocks for it; nothing runs beside it."""
        config, table, budget = self.config, self.sequence_table, self.feedback.budget
        model = config.cost_model or TOKENS
        spent = Spent(model, config.max_batch_tokens)
        ready = self._look(plan.planned_s, model)
        line = table.waiting
        waits = bool(line) and line[0].request.service.online
        mixed = bool(ready.prefills or ready.batch_prefills or line)
        limit_s = inf if config.cost_model is None else budget.limit_s(ready.least_slack_s, mixed)
        unhurt = self._add_decodes(plan, ready, spent, limit_s)
        self._add_prefills(plan, ready, spent, limit_s, admit=unhurt)
        if ready.online or waits:
            self._fill_up(plan, ready, spent, limit_s)
        else:
            self._run_offline(plan, ready, spent)
        if config.cost_model is not None:
            plan.predicted_s = spent.seconds
            if spent.seconds <= limit_s:
                plan.allowed_s = ready.least_slack_s

    # --- online work

    def _look(self, now_s: float, model: CostModel) -> _Ready:
        """What can run, and the least residual time of online decodes that can still keep it."""
        ready = _Ready()
        iteration_s = self.feedback.budget.iteration_s
        scale = self.feedback.budget.decode_scale if self.config.cost_model else 0.0
        lone_s = scale * model.chunk_s(0, 1)
        per_token_s = scale * model.chunk_s(1, 1) - lone_s
        for sequence in self.sequence_table.running:
            computed = sequence.computed
            remaining = len(sequence.token_ids) - computed
            online = sequence.request.service.online
            ready.online += online
            if not online:
                if remaining == 1:
                    ready.batch_decodes.append(sequence)
                elif remaining:
                    ready.batch_prefills.append(sequence)
            elif remaining == 1:
                ready.decodes.append(sequence)
                ready.prefix_tokens += computed
                if sequence.due_s < inf:
                    slack_s = deadline.slack_s(sequence, now_s, iteration_s)
                    if lone_s + computed * per_token_s <= slack_s < ready.least_slack_s:
                        ready.least_slack_s = slack_s
            elif remaining:
                ready.prefills.append(sequence)
        return ready

    def _add_decodes(self, plan: Plan, ready: _Ready, spent: Spent, limit_s: float) -> bool:
        """Add online decodes; returns whether no online sequence lost its blocks for others."""
        decodes, prefix_tokens = ready.decodes, ready.prefix_tokens
        if (
            spent.decodes_s(len(decodes), prefix_tokens) > limit_s
            or len(decodes) > spent.tokens_left
        ):
            decodes = self._most_urgent(ready, spent, limit_s, plan.planned_s)
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
        for row in (ready.prefills, ready.batch_decodes, ready.batch_prefills):
            row[:] = [one for one in row if one.phase is Phase.RUNNING]
        left = sum(one.request.service.online for one in table.running)
        plan.pressed, lost = plan.pressed or left < ready.online, left < ready.online
        ready.online = left
        return not lost

    def _most_urgent(
        self, ready: _Ready, spent: Spent, limit_s: float, now_s: float
    ) -> list[Sequence]:
        """The decodes that fit, most urgent first, and those that cannot wait; oldest first."""
        soon_s = now_s + self.feedback.budget.iteration_s
        chosen: list[Sequence] = []
        prefix_tokens = 0
        for sequence in sorted(ready.decodes, key=deadline.order_s):
            if len(chosen) == spent.tokens_left:
                break
            more = prefix_tokens + sequence.computed
            fits = spent.decodes_s(len(chosen) + 1, more) <= limit_s
            if fits or not chosen or deadline.order_s(sequence) < soon_s:
                chosen.append(sequence)
                prefix_tokens = more
        chosen.sort(key=lambda one: one.age)
        return chosen

    def _add_prefills(
        self, plan: Plan, ready: _Ready, spent: Spent, limit_s: float, admit: bool
    ) -> None:
        """Add prompts of online requests, begun or waiting, by deadline."""
        config, table = self.config, self.sequence_table
        chunk = config.online_chunk_tokens
        floor = config.max_batch_tokens if chunk is None else chunk
        begun = deque(sorted(ready.prefills, key=deadline.order_s))
        preemptions = table.preemptions_total
        while spent.tokens_left > 0:
            line = table.waiting
            first = line[0] if admit and line and line[0].request.service.online else None
            if spent.tokens >= floor and not spent.tokens_within(0, limit_s, 1):
                break
            if begun and (first is None or deadline.order_s(begun[0]) <= deadline.order_s(first)):
                sequence = begun.popleft()
            elif first is not None:
                found = table.next_to_admit(config.max_running, config.overtaken_max)
                if found is None or not found.request.service.online:
                    plan.pressed, admit = True, False
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
            for row in (ready.batch_decodes, ready.batch_prefills):
                row[:] = [one for one in row if one.phase is Phase.RUNNING]

    # --- batch work

    def _fill_up(self, plan: Plan, ready: _Ready, spent: Spent, limit_s: float) -> None:
        """Add batch work beside online work, up to the fill level.

        None does while an online request waits for blocks or a place, unless nothing else runs.
        """
        config, table = self.config, self.sequence_table
        waits = bool(table.waiting) and table.waiting[0].request.service.online
        if not plan:
            self._run_offline(plan, ready, spent)
            return
        if waits or not table.batch:
            return
        if config.cost_model is None:
            target_s = inf if self.feedback.fill.level else 0.0
        else:
            target_s = self._target_s(config.cost_model, spent.seconds, limit_s)
        tokens = spent.tokens
        self._add_batch(plan, ready, spent, target_s, reserve=int(RESERVE * config.num_blocks))
        if spent.tokens > tokens:
            plan.filled = True
            plan.pressed = plan.pressed or self._is_crowded(ready.online)

    def _target_s(self, model: CostModel, spent_s: float, limit_s: float) -> float:
        """Model seconds of an iteration with batch work beside online work of `spent_s`."""
        if limit_s == inf:
            config = self.config
            limit_s = model.chunk_s(0, config.online_chunk_tokens or config.max_batch_tokens)
        return spent_s + self.feedback.fill.level * max(0.0, limit_s - spent_s)

    def has_time_for(self, suspended: Plan, now_s: float) -> bool:
        """Whether the rest of `suspended` fits in the time that batch work may take at `now_s`.

        Online decodes wait for it as they wait for batch work in their iteration. It does not make
        a prompt of an online request wait, nor one for which there is no room.
        """
        model, line, budget = (
            self.config.cost_model,
            self.sequence_table.waiting,
            self.feedback.budget,
        )
        if model is None or (line and line[0].request.service.online):
            return False
        ready = self._look(now_s, model)
        if ready.prefills:
            return False
        spent = Spent(model, self.config.max_batch_tokens)
        spent_s = spent.decodes_s(len(ready.decodes), ready.prefix_tokens)
        limit_s = budget.limit_s(ready.least_slack_s, suspended.mixed)
        scale = budget.mixed_scale if suspended.mixed else budget.decode_scale
        rest_s = left_s(suspended.predicted_s, suspended.ran_s / scale)
        return spent_s + rest_s <= self._target_s(model, spent_s, limit_s)

    def _run_offline(self, plan: Plan, ready: _Ready, spent: Spent) -> None:
        """Choose an iteration of batch work alone; there is always something in it that can run."""
        config = self.config
        if not (ready.batch_decodes or ready.batch_prefills or self.sequence_table.waiting):
            return
        target_s = inf
        if config.cost_model is not None:
            scale = self.feedback.budget.mixed_scale
            lone_s = scale * config.cost_model.chunk_s(0, 1)
            waits_s = self._waits_s(plan.planned_s)
            target_s = offline_limit_s(lone_s, config.offline_iteration_s, waits_s) / scale
        self._add_batch(plan, ready, spent, target_s, reserve=None)

    def _waits_s(self, now_s: float) -> float:
        """Twice the seconds of an iteration without online work, by what comes meanwhile.

        An arrival that cannot interrupt it waits for its end: so by the least target of a first
        token. One that can interrupts it: by the gap between arrivals, if nothing is kept then.
        """
        config, arrivals = self.config, self.feedback.arrivals
        if config.preempt is Preempt.OFF or self.sequence_table.suspended is not None:
            return arrivals.least_target_s(now_s)
        if config.preempted_work is PreemptedWork.DISCARD:
            return arrivals.quiet_s(now_s)
        return inf

    def _add_batch(
        self, plan: Plan, ready: _Ready, spent: Spent, target_s: float, reserve: int | None
    ) -> None:
        """Add batch sequences while the iteration costs no more than `target_s`, oldest first.

        `reserve`: blocks that starts leave free; None if no online work is here, so that a batch
        sequence may take the blocks of another one.
        """
        config, table = self.config, self.sequence_table
        preemptions = table.preemptions_total
        alone = reserve is None
        self._add_batch_decodes(plan, ready, spent, target_s, alone)
        for sequence in ready.batch_prefills:
            if sequence.phase is Phase.RUNNING and not self._add_chunk(
                plan, sequence, spent, target_s
            ):
                return
        if table.preemptions_total != preemptions:
            return  # a start would only lose its blocks again
        enough = FILLER_TOKENS_MIN if spent.tokens else 1
        while spent.tokens_within(0, target_s, enough) == enough or (alone and not plan):
            first = table.next_to_admit(config.max_running, config.overtaken_max)
            if first is None or first.request.service.online:
                return
            blocks = first.blocks_to_admit(config.block_size)
            if reserve is not None and table.ledger.free - blocks < reserve:
                return
            started = table.admit(first, config.max_running)
            if not self._add_chunk(plan, started, spent, target_s):
                return

    def _add_batch_decodes(
        self, plan: Plan, ready: _Ready, spent: Spent, target_s: float, alone: bool
    ) -> None:
        table, block_size = self.sequence_table, self.config.block_size
        for sequence in ready.batch_decodes:
            if sequence.phase is not Phase.RUNNING:
                continue
            over = spent.with_chunk_s(sequence.computed, 1) > target_s
            if plan and (over or not spent.tokens_left):
                return
            if len(sequence.token_ids) > sequence.blocks * block_size:
                if not alone and table.ledger.least_room <= 0:
                    continue
                table.grow(sequence)
                if sequence.phase is not Phase.RUNNING:
                    continue
            spent.add_decodes(1, sequence.computed)
            plan.decodes.append(sequence)

    def _add_chunk(self, plan: Plan, sequence: Sequence, spent: Spent, target_s: float) -> bool:
        """Add what fits of a batch prompt; False if that is too little.

        An iteration that has nothing else runs a small chunk in any case.
        """
        most = min(sequence.remaining, spent.tokens_left)
        least = min(FILLER_TOKENS_MIN, most)
        tokens = spent.tokens_within(sequence.computed, target_s, most)
        if tokens < max(1, least):
            if plan or not least:
                return False
            tokens = least
        spent.add(sequence.computed, tokens)
        plan.add(sequence, tokens)
        return True

    def _is_crowded(self, online: int) -> bool:
        """Whether online sequences hold most of the places or of the blocks."""
        table, config = self.sequence_table, self.config
        if online > CROWDED * config.max_running:
            return True
        batch_blocks = sum([one.blocks for one in table.batch.values()])
        taken = table.table.pool.taken_count - batch_blocks
        return taken > CROWDED * config.num_blocks
