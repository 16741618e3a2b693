"""Bars of a flood with offline load behind it: what holds, what fails, what nobody measured."""

from typing import Any

import pytest

from benchmarks.co_serving.flood_bars import judge
from benchmarks.co_serving.judging import Judgement, OnlineTargets, failures

TARGETS = OnlineTargets(ttft_s=1.0, tpot_s=0.2)
Systems = dict[str, dict[str, Any]]


def system(ttft_p99_s: float, settled_s: float | None = 3.0, **other: Any) -> dict[str, Any]:
    """Figures of one system with two rounds, in each of which groups merged and split."""
    change = {"workers": 2, "committed_s": 0.5}
    return {
        "ttft_s": {"p99": ttft_p99_s},
        "classes": {
            "online": {"sent": 240, "cut_off": 0},
            "batch": {"completed": 7},
        },
        "cost_scale": {"prefill": 1.0},
        "rounds": [{}, {}],
        "changes": [
            change | {"merge": merge, "settled_s": settled_s}
            for merge in (True, False, True, False)
        ],
        "problems": [],
        **other,
    }


@pytest.fixture
def systems() -> Systems:
    return {"online-only@A100-14B:2": system(0.5), "slo@A100-14B:2": system(0.65)}


def failing(systems: Systems) -> list[tuple[str, str]]:
    bars = judge(systems, TARGETS, paced=True)["bars"]
    return [(one["system"], one["what"]) for one in bars if one["verdict"] == Judgement.FAILS]


def test_first_tokens_may_come_a_tenth_or_one_budget_later(systems: Systems) -> None:
    assert failing(systems) == []
    systems["slo@A100-14B:2"] = system(0.71)
    assert failing(systems) == [("slo", "P99 TTFT")]
    systems = {"online-only": system(10.0), "slo": system(10.9)}
    assert failing(systems) == []
    systems["slo"] = system(11.1)
    assert failing(systems) == [("slo", "P99 TTFT")]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"settled_s": 31.0}, "longest change of groups [s]"),
        ({"settled_s": None}, "longest change of groups [s]"),
        ({"problems": ["I11: a step while a cheaper one would have done"]}, "problems in the logs"),
    ],
)
def test_a_change_that_takes_long_and_a_broken_invariant_fail(
    systems: Systems, change: dict[str, Any], what: str
) -> None:
    systems["slo@A100-14B:2"] = system(0.6, **change)
    assert failing(systems) == [("slo", what)]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"changes": [{"merge": False, "settled_s": 1.0}] * 2}, "merges"),
        ({"changes": [{"merge": True, "settled_s": 1.0}] * 2}, "splits"),
        ({"classes": {"online": {"sent": 240, "cut_off": 0}, "batch": {"completed": 0}}}, "batch"),
        (
            {"classes": {"online": {"sent": 199, "cut_off": 0}, "batch": {"completed": 1}}},
            "online requests",
        ),
    ],
)
def test_another_load_than_the_bars_are_about_is_told_first(
    systems: Systems, change: dict[str, Any], what: str
) -> None:
    systems["slo@A100-14B:2"] = system(0.9, **change)
    first, *_ = failures(judge(systems, TARGETS, paced=True))
    assert first.startswith(f"slo: {what}")


def test_without_logs_and_without_the_other_system_nothing_is_measured(systems: Systems) -> None:
    alone = {"slo@A100-14B:2": systems["slo@A100-14B:2"]}
    del alone["slo@A100-14B:2"]["changes"], alone["slo@A100-14B:2"]["problems"]
    bars = judge(alone, TARGETS, paced=True)["bars"]
    unknown = {one["what"] for one in bars if one["verdict"] == Judgement.NOT_MEASURED}
    assert unknown == {
        *("merges", "splits", "P99 TTFT"),
        *("longest change of groups [s]", "problems in the logs"),
    }
