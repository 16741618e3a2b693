"""Figures and verdict of `rebalance`."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scenarios.rebalance import MODES, SYSTEMS, ServedLoad, judge, options_of
from benchmarks.systems.system import Deployment

DEPLOYMENT = Deployment(Path("model"), "tiny", Path("cache"), 2, 1 << 28, paced="A100-14B:2")
OFF = ServedLoad(4, 0, 0, 100.0, {"p50": 0.05}, {"p50": 0.06})
MOVED = replace(OFF, preemptions=1, moved=5)
UNEVEN = {
    "off": [OFF, OFF],
    "stuck": [MOVED, MOVED],
    "all": [MOVED, MOVED],
    "drop-off": [replace(OFF, preemptions=0, merges=1)] * 2,
    "drop-stuck": [MOVED, MOVED],
}
EVEN = {mode: [replace(OFF, preemptions=0)] * 2 for mode in MODES}


def test_the_figures_are_by_system_at_the_top_level() -> None:
    verdict = judge(UNEVEN, EVEN, DEPLOYMENT)
    assert list(verdict.problems) == []
    figures = verdict.figures
    assert figures["preemptions"] == {"off": 8, "stuck": 2, "all": 2} | {
        "drop-off": 0,
        "drop-stuck": 2,
    }
    assert figures["merges"]["drop-off"] == 2 and figures["merges"]["drop-stuck"] == 0
    assert figures["throughput_tokens_per_s"].keys() == figures["tpot_p50_s"].keys() == set(SYSTEMS)
    assert figures["moved"]["stuck"] == 10 and figures["even"]["tpot_p50_s"]["all"] == 0.05
    rows = dict(verdict.rows)
    assert (
        rows["off"] == "8 preemptions, 0 requests moved, 0 merges; 100 tokens/s, TPOT p50 0.0500 s"
    )
    assert rows["all, even load"] == "100 tokens/s, TPOT p50 0.0500 s"


@pytest.mark.parametrize(
    ("uneven", "even", "text"),
    [
        ({"stuck": [OFF, MOVED]}, {}, "stuck: 5 preemptions against 8"),
        ({"drop-stuck": [replace(MOVED, merges=1)] * 2}, {}, "2 merges though moves are enough"),
        ({"all": [replace(MOVED, failures=["HTTP 500"])] * 2}, {}, "all: 1 requests failed, the"),
        ({}, {"all": [replace(OFF, tokens_per_s=94.0)]}, "all: throughput 94 against 100/s"),
        ({}, {"stuck": [replace(OFF, tpot_s={"p50": 0.053})]}, "stuck: the median time per token"),
        ({mode: [replace(OFF, preemptions=0)] for mode in MODES}, {}, "no request was preempted"),
    ],
)
def test_every_missed_bar_is_a_problem(
    uneven: dict[str, list[ServedLoad]], even: dict[str, list[ServedLoad]], text: str
) -> None:
    problems = judge(UNEVEN | uneven, EVEN | even, DEPLOYMENT).problems
    assert problems and all(problem.startswith(text) for problem in problems)


def test_off_means_recompute_without_moves() -> None:
    assert options_of("off") == {"overload_policy": "recompute", "memmgr": {"rebalance": "off"}}
    assert options_of("drop-stuck")["overload_policy"] == "drop"
