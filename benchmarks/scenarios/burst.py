"""`burst`: a slice of a real trace whose KV demand exceeds the workers' KV cache.

Outputs are long and prompts short, so that requests stay long and first tokens wait for memory, not
for compute. A system with the suffix `-ample` gets the same arrivals with memory for all of them.

With --ablation, the mechanisms of `drop` are added step by step under the same flood (KunServe
§5.3): drop only, then coordinated exchange, lookahead and restore. As in KunServe, the prompts are
long and of varied length, so that microbatches formed by token count differ in time. After the
flood, a trickle of requests shows the effect of restoring.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

from benchmarks.errors import BenchError
from benchmarks.patterns import is_pattern, made_up
from benchmarks.scenarios.scenario import (
    ABLATION,
    FULL_LIMIT_S,
    GPU,
    QUICK_LIMIT_S,
    TRACE,
    Case,
    LoadChoice,
    Scenario,
)
from tideserve.load.traces import AZURE_CONVERSATIONS, Trace, load_trace
from tideserve.load.workload import LengthScale, Workload, from_trace

ROUNDS = 3
FULL_REPEAT = 2
"""Consecutive repetitions of the slice in a full run."""
REQUESTS_MIN = 70
"""Minimum per round, so that the three rounds of a quick run have at least 200 requests."""


@dataclass(frozen=True, slots=True)
class TraceSlice:
    """A slice of the trace, its mean rate for two workers, and the scale of its lengths.

    `drain_s` estimates how long answers take after the last arrival.
    """

    scale: LengthScale
    start_s: float
    duration_s: float
    rate_per_s: float
    drain_s: float


# Lengths of Azure's conversations, scaled to what two cores decode in about a minute. Prefill costs
# 3 to 4 ms a token there: with longer prompts, even ample memory would wait for compute. Without a
# merge, a request either gets memory at once or waits for seconds. At this rate the median request
# surely gets memory at once; at lower rates chance decides.
UNPACED = TraceSlice(
    LengthScale(prompt=0.05, output=0.4, prompt_range=(24, 40), output_range=(88, 112)),
    start_s=180.0,
    duration_s=11.0,
    rate_per_s=7.0,
    drain_s=45.0,
)
# An answer takes five to eight seconds at the pace of an A100 with a 14B model. At most about
# fifteen run concurrently, since two processors also plan, compute, sample and send each token.
# This slice is among the most even slices of that size: demand stays high for several answer times.
PACED = TraceSlice(
    LengthScale(prompt=0.12, output=1.3, prompt_range=(96, 160), output_range=(200, 300)),
    start_s=140.0,
    duration_s=13.0,
    rate_per_s=1.85,
    drain_s=20.0,
)
# Unscaled lengths: a request holds a thousand tokens or more. By estimate, two workers that share
# an H100 run about sixty requests of a 7B model concurrently, which overflows KV for 16,000 tokens
# per worker. Choose a rate for another model or GPU.
ON_GPU = TraceSlice(
    LengthScale(prompt_range=(64, 2048), output_range=(64, 512)),
    start_s=140.0,
    duration_s=20.0,
    rate_per_s=16.0,
    drain_s=25.0,
)
LINK_GBITS = 200.0
"""Link of paced workers, as in KunServe's cluster A: moves of KV and parameters take their time."""
# Few layers, since each layer costs time here whatever its width, with a large KV per token, so
# that few requests fill the KV cache. A merge of two workers provides 2.2 times its size.
PACED_MODEL = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 1792,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def cases(choice: LoadChoice) -> Sequence[Case]:
    """An open loop."""
    unpaced = ON_GPU if choice.on_gpu else UNPACED
    return (flood_case(choice, "burst", load_for(choice, PACED, unpaced)),)


def flood_case(choice: LoadChoice, name: str, load: TraceSlice, time_share: float = 1.0) -> Case:
    """An open loop that takes up to `time_share` of a round.

    Raises BenchError if it does not fit, or if a quick round has too few requests.
    """
    workload = flood(choice, 0, load)
    if choice.quick and len(workload.requests) < REQUESTS_MIN:
        raise BenchError(
            f"the slice of the trace has {len(workload.requests)} requests, a quick run needs at"
            f" least {REQUESTS_MIN} per round; choose a longer slice"
        )
    limit_s = (QUICK_LIMIT_S if choice.quick else FULL_LIMIT_S) / ROUNDS * time_share
    last_s = workload.requests[-1].arrival_s
    # The end of a round would cut these requests off.
    if last_s >= limit_s:
        raise BenchError(
            f"the last request would arrive after {last_s:.0f} s, but a round ends after"
            f" {limit_s:.0f} s; take a shorter slice, fewer repetitions or a higher rate"
        )
    return Case(
        name=name,
        workload=partial(flood, choice, load=load),
        concurrency=None,
        expected_s=last_s + load.drain_s,
        limit_s=limit_s,
    )


def load_for(choice: LoadChoice, paced: TraceSlice, unpaced: TraceSlice) -> TraceSlice:
    """The paced or the unpaced load, with its rate divided by the device's slowdown."""
    if not choice.paced:
        return unpaced
    slowdown = choice.slowdown
    return replace(paced, rate_per_s=paced.rate_per_s / slowdown, drain_s=paced.drain_s * slowdown)


def flood(choice: LoadChoice, turn: int, load: TraceSlice) -> Workload:
    """The requests of round `turn`, with the lengths of `load`."""
    trace, start_s, duration_s, rate_per_s = _source(choice, load)
    part = trace.slice(start_s, duration_s)
    how = f"{len(part.rows)} requests of {start_s:g}-{start_s + duration_s:g} s"
    repeat = choice.trace_repeat
    own = (choice.trace, choice.trace_start_s, choice.trace_duration_s)
    if repeat is None and own == (None, None, None) and not choice.quick:
        repeat = FULL_REPEAT
    if repeat is not None:
        part = part.repeat(repeat, duration_s)
        how += f", repeated {repeat} times"
    if choice.time_scale is not None:
        part = part.scale_time(choice.time_scale)
        how += f", time stretched evenly {choice.time_scale:g} times"
    elif rate_per_s is not None:
        part = part.scale_rate(rate_per_s)
        how += f", time stretched evenly to a mean of {rate_per_s:g} requests/s"
    if trace.skipped:
        how += f" ({trace.skipped})"
    return from_trace(part, load.scale, choice.seed * 1000 + turn, how)


def _source(choice: LoadChoice, load: TraceSlice) -> tuple[Trace, float, float, float | None]:
    """The trace, start and duration of its slice, and the mean rate to stretch it to, if any.

    Defaults where `choice` is None: the slice of `load`, or the start of a given trace. Synthetic
    arrivals are used completely and unstretched.
    """
    start_s, rate_per_s = choice.trace_start_s or 0.0, choice.rate_per_s
    if choice.trace is not None and is_pattern(choice.trace):
        trace, span_s = made_up(choice.trace, load_trace(AZURE_CONVERSATIONS), Random(choice.seed))
        return trace, start_s, choice.trace_duration_s or span_s - start_s, rate_per_s
    if choice.trace is None and choice.trace_start_s is None:
        start_s = load.start_s
    trace = load_trace(AZURE_CONVERSATIONS if choice.trace is None else Path(choice.trace))
    rate_per_s = rate_per_s or load.rate_per_s * choice.workers / 2
    return trace, start_s, choice.trace_duration_s or load.duration_s, rate_per_s


SCENARIO = Scenario(
    name="burst",
    systems=("drop", "recompute", "vllm", "recompute-ample", "vllm-ample"),
    memory="620MiB",
    # Many processors cannot multiply bfloat16, and fallbacks are no basis for a comparison.
    dtype="float32",
    paced_systems=("drop", "recompute", "recompute-ample"),
    paced_memory="22016KiB",
    paced_options={"worker": {"pace_links": LINK_GBITS}},
    paced_alone=True,
    tiny_model=PACED_MODEL,
    cases=cases,
    options=TRACE | GPU | {ABLATION},
    demand_min=1.5,
)

STEPS = {
    "drop only": "drop-exchange-lookahead-restore",
    "+ coordinated exchange": "drop-lookahead-restore",
    "+ lookahead": "drop-restore",
    "+ restore": "drop",
}
ABLATION_UNPACED = replace(
    UNPACED,
    scale=LengthScale(prompt=0.15, output=0.3, prompt_range=(16, 384), output_range=(40, 80)),
    rate_per_s=4.0,
    drain_s=20.0,
)
# On a modelled A100, lookahead leaves 0.26 of the bubbles here while requests arrive; 0.37 or 0.46
# if a message between stages takes 1 or 2 ms.
ABLATION_PACED = replace(
    PACED,
    scale=LengthScale(prompt=0.8, output=0.4, prompt_range=(64, 1800), output_range=(40, 160)),
    duration_s=18.0,
    rate_per_s=8.0,
    drain_s=10.0,
)
TRICKLE_REQUESTS, TRICKLE_RATE_PER_S = 12, 1.0
TRICKLE_SHARE = 0.3
"""Share of a round's time limit."""


def ablation_cases(choice: LoadChoice) -> Sequence[Case]:
    """The flood with other lengths, then its first requests again at a steady rate."""
    load = load_for(choice, ABLATION_PACED, ABLATION_UNPACED)
    first = flood_case(choice, "ablation/flood", load, 1 - TRICKLE_SHARE)

    def trickle(turn: int) -> Workload:
        # Reuse the lengths of the flood, so that only the arrival rate differs.
        requests = tuple(
            replace(request, arrival_s=number / TRICKLE_RATE_PER_S)
            for number, request in enumerate(first.workload(turn).requests[:TRICKLE_REQUESTS])
        )
        return Workload(
            requests,
            f"after the answers to the flood, its first {len(requests)} requests again,"
            f" {TRICKLE_RATE_PER_S:g} per second",
        )

    second = Case(
        name="ablation/trickle",
        workload=trickle,
        concurrency=None,
        expected_s=TRICKLE_REQUESTS / TRICKLE_RATE_PER_S + 3 * choice.slowdown,
        limit_s=first.limit_s * TRICKLE_SHARE / (1 - TRICKLE_SHARE),
    )
    return (first, second)


ABLATION_SCENARIO = Scenario(
    name=ABLATION,
    systems=tuple(STEPS.values()),
    memory="400MiB",
    paced_systems=tuple(STEPS.values()),
    paced_memory="26MiB",
    # Two processors prefill 2,000 tokens with these layers as fast as the device.
    tiny_model={"num_hidden_layers": 4, "intermediate_size": 256},
    cases=ablation_cases,
    steps=STEPS,
    up_options={"max_batch_tokens": 2048},
    options=TRACE | {ABLATION},
)
