"""Made-up arrival times, in seconds from 0, ascending. Chance comes in as `rng`."""

from collections.abc import Sequence
from random import Random

from bench.errors import BenchError
from bench.traces import Trace


def gamma_arrivals(count: int, rate_per_s: float, cv: float, rng: Random) -> list[float]:
    """Independent gaps of a gamma distribution; a coefficient of variation of 1 is Poisson."""
    if rate_per_s <= 0 or cv <= 0:
        raise BenchError(f"rate {rate_per_s} and coefficient of variation {cv} must be above 0")
    shape = 1 / cv**2
    scale_s = cv**2 / rate_per_s
    now_s, times = 0.0, []
    for _ in range(count):
        now_s += rng.gammavariate(shape, scale_s)
        times.append(now_s)
    return times


def on_off_arrivals(
    phases: Sequence[tuple[float, float]], rng: Random, cv: float = 1.0
) -> list[float]:
    """Phases of (seconds, requests a second) one after the other; a rate of 0 is silence."""
    start_s, times = 0.0, []
    for duration_s, rate_per_s in phases:
        if rate_per_s > 0:
            # Far more than fit: the tail is cut at the end of the phase.
            count = int(duration_s * rate_per_s * 3) + 20
            gaps = gamma_arrivals(count, rate_per_s, cv, rng)
            times += [start_s + time_s for time_s in gaps if time_s < duration_s]
        start_s += duration_s
    return times


def repeat_burst(trace: Trace, times: int, period_s: float) -> Trace:
    """The trace `times` times over, each copy `period_s` after the one before."""
    if times < 1 or period_s <= 0:
        raise BenchError(f"a burst repeated {times} times every {period_s:g} s is no burst")
    rows = [
        type(row)(
            row.arrival_s + turn * period_s, row.prompt_tokens, row.output_tokens, row.prefix_ids
        )
        for turn in range(times)
        for row in trace.rows
    ]
    rows.sort(key=lambda row: row.arrival_s)
    return Trace(f"{trace.name} × {times}", tuple(rows), trace.skipped_lines)
