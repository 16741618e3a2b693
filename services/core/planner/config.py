"""Settings of a worker's planner (continuous batching), and limits measured at start-up."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from services.core.cost.model import CostModel
from services.core.cost.padded import Execution
from services.core.host.vocabulary import HostSettings
from services.core.overtaking import overtaken_setting
from services.core.planner.preemption import Preempt, PreemptedWork
from services.core.planner.victims import VictimRule
from services.core.queue_order import Scheduling, scheduling_setting
from services.core.setting import choice, computed, number, option

GPU_LIMITS: Mapping[str, Any] = {"max_batch_tokens": 2048, "max_running": 256}
"""Defaults on a GPU: the small iterations of the CPU defaults would leave it mostly idle."""

MICROBATCH_TOKENS = 64
"""`min_microbatch_tokens` without a cost model."""
PROMPT_TOKENS_MIN = 16
"""Least value of `min_microbatch_tokens` that is derived from a cost model, which may have no fixed
cost. Also the least mean number of prompt tokens in a microbatch beside decodes."""


class BatchFormation(StrEnum):
    """How the leader of a pipeline divides prefills into microbatches."""

    LOOKAHEAD = "lookahead"
    TOKEN_COUNT = "token_count"


@dataclass(frozen=True, slots=True)
class IterationConfig:
    """Settings of a worker's planner, and the limits that the worker measures at start-up.

    `num_blocks` is the number of KV blocks of the worker alone. Requests that need more are refused
    even in a pipeline of several workers, since it may split again. A microbatch, like the
    iteration of a single worker, has at most `max_batch_tokens`. `cost_model` predicts durations of
    iterations; without it each token costs the same. `host`: KV is also kept in host memory.

    Details: `overtaking.py`, `prefix_cache.py`, `lookahead.py` (`batch_formation`,
    `min_microbatch_tokens`), `victims.py` (`scheduling`, `victims`), `slo.py` (`harvest` to
    `online_chunk_tokens`), `packing.py`, `preemption.py`, `requeue.py` (`shelf_max_s`),
    `excess_lost_sequences` (`spread_after_loss`), `static.py` and `cost/padded.py` (`execution`).
    """

    block_size: int = number(
        16, "Tokens in a KV block.", minimum=1, maximum=1024, elsewhere="with vLLM 32"
    )
    num_blocks: int = computed(0)
    # An iteration delays the next tokens of all its sequences, so a slow device gets small
    # iterations. With vLLM, aborts wait for the end of an iteration, too.
    max_batch_tokens: int = number(
        256,
        "Maximum number of tokens per iteration; a higher value raises throughput and TPOT.",
        minimum=1,
        maximum=2**20,
        elsewhere=f"on GPUs and with vLLM {GPU_LIMITS['max_batch_tokens']}",
    )
    max_running: int = number(
        128,
        "Maximum number of running requests.",
        minimum=1,
        maximum=2**16,
        elsewhere=f"on GPUs {GPU_LIMITS['max_running']}",
    )
    max_waiting: int = number(
        4096, "Maximum number of requests queued in the worker.", minimum=1, maximum=2**20
    )
    batch_formation: BatchFormation = choice(
        BatchFormation.LOOKAHEAD,
        BatchFormation,
        "How a pipeline's microbatches are formed: lookahead balances their predicted cost over a"
        " round; token_count fills them up to max_batch_tokens.",
        expert=True,
    )
    min_microbatch_tokens: int | None = number(
        None,
        "Minimum mean number of tokens in the microbatches that lookahead divides a round into.",
        minimum=1,
        maximum=2**20,
        default_text="the least number whose computation takes as long as the fixed cost of an"
        " iteration, by the cost model, but at least 16; 64 without one",
        expert=True,
    )
    cost_model: CostModel | None = computed(None)
    host: HostSettings | None = computed(None)
    overtaken_max: int = overtaken_setting()
    prefix_caching: bool = option(
        True,
        "Automatic prefix caching: requests with a common prefix share its KV blocks, which stay"
        " cached until their memory is needed.",
    )
    scheduling: Scheduling = scheduling_setting()
    harvest: float = number(
        0.4,
        "With scheduling slo: maximum share of the slack before online deadlines that batch"
        " requests may use; with 0 they run only while no online request does.",
        minimum=0,
        maximum=1,
    )
    offline_iteration_s: float = number(
        2.0,
        "With scheduling slo: maximum duration of a batch-only iteration, in seconds; shorter if"
        " TTFT targets require it and online requests cannot interrupt it (preempt).",
        minimum=0.001,
        maximum=3600,
        expert=True,
    )
    online_chunk_tokens: int | None = number(
        None,
        "With scheduling slo: tokens per iteration for prompts of online requests, regardless of"
        " deadlines.",
        minimum=1,
        maximum=2**20,
        default_text="max_batch_tokens",
        expert=True,
    )
    packing: bool = option(
        False,
        "With scheduling slo: whether a batch request that does not fit replaces an online request"
        " that meets its deadline without this iteration.",
        expert=True,
    )
    adaptive_slots: bool = option(
        False,
        "With scheduling slo: whether the number of sequences per iteration with online and batch"
        " work adapts: it falls to half of max_running after an iteration bound by a deadline, and"
        " doubles after any other iteration.",
        expert=True,
    )
    victims: VictimRule = choice(
        VictimRule.NEWEST,
        VictimRule,
        "With scheduling slo: which online request is preempted when no batch request holds KV"
        " blocks: newest, or slack (its next token is due last).",
        expert=True,
    )
    block_sharing: bool = option(
        False,
        "With scheduling slo, conserve or bros: whether an online request that finds no free KV"
        " block shares the partly filled last block of a batch request, which it fills from the"
        " other end (BROS). Not for merged groups.",
        expert=True,
    )
    preempt: Preempt | None = choice(
        None,
        Preempt,
        "When an online request preempts a batch-only iteration between two layers, on a worker"
        " that is not merged: off (never), deadline (if its deadline would be missed) or always.",
        default_text="with scheduling slo always, else off",
    )
    preempted_work: PreemptedWork = choice(
        PreemptedWork.RESUME,
        PreemptedWork,
        "What happens to an interrupted iteration: resume continues it later at the same layer;"
        " discard runs it again.",
        expert=True,
    )
    shelf_max_s: float = number(
        60.0,
        "Seconds for which batch requests stay parked at a worker that does not lead its merged"
        " group, before they move to the leader; 0 moves them at once. With `scheduling: fcfs` they"
        " move like all other requests.",
        minimum=0,
        maximum=86400,
        expert=True,
    )
    spread_after_loss: bool = option(
        True,
        "Whether the leader of a merged group that lost a member returns its younger requests to"
        " the scheduler, so that the former members share the recomputation. Gateways resume them"
        " after the delivered tokens, unless they have `resume_streams: false`.",
        expert=True,
    )

    execution: Execution = choice(
        Execution.RAGGED,
        Execution,
        "For comparisons, only of paced workers and in simulations. padded: an iteration lasts as"
        " if all of its prompts were as long as the longest; static: so do its decodes, and"
        " requests start only when all of the last batch have ended.",
        expert=True,
    )

    @property
    def microbatch_tokens_min(self) -> int:
        """`min_microbatch_tokens`; by default from the cost model (MIN of KunServe Fig. 11)."""
        if self.min_microbatch_tokens is not None:
            return self.min_microbatch_tokens
        if self.cost_model is None:
            return MICROBATCH_TOKENS
        measured = self.cost_model.amortising_tokens(self.max_batch_tokens)
        return min(max(measured, PROMPT_TOKENS_MIN), self.max_batch_tokens)

    @property
    def preemption(self) -> Preempt:
        """`preempt`; by default that of the scheduling policy."""
        if self.execution is Execution.STATIC:
            return Preempt.OFF  # no request starts before the batch ends
        if self.preempt is not None:
            return self.preempt
        return Preempt.ALWAYS if self.scheduling is Scheduling.SLO else Preempt.OFF

    def __post_init__(self) -> None:
        if self.block_sharing and not self.scheduling.deadlines_bound_iterations:
            raise ValueError(
                f"'block_sharing' is on, but 'scheduling' is '{self.scheduling}': set it to slo,"
                " conserve or bros, or turn 'block_sharing' off"
            )
        if not 1 <= self.max_running <= self.max_batch_tokens:
            raise ValueError(
                f"'max_running' is {self.max_running}, but must be 1 to 'max_batch_tokens'"
                f" ({self.max_batch_tokens}): every running request decodes one token per iteration"
            )
