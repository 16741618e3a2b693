"""Plans the microbatches of a pipeline by deadlines, and harvests the slack for batch work.

Between two tokens of a sequence, S microbatches pass each of the S stages, which takes about as
long as a microbatch takes over all stages. So the least residual time of an online decode (the time
until its deadline) bounds each microbatch. Online decodes are distributed evenly, and online
prompts are partitioned together into a *round* of microbatches. If not all decodes fit, the most
urgent run.

Batch work joins each microbatch at its launch, up to the harvest share (the share of the slack
before online deadlines that it may use), and evens out the costs of online work. It is never part
of a round, so an arriving online request finds the next microbatch free of batch work. Arrivals
cannot interrupt a pipeline, so the least TTFT target bounds batch-only microbatches.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf

from services.core.cost.model import TOKEN_COSTS
from services.core.planner import deadline
from services.core.planner.budget import Spent
from services.core.planner.feedback import Feedback
from services.core.planner.harvester import Harvester, Ready
from services.core.planner.lookahead import marginal
from services.core.planner.pipeline import PipelinePlanner, RoundLimits
from services.core.planner.plan import Plan


@dataclass(slots=True)
class SloPipelinePlanner(PipelinePlanner):
    """Plans the microbatches of a pipeline by deadlines; `PipelinePlanner` ignores deadlines."""

    feedback: Feedback = field(kw_only=True)
    harvester: Harvester = field(init=False)

    def __post_init__(self) -> None:
        self.harvester = Harvester(self.config, self.sequence_table, self.feedback)

    def schedule(self, plan: Plan, in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs beside `in_flight`, and allocate its blocks."""
        config, queue = self.config, self.sequence_table.waiting
        spent = Spent(config.cost_model or TOKEN_COSTS, config.max_batch_tokens)
        ready = self.harvester.scan(plan.planned_s)
        mixed = bool(ready.prefills or self.formed or (queue and queue[0].online))
        ahead_s = max((other.cost_s for other in in_flight), default=0.0)
        self._add_online(plan, ready, spent, self._limit_s(ready, mixed), in_flight)
        limit_s = self._limit_s(ready, mixed or bool(ready.batch_prefills or queue))
        self._add_batch_work(plan, ready, spent, self._level_s(limit_s, ahead_s), in_flight)
        self._note_costs(plan)
        if config.cost_model is not None:
            plan.cost_s = spent.seconds
            # At later stages it waits for the costliest microbatch ahead, so it takes longer.
            behind_s = (ahead_s * (self.stages - 1) + plan.cost_s) / self.stages
            plan.predicted_s = max(plan.cost_s, behind_s)
            if plan.predicted_s <= self._limit_s(ready, plan.mixed):
                plan.allowed_s = ready.least_residual_s

    def _limit_s(self, ready: Ready, mixed: bool) -> float:
        """Cost bound of a microbatch in seconds of the cost model; `mixed` if it has prefills."""
        if self.config.cost_model is None:
            return inf
        return self.feedback.budget.limit_s(ready.least_residual_s, mixed)

    def _add_online(
        self, plan: Plan, ready: Ready, spent: Spent, limit_s: float, in_flight: deque[Plan]
    ) -> None:
        table, online = self.sequence_table, ready.online
        chosen = self._share_decodes(ready.decodes, [other.decode_cost for other in in_flight])
        late = spent.decodes_s(len(chosen), sum([decode.computed for decode in chosen])) > limit_s
        self.harvester.slots.observe(late)
        if (late and self.feedback.corrects) or len(chosen) > self.harvester.slots.limit:
            chosen = self.harvester.most_urgent(chosen, spent, limit_s, plan.planned_s)
        if self._add_decodes(plan, chosen):
            ready.drop_preempted()
            ready.online = sum(sequence.online for sequence in table.running)
        lost = ready.online < online
        plan.contended = lost
        spent.add_decodes(len(plan.decodes), sum([decode.computed for decode in plan.decodes]))
        # Form a round once all microbatches of the previous round are launched.
        if not self.formed:
            begun = sorted(ready.prefills, key=deadline.order_s)
            decodes = [seq for seq in table.running if seq.online and seq.remaining <= 1]
            self._form(plan, begun, decodes, not lost, self._round_limits(limit_s))
            ready.drop_preempted()  # admission may have preempted batch sequences
        self._add_prefills(plan, self.config.max_batch_tokens - len(plan.decodes))
        for prefill in plan.prefills:
            spent.add(prefill.start, prefill.tokens)

    def _round_limits(self, limit_s: float) -> RoundLimits:
        """Limits of the microbatches of a round; `online_chunk_tokens` may exceed `limit_s`."""
        model, chunk = self.config.cost_model, self.config.online_chunk_tokens
        if model is None or chunk is None:
            return RoundLimits(online_alone=True)
        return RoundLimits(limit_s, marginal(model, 0, chunk), online_alone=True)

    def _level_s(self, limit_s: float, ahead_s: float) -> float:
        """Cost bound of a microbatch with batch work behind a microbatch that costs `ahead_s`."""
        # At later stages it waits for the microbatch ahead if that costs more. If it costs more
        # itself, the sequences of the microbatch ahead wait at the first stage when they run next.
        # Both bounds make the costs of consecutive microbatches converge.
        stages = self.stages
        passes_s = stages * limit_s - (stages - 1) * ahead_s
        return min(limit_s, passes_s, (stages * limit_s + ahead_s) / (stages + 1))

    def _add_batch_work(
        self, plan: Plan, ready: Ready, spent: Spent, limit_s: float, in_flight: deque[Plan]
    ) -> None:
        table, config = self.sequence_table, self.config
        if not table.batch:
            return
        dealt = self._share_decodes(
            ready.batch_decodes, [other.batch_decode_cost for other in in_flight]
        )
        ready.batch_decodes = sorted(dealt, key=lambda decode: decode.age)
        queue = table.waiting
        running_max = config.max_running * self.stages
        # No batch work joins online work while an online request lacks blocks or a slot.
        online_waits = bool(queue) and queue[0].online
        if online_waits and table.next_to_admit(running_max, config.overtaken_max) is None:
            plan.contended = True
            if ready.online:
                return
        if plan or ready.online or (online_waits and not plan.contended):
            self.harvester.harvest_slack(plan, ready, spent, limit_s)
        else:
            self.harvester.schedule_batch_only(plan, ready, spent)
        for sequence in plan.sequences():
            sequence.last_microbatch = plan.number

    def _note_costs(self, plan: Plan) -> None:
        """Set the cost of the next decodes of the sequences of `plan`, by class."""
        decodes = plan.decodes + [chunk.sequence for chunk in plan.prefills if chunk.samples]
        for sequence in decodes:
            cost = self._decode_cost(sequence)
            if sequence.online:
                plan.decode_cost += cost
            else:
                plan.batch_decode_cost += cost
