"""What planners with deadlines learn from measured iterations and arrivals.

The state outlives changes of the worker's group. It reads no clock: the duration of an iteration is
the difference between the times passed to `plan` and to `IterationFinished`, so a replay of the
event log learns the same values.
"""

from collections import Counter
from dataclasses import dataclass, field
from math import inf

from services.core.planner import deadline
from services.core.planner.budget import Budget
from services.core.planner.harvest import HarvestShare, OnlineArrivals
from services.core.planner.plan import Plan
from services.core.planner.sequence import Phase, Sequence
from services.core.queue_order import Scheduling
from services.core.report import DeadlineUse


@dataclass(slots=True)
class Feedback:
    """Corrections of the cost model, the harvest share and statistics of online arrivals.

    The harvest share is the share of the time before online deadlines that batch work may use.
    With `corrects` False (`conserve` and `bros`) the cost model is not corrected, the
    harvest share is constant, and `SloPlanner` runs all online decodes in each iteration.
    """

    harvest: HarvestShare
    corrects: bool = True
    budget: Budget = field(init=False)  # corrections for the current number of stages
    arrivals: OnlineArrivals = field(default_factory=OnlineArrivals)
    _budget_s: float = 0.0  # see `DeadlineUse`
    _budget_used_s: float = 0.0
    _missed_ttft: Counter[str] = field(default_factory=Counter)
    _missed_tpot: Counter[str] = field(default_factory=Counter)
    # By number of stages: pipelines deviate from the cost model differently than single workers.
    _budgets: dict[int, Budget] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.set_stages(1)

    def set_stages(self, stages: int) -> None:
        """Switch to the corrections for groups of `stages` stages."""
        self.budget = self._budgets.setdefault(
            stages, Budget() if self.corrects else Budget(margin=1.0)
        )

    def reset_scales(self) -> None:
        """Forget the ratios of measured to predicted times: they were those of another model."""
        for budget in self._budgets.values():
            budget.decode_scale = budget.mixed_scale = 1.0

    @property
    def deadline_use(self) -> DeadlineUse:
        """How the time before deadlines was used so far, for metrics."""
        return DeadlineUse(
            self.harvest.share,
            self._budget_s,
            self._budget_used_s,
            dict(self._missed_ttft),
            dict(self._missed_tpot),
        )

    def note_arrival(self, sequence: Sequence, now_s: float) -> None:
        """Note the arrival of a request and set its first deadline."""
        deadline.begin(sequence, now_s - sequence.request.waited_s)
        service = sequence.request.service
        if service.online:
            self.arrivals.note(now_s, service.ttft_s)

    def note_adoption(self, sequence: Sequence) -> None:
        """Set the first deadline of a sequence adopted from another leader."""
        deadline.begin(sequence, sequence.arrival_s - sequence.request.waited_s)

    def note_result(self, plan: Plan, now_s: float) -> None:
        """Learn from a finished microbatch, and advance deadlines; call before tokens are added."""
        sampled = plan.decodes
        if plan.prefills:
            sampled = sampled + [chunk.sequence for chunk in plan.prefills if chunk.samples]
        missed = False
        for sequence in sampled:
            if not sequence.has_targets:
                sequence.token_s = now_s
            elif sequence.phase is not Phase.ENDED and deadline.note_token(sequence, now_s):
                missed = True
                counts = self._missed_tpot if sequence.output_count else self._missed_ttft
                counts[sequence.request.service.service_class] += 1
        measured_s = now_s - plan.planned_s
        if plan.allowed_s < inf:
            self._budget_s += plan.allowed_s
            self._budget_used_s += measured_s
        if not self.corrects:
            self.budget.note_time(measured_s)
            return
        # The cost of the remaining layers of a resumed iteration is unknown: do not learn from it.
        if plan.resumes is None:
            self.budget.observe(plan.predicted_s, measured_s, plan.allowed_s, plan.mixed)
        if plan.harvested:
            self.harvest.observe(missed or plan.contended)


def feedback_of(scheduling: Scheduling, harvest: float) -> Feedback | None:
    """Create the feedback of a policy; None for a policy without deadlines."""
    match scheduling:
        case Scheduling.SLO:
            return Feedback(HarvestShare(harvest))
        case Scheduling.CONSERVE | Scheduling.BROS:
            return Feedback(HarvestShare(1.0), corrects=False)
        case _:
            return None
