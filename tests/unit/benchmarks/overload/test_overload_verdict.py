"""Figures of `overload` that miss a goal."""

from typing import Any

import pytest

from benchmarks.overload.verdict import problems_of, rows_of, worst_recovery_s
from benchmarks.stats import Figures

GOOD: Figures = {
    "in_time_tokens_s": 800.0,
    "tokens_s": 1000.0,
    "refusal_s": {"p99": 0.1},
    "obeying_due": 20,
    "obeying_served": 10,
    "refused_with_room": 0,
    "interactive_in_time_share": 0.9,
    "recovery_s": 10.0,
    "gateway_growth": 1.25,
    "failed": 0,
    "client_lag_s": {"p99": 0.1},
    "iterations_over_paced": 1.1,
    "classes": {"batch": {"tokens_s": 50.0}},
}
LOADS = {"2": GOOD, "10": GOOD | {"in_time_tokens_s": 600.0}}


def problems(
    loads: dict[str, Figures] = LOADS,
    mixed: Figures = GOOD,
    todays: float = 600.0,
    fcfs: float | None = None,
) -> list[str]:
    """Problems with a capacity of 1,000 tokens a second."""
    others = {factor: GOOD | {"in_time_tokens_s": todays} for factor in loads}
    systems = {"tideserve": loads, "todays-rules": others}
    if fcfs is not None:
        systems["fcfs"] = {"10": GOOD | {"in_time_tokens_s": fcfs}}
    return problems_of(1000.0, systems, {"slo": mixed})


def test_a_run_within_all_goals_has_no_problem() -> None:
    assert problems() == []
    assert worst_recovery_s(LOADS) == 10.0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"in_time_tokens_s": 599.0}, "10 ×: tokens in time are 60% of capacity, under 60%"),
        ({"refusal_s": {"p99": 0.6}}, "P99 of refusals is 0.60 s, over 0.5 s"),
        ({"refused_with_room": 1}, "1 requests were refused although a group had room"),
        ({"obeying_due": 9}, "only 29 returns after Retry-After were due"),
        ({"obeying_served": 9}, "19 of 40 returns after Retry-After were served in time"),
        ({"recovery_s": None}, "the recovery took –, not 10 s"),
        ({"recovery_s": 10.1}, "the recovery took 10.1 s, not 10 s"),
        ({"failed": 1}, "tideserve/10: 1 requests failed"),
        ({"client_lag_s": {"p99": 0.2}}, "P99 of the load generator's lag is 0.20 s"),
        ({"iterations_over_paced": 1.2}, "tideserve/10: iterations took 1.20 × their paced time"),
    ],
)
def test_each_missed_goal_of_a_load_is_a_problem(changes: dict[str, Any], text: str) -> None:
    missed = problems({**LOADS, "10": LOADS["10"] | changes})
    assert len(missed) == 1 and text in missed[0]


def test_tokens_in_time_are_compared_with_the_better_of_the_former_systems() -> None:
    assert problems(todays=618.0) == []
    assert problems(todays=619.0) == ["10 ×: tokens in time are under 0.97 × those of todays-rules"]
    assert problems(fcfs=618.0) == []
    assert problems(fcfs=619.0) == ["10 ×: tokens in time are under 0.97 × those of fcfs"]
    assert problems(todays=650.0, fcfs=640.0)[0].endswith("todays-rules")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"interactive_in_time_share": 0.89}, "89% of interactive requests are in time, under 90%"),
        ({"gateway_growth": 1.3}, "the gateway's memory grew to 1.30 ×, over 1.25 ×"),
        ({"tokens_s": 900.0}, "6% of the tokens are batch work, over 5%"),
    ],
)
def test_each_missed_goal_of_the_mixed_load_is_a_problem(
    changes: dict[str, Any], text: str
) -> None:
    missed = problems(mixed=GOOD | changes)
    assert missed == [f"mixed, slo: {text}"]


def test_the_table_has_a_row_per_system_and_load() -> None:
    rows = dict(rows_of(1000.0, {"tideserve": LOADS}, {"slo": GOOD}))
    assert list(rows) == ["capacity", "tideserve, 2 ×", "tideserve, 10 ×", "slo, mixed"]
    assert rows["tideserve, 10 ×"].startswith("in time 60% of capacity, interactive 90%,")
