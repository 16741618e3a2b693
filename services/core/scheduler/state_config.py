"""The settings with which a scheduler's state is made, and with which its event log begins."""

from dataclasses import dataclass

from services.core.cost.model import CostModel
from services.core.scheduler.class_rules import NO_CLASSES, ClassRules
from services.core.scheduler.dispatch import score_of
from services.core.scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True)
class StateConfig:
    """As in SchedulerState; `dispatch` is one of `DISPATCHES`.

    `ttft` are the costs by which the dispatch prefix compares groups, None with any other.
    """

    queue_limit: int
    queue_deadline_s: float
    dispatch: str
    overtaken_max: int = 0
    growth_blocks: float = 0
    ttft: CostModel | None = None
    rules: ClassRules = NO_CLASSES
    spread_s: float = 0.0

    def state(self) -> SchedulerState:
        """A new state with these settings."""
        return SchedulerState(
            self.queue_limit,
            self.queue_deadline_s,
            score_of(self.dispatch),
            self.overtaken_max,
            self.growth_blocks,
            ttft=self.ttft,
            rules=self.rules,
            spread_s=self.spread_s,
        )
