"""What the `slo` planner learns from the planner's events; it outlives configurations.

It reads no clock: an iteration takes from the time given to `plan` to that of its result, so a
replay of the log learns the same.
"""

from dataclasses import dataclass, field

from services.core.line_order import Scheduling
from services.core.planner import deadline
from services.core.planner.budget import Budget
from services.core.planner.harvest import HarvestShare, OnlineArrivals
from services.core.planner.plan import Plan
from services.core.planner.sequence import Phase, Sequence


@dataclass(slots=True)
class Feedback:
    """Corrections of the cost model, the fill level and what is known of arrivals.

    Unless it `corrects`, the model is believed and the fill level stays, and all decodes of online
    requests are in each iteration: so it is with ConServe as printed, the former two with BROS.
    """

    harvest: HarvestShare
    corrects: bool = True
    budget: Budget = field(init=False)
    arrivals: OnlineArrivals = field(default_factory=OnlineArrivals)
    _budgets: dict[int, Budget] = field(default_factory=dict)  # by number of stages

    def __post_init__(self) -> None:
        self.configured(1)

    def configured(self, stages: int) -> None:
        """The group has so many stages from now on; its iterations are corrected by its own."""
        self.budget = self._budgets.setdefault(
            stages, Budget() if self.corrects else Budget(margin=1.0)
        )

    def arrived(self, sequence: Sequence, now_s: float) -> None:
        """A request has come."""
        deadline.begin(sequence, now_s - sequence.request.waited_s)
        service = sequence.request.service
        if service.online:
            self.arrivals.note(now_s, service.ttft_s)

    def adopted(self, sequence: Sequence) -> None:
        """A sequence has come from another leader, with its age in the time of this worker."""
        deadline.begin(sequence, sequence.arrival_s - sequence.request.waited_s)

    def finished(self, plan: Plan, now_s: float) -> None:
        """A microbatch is over, whose tokens come next."""
        sampled = plan.decodes + [one.sequence for one in plan.prefills if one.samples]
        missed = False
        for sequence in sampled:
            if sequence.online and sequence.phase is not Phase.ENDED:
                missed = deadline.note_token(sequence, now_s) or missed
        measured_s = now_s - plan.planned_s
        if not self.corrects:
            self.budget.note_time(measured_s)
            return
        if plan.resumes is None:  # else it is not known how much of it was left
            self.budget.observe(plan.predicted_s, measured_s, plan.allowed_s, plan.mixed)
        if plan.harvested:
            self.harvest.observe(missed or plan.contended)


def feedback_of(scheduling: Scheduling, harvest: float) -> Feedback | None:
    """What a planner that keeps deadlines learns; None for one that keeps none."""
    match scheduling:
        case Scheduling.SLO:
            return Feedback(HarvestShare(harvest))
        case Scheduling.CONSERVE | Scheduling.BROS:
            return Feedback(HarvestShare(1.0), corrects=False)
        case _:
            return None
