"""The planner of a pipeline that keeps deadlines, and fills the time that they leave.

The time between two tokens of a sequence is that of as many microbatches as there are stages at one
stage: about what one of them costs at all stages together. So the least residual time of an online
decode bounds each microbatch. Decodes of online requests are dealt evenly, their prompts form
rounds; decodes that do not fit wait, most urgent first.

Batch work joins each microbatch that is launched, up to the fill level, so it makes those alike
that online work leaves unlike. No round holds it: an online request that arrives finds the next
microbatch free of it. Nobody interrupts a pipeline, so that microbatches of batch work alone are
bounded by the least target of a first token.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf

from services.core.cost.model import TOKENS
from services.core.planner import deadline
from services.core.planner.budget import Spent
from services.core.planner.feedback import Feedback
from services.core.planner.harvester import Harvester, Ready
from services.core.planner.lookahead import marginal
from services.core.planner.pipeline import PipelinePlanner, RoundLimits
from services.core.planner.plan import Plan


@dataclass(slots=True)
class SloPipelinePlanner(PipelinePlanner):
    """Fills one microbatch after the other; without batch work and targets as `PipelinePlanner`."""

    feedback: Feedback = field(kw_only=True)
    harvester: Harvester = field(init=False)

    def __post_init__(self) -> None:
        self.harvester = Harvester(self.config, self.sequence_table, self.feedback)

    def schedule(self, plan: Plan, in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs beside `in_flight`, and take the blocks for it."""
        config, line = self.config, self.sequence_table.waiting
        spent = Spent(config.cost_model or TOKENS, config.max_batch_tokens)
        ready = self.harvester.scan(plan.planned_s)
        mixed = bool(ready.prefills or self.formed or (line and line[0].online))
        ahead_s = max((other.cost_s for other in in_flight), default=0.0)
        self._add_online(plan, ready, spent, self._limit_s(ready, mixed), in_flight)
        limit_s = self._limit_s(ready, mixed or bool(ready.batch_prefills or line))
        self._add_batch_work(plan, ready, spent, self._level_s(limit_s, ahead_s), in_flight)
        self._note_costs(plan)
        if config.cost_model is not None:
            plan.cost_s = spent.seconds
            behind_s = (ahead_s * (self.stages - 1) + plan.cost_s) / self.stages
            plan.predicted_s = max(plan.cost_s, behind_s)
            if plan.predicted_s <= self._limit_s(ready, plan.mixed):
                plan.allowed_s = ready.least_slack_s

    def _limit_s(self, ready: Ready, mixed: bool) -> float:
        """Model seconds that a microbatch may cost, by whether it is mixed (`Budget`)."""
        if self.config.cost_model is None:
            return inf
        return self.feedback.budget.limit_s(ready.least_slack_s, mixed)

    def _add_online(
        self, plan: Plan, ready: Ready, spent: Spent, limit_s: float, in_flight: deque[Plan]
    ) -> None:
        table, online = self.sequence_table, ready.online
        chosen = self._share_decodes(ready.decodes, [other.decode_cost for other in in_flight])
        late = spent.decodes_s(len(chosen), sum([one.computed for one in chosen])) > limit_s
        self.harvester.slots.observe(late)
        if (late and self.feedback.corrects) or len(chosen) > self.harvester.slots.now:
            chosen = self.harvester.most_urgent(chosen, spent, limit_s, plan.planned_s)
        if self._add_decodes(plan, chosen):
            ready.drop_preempted()
            ready.online = sum(one.online for one in table.running)
        lost = ready.online < online
        plan.contended = lost
        spent.add_decodes(len(plan.decodes), sum([one.computed for one in plan.decodes]))
        if not self.formed:
            begun = sorted(ready.prefills, key=deadline.order_s)
            decodes = [one for one in table.running if one.online and one.remaining <= 1]
            self._form(plan, begun, decodes, not lost, self._round_limits(limit_s))
            ready.drop_preempted()  # batch sequences, for those that start
        self._add_prefills(plan, self.config.max_batch_tokens - len(plan.decodes))
        for one in plan.prefills:
            spent.add(one.start, one.tokens)

    def _round_limits(self, limit_s: float) -> RoundLimits:
        """What online prompts may cost a microbatch: what they are promised in any case."""
        model, chunk = self.config.cost_model, self.config.online_chunk_tokens
        if model is None or chunk is None:
            return RoundLimits(online_alone=True)
        return RoundLimits(limit_s, marginal(model, 0, chunk), online_alone=True)

    def _level_s(self, limit_s: float, ahead_s: float) -> float:
        """What a microbatch with batch work may cost behind one that costs `ahead_s`.

        It waits for that at the later stages. If it costs more than that, the sequences of that one
        wait for it at the first stage when they run next. So microbatches come to cost the same.
        """
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
        ready.batch_decodes = sorted(dealt, key=lambda one: one.age)
        line = table.waiting
        running_max = config.max_running * self.stages
        waits = bool(line) and line[0].online
        if waits and table.next_to_admit(running_max, config.overtaken_max) is None:
            plan.contended = True
            if ready.online:
                return
        if plan or ready.online or (waits and not plan.contended):
            self.harvester.harvest_slack(plan, ready, spent, limit_s)
        else:
            self.harvester.schedule_batch_only(plan, ready, spent)
        for sequence in plan.sequences():
            sequence.last_microbatch = plan.number

    def _note_costs(self, plan: Plan) -> None:
        """What its sequences that decode after it cost, by class."""
        decodes = plan.decodes + [one.sequence for one in plan.prefills if one.samples]
        for sequence in decodes:
            cost = self._decode_cost(sequence)
            if sequence.online:
                plan.decode_cost += cost
            else:
                plan.batch_decode_cost += cost
