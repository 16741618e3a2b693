"""Synthetic arrivals as traces: rate, variation, phases, invalid patterns."""

from itertools import pairwise
from random import Random
from statistics import mean, stdev

import pytest

from benchmarks.errors import BenchError
from benchmarks.patterns import is_pattern, made_up
from tideserve.load.traces import Trace, TraceRow

LENGTHS = Trace("lengths", (TraceRow(0, 10, 20), TraceRow(1, 30, 40)))


def arrivals(pattern: str, seed: int = 1) -> list[float]:
    trace, _ = made_up(pattern, LENGTHS, Random(seed))
    return [row.arrival_s for row in trace.rows]


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gamma_has_its_rate_and_variation(cv: float) -> None:
    times = arrivals(f"gamma:4,{cv},5000")
    gaps = [b - a for a, b in pairwise(times)]
    assert mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert stdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.1)
    assert times == sorted(times)


def test_phases_may_be_silent() -> None:
    trace, span_s = made_up("phases:10@5,20@0,10@5", LENGTHS, Random(2))
    times = [row.arrival_s for row in trace.rows]
    assert span_s == 40
    assert times and all(time < 10 or 30 <= time < 40 for time in times)
    assert len(times) == pytest.approx(100, rel=0.4)


def test_lengths_are_those_of_the_real_trace_and_the_seed_decides() -> None:
    trace, _ = made_up("gamma:10,1,20", LENGTHS, Random(3))
    assert {(row.prompt_tokens, row.output_tokens) for row in trace.rows} == {(10, 20), (30, 40)}
    assert trace == made_up("gamma:10,1,20", LENGTHS, Random(3))[0]


def test_a_file_name_is_not_a_pattern() -> None:
    assert is_pattern("gamma:1,2,3") and is_pattern("phases:1@2")
    assert not is_pattern("gamma.csv") and not is_pattern("traces/phases")


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("gamma:1,2", "write gamma:RATE,CV,SECONDS"),
        ("gamma:a,1,2", "is not a pattern"),
        ("phases:3@4,5", "is not a pattern"),
        ("phases:", "is not a pattern"),
        ("gamma:-1,1,2", "not negative"),
        ("phases:inf@1", "finite"),
        ("phases:10@0", "has no arrivals"),
        ("gamma:4,1e6,60", "must be 0 or 0.01 to 100"),
        ("gamma:4,1e-160,60", "must be 0 or 0.01 to 100"),
        ("gamma:1e12,1,60", "more than 100,000 requests"),
    ],
)
def test_invalid_patterns_are_refused(pattern: str, problem: str) -> None:
    with pytest.raises(BenchError, match=problem):
        made_up(pattern, LENGTHS, Random(0))
