"""The settings with which a scheduler's state is made, and with which its event log begins."""

from dataclasses import dataclass

from services.core.cost.model import CostModel
from services.core.line_order import Scheduling
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
    scheduling: Scheduling = Scheduling.FCFS

    def state(self) -> SchedulerState:
        """A new state with these settings."""
        return SchedulerState(
            self.queue_limit,
            self.queue_deadline_s,
            score_of(self.dispatch),
            self.overtaken_max,
            self.growth_blocks,
            ttft=self.ttft,
            scheduling=self.scheduling,
        )
