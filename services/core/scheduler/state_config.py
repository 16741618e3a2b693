"""Settings of the scheduler's state machine; also the first entry of its event log."""

from dataclasses import dataclass

from services.core.cost.model import CostModel
from services.core.overtaking import overtaken_setting
from services.core.scheduler.class_rules import ClassRules
from services.core.scheduler.dispatch import DISPATCHES, PREFIX, score_of
from services.core.scheduler.group_load import GROWTH_BLOCKS
from services.core.scheduler.state import SPREAD_S, SchedulerState
from services.core.setting import choice, computed, nested, number


@dataclass(frozen=True, slots=True)
class StateConfig:
    """Settings from which `state` creates a `SchedulerState`."""

    queue_limit: int = number(
        1024,
        "Maximum number of queued requests for each model; more get 503.",
        minimum=1,
        maximum=1_000_000,
    )
    queue_deadline_s: float = number(
        120.0,
        "Maximum seconds in the queue, then 504; counted again if the request's worker fails.",
        minimum=0.1,
        maximum=86_400,
    )
    dispatch: str = choice(
        PREFIX,
        DISPATCHES,
        "How a group is chosen for a request. prefix (recommended): the lowest predicted TTFT, from"
        " the group's prefill backlog, its decoding requests and its probable prefix cache hits;"
        " kv_share breaks ties. kv_share: the smallest share of the KV cache in use, awaited or"
        " reserved; unless scheduling is fcfs or prefill_first, KV awaited by online requests"
        " counts first. least_loaded: the fewest sequences.",
    )
    overtaken_max: int = overtaken_setting()
    growth_blocks: float = number(
        GROWTH_BLOCKS,
        "KV blocks that a group keeps free for the growth of each running request when another"
        " request is to start.",
        minimum=0,
        maximum=1024,
        expert=True,
    )
    lateness: float = number(
        1.0,
        "Requests that would get their first token later than this factor times their target are"
        " refused at once with 503, by a prediction; 0: none are.",
        minimum=0,
        maximum=100,
    )
    standard_wait_s: float = number(
        10.0,
        "Longest predicted wait in seconds of standard requests without a target, then 503, unless"
        " lateness is 0; 0: no limit but queue_deadline.",
        minimum=0,
        maximum=86_400,
    )
    hand_over_min_tokens: int | None = number(
        None,
        "While workers have roles (the memory manager's `roles`): least prompt tokens to compute"
        " for which a request starts at a prefill worker and is handed over to a decode worker."
        " Needs dispatch prefix.",
        minimum=1,
        maximum=10_000_000,
        default_text="an eighth of the tokens of an iteration, max_batch_tokens",
    )
    # Cost model of the dispatch `prefix`; None with any other.
    ttft: CostModel | None = computed(None)
    rules: ClassRules = nested(ClassRules())
    spread_s: float = computed(SPREAD_S)

    def state(self) -> SchedulerState:
        """Create a state machine with these settings."""
        return SchedulerState(
            self.queue_limit,
            self.queue_deadline_s,
            score_of(self.dispatch),
            self.overtaken_max,
            self.growth_blocks,
            ttft=self.ttft,
            rules=self.rules,
            spread_s=self.spread_s,
            lateness=self.lateness,
            standard_wait_s=self.standard_wait_s,
            hand_over_min_tokens=self.hand_over_min_tokens,
        )
