"""`overhead`: the latency that the control plane adds to TTFT, and the cost of planning.

The TTFT of a single request is the engine's time plus the path through gateway, scheduler and
worker and back. The engine's part is read from the workers' event logs, on the client's machine
clock. Concurrent requests show the share of planning in an iteration. All requests together show
the gateway's CPU time per 1,000 tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.engine_log import EngineTimes, read_engine_logs
from benchmarks.scenarios.scenario import (
    FULL_LIMIT_S,
    QUICK_LIMIT_S,
    Case,
    LoadChoice,
    RoundsByCase,
    Scenario,
)
from benchmarks.stats import percentiles
from benchmarks.systems.system import System
from benchmarks.systems.tideserve import Tideserve
from tideserve.load.record import RequestOutcome, Round
from tideserve.load.workload import Workload, fixed

ALONE, TOGETHER = "overhead/alone", "overhead/together"
ROUNDS = 3
# (name, concurrency, prompt tokens, output tokens, requests and seconds of a quick round)
LOADS = ((ALONE, 1, 32, 4, 40, 12.0), (TOGETHER, 16, 32, 16, 32, 8.0))
FULL_FACTOR = 5


def cases(choice: LoadChoice) -> Sequence[Case]:
    """A single request at a time, and many concurrent requests."""
    factor = 1 if choice.quick else FULL_FACTOR

    def workload(prompt: int, output: int, count: int, turn: int) -> Workload:
        made = fixed(count, prompt, output, choice.seed * 1000 + turn)
        return replace(made, statement=f"{made.statement}, in a closed loop")

    return [
        Case(
            name=name,
            workload=partial(workload, prompt, output, count * factor),
            concurrency=concurrency,
            expected_s=expected_s * factor,
            limit_s=(QUICK_LIMIT_S if choice.quick else FULL_LIMIT_S) / ROUNDS / len(LOADS),
        )
        for name, concurrency, prompt, output, count, expected_s in LOADS
    ]


def inspect(systems: Mapping[str, System], rounds: RoundsByCase) -> dict[str, Any]:
    """Overhead by system, for systems with engine event logs."""
    inspected = {}
    for name, system in systems.items():
        if isinstance(system, Tideserve):
            times = read_engine_logs(system.event_logs)
            alone = rounds.get(ALONE, {}).get(name, ())
            together = rounds.get(TOGETHER, {}).get(name, ())
            cost = system.gateway_cost().since(system.cost_at_start)
            inspected[name] = {
                "overhead": overhead(times, alone, together)
                | {"gateway_cpu_s_per_1000_tokens": cost.per_thousand_s}
            }
    return inspected


def overhead(
    times: EngineTimes, alone: Sequence[Round], together: Sequence[Round]
) -> dict[str, Any]:
    """Seconds added to TTFT, to the engine and back, and shares of planning."""
    done = [
        record
        for round_ in alone
        for record in round_.records
        if record.outcome is RequestOutcome.COMPLETED and record.request_id in times.first_token_s
    ]
    # Client and engine share the machine's monotonic clock, so the times can be subtracted.
    there = [times.arrived_s[record.request_id] - record.sent_s for record in done]
    back = [record.token_times_s[0] - times.first_token_s[record.request_id] for record in done]
    return {
        "requests_matched": len(done),
        "to_engine_s": percentiles(there),
        "from_engine_s": percentiles(back),
        "added_to_ttft_s": percentiles([a + b for a, b in zip(there, back, strict=True)]),
        "planning_share_alone": _planning_share(times, alone),
        "planning_share_together": _planning_share(times, together),
    }


def _planning_share(times: EngineTimes, rounds: Sequence[Round]) -> float | None:
    """Mean over the rounds; None without any."""
    windows = [
        (min(r.sent_s for r in round_.records), max(r.end_s for r in round_.records))
        for round_ in rounds
        if round_.records
    ]
    shares = [share for span in windows if (share := times.planning_share(*span)) is not None]
    return sum(shares) / len(shares) if shares else None


SCENARIO = Scenario(
    name="overhead",
    systems=("tideserve",),
    memory="1GiB",
    cases=cases,
    inspect=inspect,
    event_log="worker",
)
