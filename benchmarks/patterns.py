"""Made-up arrivals from a pattern in one line, as a trace with the lengths of a real one."""

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from benchmarks.errors import BenchError
from tideserve.load.traces import Trace
from tideserve.sim.workload import Phase, phased_times

GAMMA, PHASES = "gamma:", "phases:"
FORMATS = f"{GAMMA}RATE,CV,SECONDS or {PHASES}SECONDS@RATE,SECONDS@RATE,…"
CV_MIN, CV_MAX = 0.01, 100.0
"""Below this range all gaps are nearly equal; above it nearly all gaps are 0."""
REQUESTS_MAX = 100_000


def is_pattern(text: str) -> bool:
    """Whether this is a pattern instead of the name of a file."""
    return text.startswith((GAMMA, PHASES))


def made_up(pattern: str, lengths: Trace, rng: Random) -> tuple[Trace, float]:
    """Rows that arrive as `pattern` says, and the seconds that it spans.

    Gaps are gamma distributed; those of phases have a coefficient of variation of 1 (Poisson).

    Raises:
        BenchError: if it is no pattern, or nothing arrives.
    """
    phases, cv = _parse(pattern)
    times_s = tuple(phased_times(phases, cv, rng))
    if not times_s:
        raise BenchError(f"no request arrives in the pattern '{pattern}'")
    drawn = rng.choices(lengths.rows, k=len(times_s))
    rows = tuple(
        replace(row, arrival_s=time_s, prefix_ids=())
        for time_s, row in zip(times_s, drawn, strict=True)
    )
    return Trace(pattern, rows), sum(seconds for seconds, _ in phases)


def _parse(pattern: str) -> tuple[Sequence[Phase], float]:
    """Phases and the coefficient of variation."""
    kind, _, text = pattern.partition(":")
    try:
        if kind == "gamma":
            rate_per_s, cv, seconds = map(float, text.split(","))
            phases = [(seconds, rate_per_s)]
        else:
            cv = 1.0
            phases = [_phase(part) for part in text.split(",")]
    except ValueError:
        raise BenchError(f"'{pattern}' is no pattern; write {FORMATS}") from None
    numbers = [cv, *(number for phase in phases for number in phase)]
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise BenchError(f"the numbers of '{pattern}' must be finite, and none below 0")
    if cv and not CV_MIN <= cv <= CV_MAX:
        raise BenchError(f"the variation of '{pattern}' must be 0 or {CV_MIN:g} to {CV_MAX:g}")
    if sum(seconds * rate_per_s for seconds, rate_per_s in phases) > REQUESTS_MAX:
        raise BenchError(f"'{pattern}' makes more than {REQUESTS_MAX:,} requests")
    return phases, cv


def _phase(text: str) -> Phase:
    seconds, rate_per_s = map(float, text.split("@"))
    return seconds, rate_per_s
