"""Harvesting of slack by batch work (ConServe), for `slo.py` and `slo_pipeline.py`.

*Batch work* is requests of the class `batch`; all others are *online*. The least *residual
time* of online decodes, the time until the first deadline, bounds an iteration; the *slack* is what
online work leaves of it. Batch work may use a share of the slack, the *harvest share*. Times are
model seconds: seconds as predicted by the cost model. Without a cost model there is no time bound,
and batch work uses the token budget that online work leaves.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from services.core.cost.model import TOKEN_COSTS
from services.core.planner import deadline
from services.core.planner.budget import Spent
from services.core.planner.config import IterationConfig
from services.core.planner.feedback import Feedback
from services.core.planner.harvest import CROWDED, batch_only_bound_s
from services.core.planner.packing import UNBOUNDED, AdaptiveSlots, Replaceable
from services.core.planner.plan import Plan
from services.core.planner.preemption import Preempt, PreemptedWork
from services.core.planner.sequence import Phase, Sequence
from services.core.planner.sequence_table import SequenceTable
from services.core.queue_order import Scheduling

BATCH_CHUNK_MIN_TOKENS = 16
"""Least tokens of a chunk of a batch prompt, except its last, since each chunk has a fixed cost."""
STARVED_EVERY = 16
"""Every so many iterations, the oldest batch prompt may exceed the harvest share."""
GROWTH_RESERVE = 0.04
"""Share of the blocks that admission of batch sequences leaves free for growing online ones."""
RESERVING = frozenset({Scheduling.SLO, Scheduling.CONSERVE})
"""Schedulings whose admission keeps `GROWTH_RESERVE` free."""


@dataclass(slots=True)
class Ready:
    """Result of a scan: running sequences that can be planned, oldest first, by kind."""

    decodes: list[Sequence] = field(default_factory=list)  # online
    prefills: list[Sequence] = field(default_factory=list)  # online
    batch_decodes: list[Sequence] = field(default_factory=list)
    batch_prefills: list[Sequence] = field(default_factory=list)
    prefix_tokens: int = 0  # cached tokens of `decodes`
    least_residual_s: float = inf  # least residual time of online decodes that can still be met
    online: int = 0  # running online sequences, including those in flight

    def drop_preempted(self) -> None:
        """Remove sequences that were preempted since the scan."""
        for row in (self.decodes, self.prefills, self.batch_decodes, self.batch_prefills):
            row[:] = [sequence for sequence in row if sequence.phase is Phase.RUNNING]


@dataclass(slots=True)
class Harvester:
    """Scans the running sequences, and chooses batch work for the slack of online work."""

    config: IterationConfig
    sequence_table: SequenceTable
    feedback: Feedback
    slots: AdaptiveSlots = field(init=False)

    def __post_init__(self) -> None:
        adaptive = self.config.adaptive_slots
        self.slots = AdaptiveSlots(self.config.max_running if adaptive else UNBOUNDED)

    @property
    def _running_max(self) -> int:
        return self.config.max_running * self.sequence_table.ledger.stages

    def scan(self, now_s: float) -> Ready:
        """Classify the running sequences, and find the least residual time that can be met."""
        ready = Ready()
        decodes, prefix_tokens, online = ready.decodes, 0, 0  # local: the loop runs per iteration
        bound: list[Sequence] = []  # decodes, ready or in flight, that may bound the iteration
        for sequence in self.sequence_table.running:
            computed = sequence.computed
            remaining = len(sequence.token_ids) - computed
            if not sequence.online:
                if remaining == 1:
                    ready.batch_decodes.append(sequence)
                elif remaining:
                    ready.batch_prefills.append(sequence)
                continue
            online += 1
            if remaining == 1:
                decodes.append(sequence)
                prefix_tokens += computed
            elif remaining:
                ready.prefills.append(sequence)
                continue
            if sequence.has_targets:
                bound.append(sequence)
        ready.online, ready.prefix_tokens = online, prefix_tokens
        if bound:
            ready.least_residual_s = self._least_residual_s(bound, now_s)
        return ready

    def _least_residual_s(self, bound: list[Sequence], now_s: float) -> float:
        """Least residual time of online decodes, ready or in flight, that can still be met."""
        # A deadline that is missed even if the decode runs alone must not bound the iteration.
        model, budget = self.config.cost_model or TOKEN_COSTS, self.feedback.budget
        scale = budget.decode_scale if self.config.cost_model else 0.0
        lone_s = scale * model.chunk_s(0, 1)
        per_token_s = scale * model.chunk_s(1, 1) - lone_s
        least_s = inf
        for sequence in bound:
            computed = sequence.computed
            if len(sequence.token_ids) > computed:
                residual_s = deadline.residual_s(sequence, now_s, budget.iteration_s)
            else:  # in flight in a pipeline: this microbatch may delay the token after next
                residual_s = deadline.residual_in_flight_s(sequence, now_s, budget.iteration_s)
            if lone_s + computed * per_token_s <= residual_s < least_s:
                least_s = residual_s
        return least_s

    def most_urgent(
        self, decodes: list[Sequence], spent: Spent, limit_s: float, now_s: float
    ) -> list[Sequence]:
        """Select online decodes by residual time within `limit_s`; the result keeps their order.

        Includes at least a decode, and all that would miss their deadline in the next iteration.
        """
        if not decodes:
            return []
        iteration_s = self.feedback.budget.iteration_s
        residuals_s = [
            deadline.residual_or_implied_s(decode, now_s, iteration_s) for decode in decodes
        ]
        order = sorted(range(len(decodes)), key=residuals_s.__getitem__)
        # Bisect for the most urgent decodes that fit: their cost grows with their number.
        prefixes = list(accumulate([decodes[place].computed for place in order]))
        fitting = bisect_right(
            range(len(order)), limit_s, key=lambda last: spent.decodes_s(last + 1, prefixes[last])
        )
        # Count the decodes that would miss their deadline in the next iteration: they run anyway.
        cannot_wait = bisect_left(order, iteration_s, key=residuals_s.__getitem__)
        slots = min(self.slots.limit, spent.tokens_left)
        count = min(spent.tokens_left, max(1, cannot_wait, min(slots, fitting)))
        taken = set(order[:count])
        prefix_tokens = prefixes[count - 1]
        # Then first-fit: a decode with a long prefix does not block those with shorter ones.
        for place in order[count:]:
            if len(taken) >= slots or spent.decodes_s(len(taken) + 1, prefix_tokens) > limit_s:
                break
            more = prefix_tokens + decodes[place].computed
            if spent.decodes_s(len(taken) + 1, more) <= limit_s:
                taken.add(place)
                prefix_tokens = more
        return [decode for place, decode in enumerate(decodes) if place in taken]

    def harvest_slack(self, plan: Plan, ready: Ready, spent: Spent, limit_s: float) -> None:
        """Add batch work to an iteration with online work, up to the harvest share."""
        if not self.sequence_table.batch:
            return
        target_s = self.target_s(spent.seconds, limit_s)
        self._add_starved(plan, ready, spent, target_s, limit_s)
        reserve = int(GROWTH_RESERVE * self.sequence_table.ledger.least_capacity)
        self._add_batch(plan, ready, spent, target_s, reserve)
        # Record contention even if no batch work fitted; otherwise the share would never adapt.
        plan.harvested = True
        plan.contended = plan.contended or self._is_crowded(ready.online)

    def _add_starved(
        self, plan: Plan, ready: Ready, spent: Spent, target_s: float, limit_s: float
    ) -> None:
        """Add the smallest chunk of the oldest batch prompt if it fits into the whole slack."""
        # A chunk's cost grows with its prefix, so the rest of a long prompt might never fit into
        # the harvest share: every STARVED_EVERY iterations it may use all of the slack.
        if plan.number % STARVED_EVERY or not self.feedback.harvest.maximum:
            return
        room, size = self.sequence_table.ledger.least_room > 0, self.config.block_size
        # A prompt that lost its tail and finds no block does not block the prompts behind it.
        can_run = (seq for seq in ready.batch_prefills if room or not seq.lacks_block(size))
        oldest = next(can_run, None)
        if oldest is None:
            return
        least = min(BATCH_CHUNK_MIN_TOKENS, oldest.remaining, spent.tokens_left)
        by_share = spent.tokens_within(oldest.computed, target_s, least)
        fits = by_share < least == spent.tokens_within(oldest.computed, limit_s, least)
        if fits and self._take_block(plan, oldest, spent, alone=False):
            spent.add(oldest.computed, least)
            plan.add(oldest, least)
            ready.batch_prefills.remove(oldest)

    def target_s(self, spent_s: float, limit_s: float) -> float:
        """Cost bound of an iteration whose online work costs `spent_s`, in model seconds."""
        config, model = self.config, self.config.cost_model
        if model is None:
            return inf if self.feedback.harvest.share else 0.0
        # Without a deadline, the cost of a full online chunk bounds the iteration.
        if limit_s == inf:
            limit_s = model.chunk_s(0, config.online_chunk_tokens or config.max_batch_tokens)
        return spent_s + self.feedback.harvest.share * max(0.0, limit_s - spent_s)

    def schedule_batch_only(self, plan: Plan, ready: Ready, spent: Spent) -> None:
        """Plan a batch-only iteration; it is never empty if any batch sequence can run."""
        if ready.batch_decodes or ready.batch_prefills or self.sequence_table.waiting:
            self._add_batch(
                plan, ready, spent, self.batch_only_limit_s(plan.planned_s), reserve=None
            )

    def batch_only_limit_s(self, now_s: float) -> float:
        """Cost bound of a batch-only iteration, in model seconds."""
        config = self.config
        if config.cost_model is None:
            return inf
        scale = self.feedback.budget.mixed_scale
        lone_s = scale * config.cost_model.chunk_s(0, 1)
        return (
            batch_only_bound_s(lone_s, config.offline_iteration_s, self._tolerated_wait_s(now_s))
            / scale
        )

    def _tolerated_wait_s(self, now_s: float) -> float:
        """Twice the limit of a batch-only iteration, in seconds.

        * If arrivals cannot interrupt the iteration, they wait for its end: the least TTFT target.
        * If an arrival discards the iteration, its work is lost: the expected time to an arrival.
        * If an arrival suspends the iteration, nothing is lost: `inf`.
        """
        config, arrivals = self.config, self.feedback.arrivals
        uninterrupted = config.preemption is Preempt.OFF or self.sequence_table.ledger.stages > 1
        # At most one iteration is suspended: while there is one, the next cannot be interrupted.
        if uninterrupted or self.sequence_table.suspended is not None:
            return arrivals.least_target_s(now_s)
        if config.preempted_work is PreemptedWork.DISCARD:
            return arrivals.expected_gap_s(now_s)
        return inf

    def _add_batch(
        self, plan: Plan, ready: Ready, spent: Spent, target_s: float, reserve: int | None
    ) -> None:
        """Add batch sequences, oldest first, while the iteration costs at most `target_s`.

        `reserve`: blocks that admissions leave free; None without online work, where batch
        sequences may preempt each other and the iteration is never empty.
        """
        config, table = self.config, self.sequence_table
        preemptions = table.preemptions_total
        alone = reserve is None
        self._add_batch_decodes(plan, ready, spent, target_s, alone)
        # A prompt whose next chunk does not fit does not block the prompts behind it.
        for sequence in ready.batch_prefills:
            if sequence.phase is Phase.RUNNING:
                self._add_chunk(plan, sequence, spent, target_s, alone)
        if table.preemptions_total != preemptions:
            return  # blocks are scarce: an admitted sequence would be preempted soon
        enough = 1 if alone and not spent.tokens else BATCH_CHUNK_MIN_TOKENS
        while spent.tokens_within(0, target_s, enough) == enough or (alone and not plan):
            if not self._free_slots(plan, spent, alone):
                return
            first = table.next_to_admit(self._running_max, config.overtaken_max)
            if first is None or first.online:
                return
            # Reserve blocks so that a batch start cannot starve the growth of online sequences.
            blocks = first.blocks_to_admit(config.block_size)
            if reserve is not None and table.ledger.free - blocks < reserve:
                return
            started = table.admit(first, self._running_max)
            if not self._add_chunk(plan, started, spent, target_s, alone):
                return

    def _add_batch_decodes(
        self, plan: Plan, ready: Ready, spent: Spent, target_s: float, alone: bool
    ) -> None:
        decodes = ready.batch_decodes
        prefix_tokens = sum([decode.computed for decode in decodes])
        # Fast path: if all fit together, skip the check of each decode.
        all_fit = spent.with_decodes_s(len(decodes), prefix_tokens) <= target_s
        all_fit = all_fit and len(decodes) <= self._free_slots(plan, spent, alone)
        replaceable = None if all_fit or alone else self._replaceable(plan, target_s)
        for sequence in decodes:
            if sequence.phase is not Phase.RUNNING:
                continue
            if not all_fit and (plan or not alone):
                fits = self._decode_fits(plan, sequence, spent, target_s, alone)
                if not fits and replaceable is not None:
                    fits = self._replace_online(plan, sequence, spent, target_s, replaceable)
                if not fits:
                    return
            if not self._take_block(plan, sequence, spent, alone):
                continue
            spent.add_decodes(1, sequence.computed)
            plan.decodes.append(sequence)

    def _free_slots(self, plan: Plan, spent: Spent, alone: bool) -> int:
        """Number of sequences that may still join; without online work only tokens limit it."""
        return spent.tokens_left if alone else min(spent.tokens_left, self.slots.left(plan))

    def _decode_fits(
        self, plan: Plan, decode: Sequence, spent: Spent, target_s: float, alone: bool
    ) -> bool:
        if not self._free_slots(plan, spent, alone):
            return False
        return spent.with_chunk_s(decode.computed, 1) <= target_s

    def _replaceable(self, plan: Plan, target_s: float) -> Replaceable | None:
        budget = self.feedback.budget
        if not self.config.packing or self.config.cost_model is None:
            return None
        return Replaceable.of(plan, budget.mixed_scale * target_s, budget.iteration_s)

    def _replace_online(
        self, plan: Plan, decode: Sequence, spent: Spent, target_s: float, replaceable: Replaceable
    ) -> bool:
        """Remove an online decode so that a batch decode fits (BROS Algorithm 1); False if none."""
        replaced = replaceable.take_next(spent)
        if replaced is None:
            return False
        if self._decode_fits(plan, decode, spent, target_s, alone=False):
            return True
        replaceable.restore(replaced, spent)
        return False

    def _add_chunk(
        self, plan: Plan, sequence: Sequence, spent: Spent, target_s: float, alone: bool
    ) -> bool:
        """Add the next chunk of a batch prompt; False if too few tokens fit."""
        most = min(sequence.remaining, spent.tokens_left)
        if not self._free_slots(plan, spent, alone):
            return False
        least = min(BATCH_CHUNK_MIN_TOKENS, most)
        tokens = spent.tokens_within(sequence.computed, target_s, most)
        if tokens < max(1, least):
            if plan or not least or not alone:
                return False
            # An otherwise empty batch-only iteration must make progress.
            tokens = least
        # It takes blocks of others only if nothing else can run.
        if not self._take_block(plan, sequence, spent, alone and not plan):
            return False
        spent.add(sequence.computed, tokens)
        plan.add(sequence, tokens)
        return True

    def _take_block(self, plan: Plan, sequence: Sequence, spent: Spent, alone: bool) -> bool:
        """Allocate the block that a batch decode needs, or a prompt that lost its shared tail.

        False without a block; only if `alone`, others are preempted for it.
        """
        table = self.sequence_table
        if not sequence.lacks_block(self.config.block_size):
            return True
        if not alone and table.ledger.least_room <= 0:
            return False
        if table.grow(sequence):
            for prefix, tokens in plan.drop_preempted():
                spent.remove(prefix, tokens)
        return sequence.phase is Phase.RUNNING

    def _is_crowded(self, online: int) -> bool:
        """Whether online sequences hold most of the slots or of the blocks."""
        table = self.sequence_table
        if online > CROWDED * self._running_max:
            return True
        batch_blocks = sum([sequence.blocks for sequence in table.batch.values()])
        taken = table.table.pool.taken_count - batch_blocks
        return taken > CROWDED * table.ledger.least_capacity
