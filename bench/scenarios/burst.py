"""`burst`: a slice of a real trace whose KV demand overflows what the workers have.

Outputs are long and prompts short, so that a request stays long and its first token waits for
memory, not for compute. `recompute-ample` gets the same arrivals with memory for all of them.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.errors import BenchError
from bench.scenarios.scenario import FULL_LIMIT_S, QUICK_LIMIT_S, Case, Choice, Scenario
from bench.traces import load_trace
from bench.workload import LengthScale, Workload, from_trace

SLICE = Path(__file__).resolve().parents[1] / "data" / "azure_conv_2023_slice.csv"
QUICK_ROUNDS, FULL_ROUNDS = 3, 5
# Tokens of Azure's conversations, brought to what two cores decode in about a minute. A prompt
# costs 4 ms a token there, so longer ones would make even ample memory wait for compute.
SCALE = LengthScale(prompt=0.07, output=0.4, prompt_range=(32, 56), output_range=(80, 104))
START_S, DURATION_S, RATE_PER_S = 180.0, 11.0, 4.0
REQUESTS_MIN = 70
"""Three rounds of it are the 200 requests that a quick run has at least."""


def cases(choice: Choice) -> Sequence[Case]:
    """One open loop."""
    workload = flood(choice, 0)
    if choice.quick and len(workload.requests) < REQUESTS_MIN:
        raise BenchError(
            f"the slice of the trace has {len(workload.requests)} requests, a quick run needs at"
            f" least {REQUESTS_MIN} a round; choose a longer one"
        )
    rounds = QUICK_ROUNDS if choice.quick else FULL_ROUNDS
    return (
        Case(
            name="burst",
            workload=partial(flood, choice),
            concurrency=None,
            expected_s=workload.requests[-1].arrival_s + 45,
            limit_s=(QUICK_LIMIT_S if choice.quick else FULL_LIMIT_S) / rounds,
        ),
    )


def flood(choice: Choice, turn: int, scale: LengthScale = SCALE) -> Workload:
    """The requests of round `turn`."""
    trace = load_trace(choice.trace or SLICE)
    start_s = START_S if choice.trace_start_s is None else choice.trace_start_s
    duration_s = choice.trace_duration_s or DURATION_S
    rate_per_s = choice.rate_per_s or RATE_PER_S
    part = trace.slice(start_s, duration_s).scale_rate(rate_per_s)
    how = (
        f"{len(part.rows)} requests of {start_s:g}-{start_s + duration_s:g} s, time stretched"
        f" evenly to a mean of {rate_per_s:g} requests/s"
    )
    if trace.skipped:
        how += f" ({trace.skipped})"
    return from_trace(part, scale, choice.seed * 1000 + turn, how)


SCENARIO = Scenario(
    name="burst",
    summary="a slice of a real trace whose KV demand overflows the workers' memory",
    systems=("recompute", "vllm", "recompute-ample"),
    memory="360MiB",
    cases=cases,
    rounds=lambda quick: QUICK_ROUNDS if quick else FULL_ROUNDS,
)
