"""Loads, figures and verdict of `disagg`."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.scenarios.disagg import (
    APART,
    AUTO,
    MIXED,
    MIXES,
    SCALE,
    SYSTEMS,
    UNCHUNKED,
    Turns,
    judge,
    rate_of,
    workload_of,
)
from benchmarks.systems.system import Deployment
from services.common.device_profile import load_profile
from tideserve.load.record import RequestOutcome, SentRequest
from tideserve.load.traces import load_trace

DEPLOYMENT = Deployment(Path("model"), "tiny", Path("cache"), 2, 1 << 26, paced="A100-14B:2")
STATEMENTS = dict.fromkeys(MIXES, "a load")


def answered(ttft_s: float, gap_s: float) -> SentRequest:
    times_s = tuple(10.0 + ttft_s + gap_s * number for number in range(5))
    return SentRequest(10.0, 10.0, times_s[-1], RequestOutcome.COMPLETED, 100, 5, times_s)


def rounds(ttft_s: float = 0.2, gap_s: float = 0.05) -> Turns:
    return Turns([(answered(ttft_s, gap_s),) * 4] * 3, 5, 1, 1000.0, 10.0)


def measured() -> dict[str, dict[str, Turns]]:
    return {
        mix: {name: rounds() for name in SYSTEMS} | {UNCHUNKED: rounds(0.2, 0.1)} for mix in MIXES
    }


def test_the_figures_are_by_mix_and_system() -> None:
    verdict = judge(measured(), 0.97, DEPLOYMENT, STATEMENTS)
    assert list(verdict.problems) == []
    figures = verdict.figures
    assert figures["mixes"].keys() == MIXES.keys() == {"prefill_heavy", "decode_heavy"}
    for entry in figures["mixes"].values():
        assert entry["systems"].keys() == {"unchunked", "mixed", "1+1", "auto"}
        for of in entry["systems"].values():
            assert {"p50", "p99"} <= of["ttft_s"].keys() & of["inter_token_s"].keys()
            assert of["both_targets_share"] == 1.0
    assert figures["gap_p99_ratios"] == pytest.approx([0.5] * 3)
    assert figures["second_turn_cached_share"] == 0.97
    # 2,000 blocks of 16 tokens in 20 s, over 50 Gbit/s.
    share = 2000 * 16 * 196_608 / (20 * 6.25e9)
    assert figures["hand_over_link_share"] == pytest.approx(share)


def slow(ttft_s: float = 0.2, gap_s: float = 0.05) -> Callable[[Turns], Turns]:
    """One of four requests of each round is slow."""
    return lambda turns: replace(
        turns, rounds=[(*of[:3], answered(ttft_s, gap_s)) for of in turns.rounds]
    )


@pytest.mark.parametrize(
    ("mix", "name", "change", "text"),
    [
        ("prefill_heavy", APART, slow(gap_s=0.09), "prefill_heavy: P99 of the gaps"),
        ("decode_heavy", AUTO, slow(ttft_s=1.1), "decode_heavy: 0.750 of auto keep both"),
        ("prefill_heavy", AUTO, slow(gap_s=0.3), "prefill_heavy: 0.750 of auto keep both"),
    ],
)
def test_every_missed_bar_is_a_problem(
    mix: str, name: str, change: Callable[[Turns], Turns], text: str
) -> None:
    systems = measured()
    systems[mix][name] = change(systems[mix][name])
    problems = judge(systems, 0.97, DEPLOYMENT, STATEMENTS).problems
    assert len(problems) == 1 and problems[0].startswith(text)


def test_auto_is_compared_with_the_better_of_the_two() -> None:
    systems = measured()
    for name in (MIXED, AUTO):
        systems["decode_heavy"][name] = slow(ttft_s=1.1)(systems["decode_heavy"][name])
    assert judge(systems, 0.97, DEPLOYMENT, STATEMENTS).problems
    systems["decode_heavy"][APART] = systems["decode_heavy"][AUTO]
    assert not judge(systems, 0.97, DEPLOYMENT, STATEMENTS).problems


def test_failures_and_missing_hits_are_problems() -> None:
    systems = measured()
    failed = SentRequest(1.0, 1.0, 2.0, RequestOutcome.FAILED, 100, error="HTTP 500")
    systems["decode_heavy"][MIXED].rounds.append((failed,))
    problems = judge(systems, 0.5, DEPLOYMENT, STATEMENTS).problems
    assert problems[0] == "decode_heavy, mixed: 1 requests failed, the first: HTTP 500"
    assert "second turns find 0.5" in problems[-1]
    assert judge(measured(), None, DEPLOYMENT, STATEMENTS).problems


def test_prompts_take_the_same_share_of_a_worker_in_both_mixes() -> None:
    costs = load_profile("A100-14B:2").model
    for path in MIXES.values():
        trace = load_trace(path)
        rate, seconds = rate_of(trace, costs), 120.0
        load = workload_of(trace, rate, seconds, 2.0, seed=1)
        busy_s = sum(costs.chunk_s(0, len(request.prompt_ids)) for request in load.requests)
        assert busy_s / seconds == pytest.approx(0.7, rel=0.25)
        lengths = [len(request.prompt_ids) + request.output_tokens for request in load.requests]
        assert max(lengths) <= SCALE.prompt_range[1] + SCALE.output_range[1] <= 2048
        assert all(a.arrival_s < b.arrival_s for a, b in pairwise(load.requests))
        assert {
            (request.slo_class, request.ttft_s, request.tpot_s) for request in load.requests
        } == {("interactive", 1.0, 0.2)}


def test_rounds_have_other_prompts() -> None:
    trace, costs = load_trace(MIXES["prefill_heavy"]), load_profile("A100-14B:2").model
    loads = [workload_of(trace, rate_of(trace, costs), 20.0, 2.0, seed) for seed in range(3)]
    begins = [request.prompt_ids[:8] for load in loads for request in load.requests]
    assert len(set(begins)) == len(begins)
