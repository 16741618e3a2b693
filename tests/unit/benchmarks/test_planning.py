"""`planning`: every scheduling plans the same load, and the bars are judged."""

import pytest

from benchmarks.scenarios.planning import (
    FEW,
    MAX_BATCH_TOKENS,
    MODEL_7B,
    SEQUENCES,
    SYSTEMS,
    judge,
    measure,
    rows,
)
from services.core.planner.budget import Spent
from services.core.planner.filler import FILLER_TOKENS_MIN
from services.core.planner.packing import Spare
from services.core.planner.sequence import Sequence

FIGURES = {
    "planning_s": 1e-3,
    "iteration_s": 0.05,
    "sequences": 256.0,
    "prompt_tokens": 0.0,
    "iterations": 20.0,
}


def figures(**shares: float) -> dict[str, dict[str, float]]:
    return {name: FIGURES | {"share": share} for name, share in shares.items()}


def test_all_systems_plan_many_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[Sequence | None] = []
    give = Spare.give

    def counted(self: Spare, spent: Spent) -> Sequence | None:
        turns.append(give(self, spent))
        return turns[-1]

    monkeypatch.setattr(Spare, "give", counted)
    found = measure(1)
    assert any(turns), "the parts of BROS are at work"
    assert list(found) == [*SYSTEMS, *FEW]
    assert [found[name]["sequences"] for name in FEW] == [1, 16, 64]
    for name, one in found.items():
        assert one["iterations"] > 0 and one["planning_s"] > 0, name
        assert one["share"] == pytest.approx(one["planning_s"] / one["iteration_s"], rel=0.2)
    for name in ("fcfs", "priority", "slo"):
        assert found[name]["sequences"] == SEQUENCES and not found[name]["prompt_tokens"]
    assert found["slo, targets that bind"]["sequences"] < SEQUENCES
    filled = found["slo, filled with batch prompts"]
    assert FILLER_TOKENS_MIN <= filled["prompt_tokens"] < MAX_BATCH_TOKENS - filled["sequences"]
    assert filled["sequences"] > SEQUENCES / 2
    assert found["slo, parts of BROS"]["sequences"] > SEQUENCES / 2


def test_the_tokens_of_prompts_are_told_where_there_are_some() -> None:
    found = figures(fcfs=0.01, filled=0.01)
    found["filled"]["prompt_tokens"] = 120.0
    told = dict(rows(found))
    assert "256 sequences and 120 tokens of prompts: 1.00%" in told["filled"]
    assert "prompts" not in told["fcfs"]


def test_the_model_is_as_large_as_it_says() -> None:
    """A decode of one sequence reads 6.6e9 parameters of two bytes."""
    loaded_s = MODEL_7B.batch_s([(0, 1)]) - 0.002
    assert loaded_s == pytest.approx(2 * 6.6e9 / (0.8 * 1.555e12), rel=0.01)


def test_bars() -> None:
    assert not judge(figures(fcfs=0.03, slo=0.0399)).problems
    (added,) = judge(figures(fcfs=0.01, slo=0.021)).problems
    assert added == "slo adds 1.10 points of an iteration to planning; at most 1 is right"
    (much,) = judge(figures(fcfs=0.035, slo=0.041)).problems
    assert much == "slo plans for 4.1% of an iteration"
    assert not judge(figures(fcfs=0.05)).problems, "nothing was added"
