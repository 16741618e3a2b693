"""Made-up arrivals: rate, variation, phases, repetition."""

from itertools import pairwise
from random import Random
from statistics import mean, stdev

import pytest

from bench.arrivals import gamma_arrivals, on_off_arrivals, repeat_burst
from bench.errors import BenchError
from bench.traces import Trace, TraceRow


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gamma_has_its_rate_and_variation(cv: float) -> None:
    times = gamma_arrivals(20_000, 4.0, cv, Random(1))
    gaps = [b - a for a, b in pairwise(times)]
    assert mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert stdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.1)
    assert times == sorted(times)


def test_the_seed_decides() -> None:
    assert gamma_arrivals(9, 1, 2, Random(3)) == gamma_arrivals(9, 1, 2, Random(3))


def test_on_off_is_silent_in_between() -> None:
    times = on_off_arrivals([(10, 5), (20, 0), (10, 5)], Random(2))
    assert times and all(time < 10 or 30 <= time < 40 for time in times)
    assert len(times) == pytest.approx(100, rel=0.4)


def test_a_burst_repeated() -> None:
    trace = Trace("t", (TraceRow(0, 1, 1), TraceRow(1, 2, 2)))
    times = [row.arrival_s for row in repeat_burst(trace, 3, 10).rows]
    assert times == [0, 1, 10, 11, 20, 21]


def test_nonsense_is_refused() -> None:
    with pytest.raises(BenchError):
        gamma_arrivals(1, 0, 1, Random())
    with pytest.raises(BenchError):
        repeat_burst(Trace("t", ()), 0, 1)
