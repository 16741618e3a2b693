"""Bounds of what a planner decides."""

from dataclasses import dataclass
from enum import StrEnum

from services.core.cost.model import CostModel
from services.core.line_order import Scheduling
from services.core.overtaking import OVERTAKEN_MAX
from services.core.planner.preemption import Preempt, PreemptedWork
from services.core.planner.victims import VictimRule


class BatchFormation(StrEnum):
    """How a pipeline's microbatches are formed; a group of one has nothing to form."""

    LOOKAHEAD = "lookahead"
    TOKEN_COUNT = "token_count"


@dataclass(frozen=True, slots=True)
class IterationConfig:
    """Bounds of an iteration; `max_running` ≤ `max_batch_tokens`, so that every decode fits.

    `num_blocks` is what the worker holds as a group of one. No request that needs more is taken,
    since a larger group splits again. In a pipeline each microbatch has at most `max_batch_tokens`;
    a round is not cut into parts of less than half of `min_microbatch_tokens`, on average, and cost
    is counted by `cost_model`; without one each token costs the same. `overtaken_max`: how often a
    waiting sequence may be overtaken, see `overtaking`. `prefix_caching`: see `prefix_cache`.
    `scheduling`: see `precedence`.

    With `slo`, batch work gets at most the part `fill_max` of the time that deadlines leave, and
    its iterations take `offline_iteration_s` at most when it is alone. Prefills of online requests
    get `online_chunk_tokens` (None: all) of an iteration whatever is due. See `slo`.
    `packing` and `adaptive_slots`: see `packing`. `victims`: see `victims`, with `slo` alone.
    `scheduling`: see `precedence`. `preempt` and `preempted_work`: see `preemption`.
    `shelf_max_s`: how long batch work rests at a worker that leads no longer, see `shelf`.
    `spread_after_loss`: whether a leader whose group a loss has divided gives requests back, see
    `lost_share`.
    """

    block_size: int
    num_blocks: int
    max_batch_tokens: int
    max_running: int
    max_waiting: int
    batch_formation: BatchFormation = BatchFormation.LOOKAHEAD
    min_microbatch_tokens: int = 128
    cost_model: CostModel | None = None
    overtaken_max: int = OVERTAKEN_MAX
    prefix_caching: bool = False
    scheduling: Scheduling = Scheduling.FCFS
    fill_max: float = 0.4
    offline_iteration_s: float = 2.0
    online_chunk_tokens: int | None = None
    packing: bool = False
    adaptive_slots: bool = False
    victims: VictimRule = VictimRule.NEWEST
    preempt: Preempt = Preempt.OFF
    preempted_work: PreemptedWork = PreemptedWork.RESUME
    shelf_max_s: float = 60.0
    spread_after_loss: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.max_batch_tokens:
            raise ValueError(
                f"max_running is {self.max_running}, but must be 1 to max_batch_tokens "
                f"({self.max_batch_tokens})"
            )
