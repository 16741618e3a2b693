"""The settings with which a scheduler's state is made, and with which its event log begins."""

from dataclasses import dataclass

from services.core.cost.model import CostModel
from services.core.overtaking import overtaken_setting
from services.core.scheduler.class_rules import NO_CLASSES, ClassRules
from services.core.scheduler.dispatch import DISPATCHES, PREFIX, score_of
from services.core.scheduler.group_load import GROWTH_BLOCKS
from services.core.scheduler.state import SPREAD_S, SchedulerState
from services.core.setting import choice, computed, nested, number


@dataclass(frozen=True, slots=True)
class StateConfig:
    """As in SchedulerState.

    `ttft` are the costs by which the dispatch prefix compares groups, None with any other.
    """

    queue_limit: int = number(
        1024, "Requests that may wait; more get 503.", minimum=1, maximum=1_000_000
    )
    queue_deadline_s: float = number(
        120.0,
        "Seconds that a request may wait, counted anew when a worker fails under it; then 504.",
        minimum=0.1,
        maximum=86_400,
    )
    dispatch: str = choice(
        PREFIX,
        DISPATCHES,
        "How a group is chosen; keep prefix unless KV is all that counts. prefix: the one with the"
        " lowest predicted TTFT, by the prompts that wait there, the requests that decode there and"
        " what its prefix cache is likely to have; kv_share breaks ties. kv_share: the one with the"
        " smallest share of its KV cache in use, waited for or reserved; with a scheduling"
        " other than fcfs and prefill_first, what online requests wait for counts first."
        " least_loaded: the one with the fewest sequences.",
    )
    overtaken_max: int = overtaken_setting()
    growth_blocks: float = number(
        GROWTH_BLOCKS,
        "KV blocks that a group keeps for each request that runs there, so that it can grow, when"
        " another one is to start.",
        minimum=0,
        maximum=1024,
        expert=True,
    )
    ttft: CostModel | None = computed(None)
    rules: ClassRules = nested(NO_CLASSES)
    spread_s: float = computed(SPREAD_S)

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
