"""Settings and bounds of a planner."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from services.core.cost.model import CostModel
from services.core.line_order import Scheduling, scheduling_setting
from services.core.overtaking import overtaken_setting
from services.core.planner.preemption import Preempt, PreemptedWork
from services.core.planner.victims import VictimRule
from services.core.setting import choice, computed, number, option

GPU_LIMITS: Mapping[str, Any] = {"max_batch_tokens": 2048, "max_running": 256}
"""Defaults on a GPU, which the iterations of the defaults for processors hardly occupy."""


class BatchFormation(StrEnum):
    """How a pipeline's microbatches are formed; a group of one has nothing to form."""

    LOOKAHEAD = "lookahead"
    TOKEN_COUNT = "token_count"


@dataclass(frozen=True, slots=True)
class IterationConfig:
    """Settings of a worker's planner, and the bounds that the worker measures.

    `num_blocks` is what the worker holds as a group of one. No request that needs more is taken,
    since a larger group splits again. In a pipeline each microbatch has at most `max_batch_tokens`;
    a round is not cut into parts of less than half of `min_microbatch_tokens`, on average, and cost
    is counted by `cost_model`; without one each token costs the same.

    More about each: `overtaking`, `prefix_cache`, `precedence` (`scheduling`), `slo` (`fill_max` to
    `online_chunk_tokens`), `packing`, `victims`, `preemption`, `shelf` and `lost_share`.
    """

    block_size: int = number(
        16, "Tokens in a KV block.", minimum=1, maximum=1024, elsewhere="with vLLM 32"
    )
    num_blocks: int = computed(0)
    # The next tokens come once an iteration has ended, so a slow device gets small ones. With vLLM
    # an abort waits for that, too.
    max_batch_tokens: int = number(
        256,
        "Tokens of one iteration; more raise throughput and the time between tokens.",
        minimum=1,
        maximum=2**20,
        elsewhere=f"on GPUs and with vLLM {GPU_LIMITS['max_batch_tokens']}",
    )
    max_running: int = number(
        128,
        "Requests that run at once.",
        minimum=1,
        maximum=2**16,
        elsewhere=f"on GPUs {GPU_LIMITS['max_running']}",
    )
    max_waiting: int = number(
        4096, "Requests that may wait in the worker.", minimum=1, maximum=2**20
    )
    batch_formation: BatchFormation = choice(
        BatchFormation.LOOKAHEAD,
        BatchFormation,
        "How a pipeline's microbatches are formed: by equal cost, looking ahead, or by token"
        " count.",
        expert=True,
    )
    min_microbatch_tokens: int = number(
        128,
        "Tokens below which a microbatch is not divided.",
        minimum=1,
        maximum=2**20,
        expert=True,
    )
    cost_model: CostModel | None = computed(None)
    overtaken_max: int = overtaken_setting()
    prefix_caching: bool = option(
        True,
        "Automatic prefix caching: requests with a common prefix share its KV blocks, which stay"
        " cached until their memory is needed.",
    )
    scheduling: Scheduling = scheduling_setting()
    fill_max: float = number(
        0.4,
        "With scheduling slo: the largest part of the time between what online requests cost and"
        " their deadlines that batch work gets; 0 leaves it only times without online requests.",
        minimum=0,
        maximum=1,
        key="harvest",
    )
    offline_iteration_s: float = number(
        2.0,
        "With scheduling slo: seconds that an iteration of batch work alone may take; less where"
        " first tokens are promised sooner and nothing interrupts it (preempt).",
        minimum=0.001,
        maximum=3600,
        expert=True,
    )
    online_chunk_tokens: int | None = number(
        None,
        "With scheduling slo: tokens of an iteration that online requests get for their prompts"
        " whatever is due.",
        minimum=1,
        maximum=2**20,
        default_text="max_batch_tokens",
        expert=True,
    )
    packing: bool = option(
        False,
        "With scheduling slo: whether a batch request that finds no time beside online ones takes"
        " the turn of one whose deadline holds without it.",
        expert=True,
    )
    adaptive_slots: bool = option(
        False,
        "With scheduling slo: whether the sequences of an iteration with both kinds are bounded,"
        " by half of max_running after an iteration that a deadline has bound, and by twice as many"
        " after each other one.",
        expert=True,
    )
    victims: VictimRule = choice(
        VictimRule.NEWEST,
        VictimRule,
        "With scheduling slo: which online request loses its KV when all of batch requests is"
        " taken: the newest one, or the one whose next token is due last.",
        expert=True,
    )
    preempt: Preempt = choice(
        Preempt.OFF,
        Preempt,
        "When an online request interrupts an iteration of batch work between two layers, in a"
        " group of one: never, if its deadline would be missed, or always.",
    )
    preempted_work: PreemptedWork = choice(
        PreemptedWork.RESUME,
        PreemptedWork,
        "What becomes of an interrupted iteration: it goes on later at the layer where it was, or"
        " runs again.",
        expert=True,
    )
    shelf_max_s: float = number(
        60.0,
        "Seconds for which batch requests rest at a worker that does not lead its merged group,"
        " before the leader gets them; 0: it gets them at once. With `scheduling: fcfs` they move"
        " as all others.",
        minimum=0,
        maximum=86400,
        expert=True,
    )
    spread_after_loss: bool = option(
        True,
        "Whether the leader of a merged group that has lost a member gives the younger part of its"
        " requests back, so that its former members compute them again, too. Their gateways go on"
        " with them after the tokens that have come, unless they have `resume_streams: false`.",
        expert=True,
    )

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.max_batch_tokens:
            raise ValueError(
                f"'max_running' is {self.max_running}, but must be 1 to 'max_batch_tokens'"
                f" ({self.max_batch_tokens}): every running request decodes one token an iteration"
            )
