"""Synthetic arrivals from a one-line pattern, as a trace with the lengths of a real trace."""

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
"""Below this range all gaps are almost equal; above it almost all gaps are 0."""
REQUESTS_MAX = 100_000


def is_pattern(text: str) -> bool:
    """Whether `text` is a pattern rather than a file name."""
    return text.startswith((GAMMA, PHASES))


def made_up(pattern: str, lengths: Trace, rng: Random) -> tuple[Trace, float]:
    """Trace rows that arrive according to `pattern`, and the duration of the pattern in seconds.

    Gaps are gamma-distributed; in phases, the coefficient of variation is 1 (Poisson).

    Raises:
        BenchError: if the pattern is invalid or has no arrivals.
    """
    phases, cv = _parse(pattern)
    times_s = tuple(phased_times(phases, cv, rng))
    if not times_s:
        raise BenchError(f"the pattern '{pattern}' has no arrivals")
    # A pattern has only arrival times, so draw lengths from the rows of the trace.
    drawn = rng.choices(lengths.rows, k=len(times_s))
    rows = tuple(
        replace(row, arrival_s=time_s, prefix_ids=())
        for time_s, row in zip(times_s, drawn, strict=True)
    )
    return Trace(pattern, rows), sum(seconds for seconds, _ in phases)


def _parse(pattern: str) -> tuple[Sequence[Phase], float]:
    """The phases and the coefficient of variation of the gaps."""
    kind, _, text = pattern.partition(":")
    try:
        if kind == "gamma":
            rate_per_s, cv, seconds = map(float, text.split(","))
            phases = [(seconds, rate_per_s)]
        else:
            cv = 1.0
            phases = [_phase(part) for part in text.split(",")]
    except ValueError:
        raise BenchError(f"'{pattern}' is not a pattern; write {FORMATS}") from None
    numbers = [cv, *(number for phase in phases for number in phase)]
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise BenchError(f"the numbers of '{pattern}' must be finite and not negative")
    if cv and not CV_MIN <= cv <= CV_MAX:
        raise BenchError(f"the variation of '{pattern}' must be 0 or {CV_MIN:g} to {CV_MAX:g}")
    if sum(seconds * rate_per_s for seconds, rate_per_s in phases) > REQUESTS_MAX:
        raise BenchError(f"'{pattern}' makes more than {REQUESTS_MAX:,} requests")
    return phases, cv


def _phase(text: str) -> Phase:
    seconds, rate_per_s = map(float, text.split("@"))
    return seconds, rate_per_s
