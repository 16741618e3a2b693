"""`planning`: every scheduling plans the same load, and the bars are judged."""

import pytest

from tideserve.bench.scenarios.planning import MODEL_7B, SEQUENCES, SYSTEMS, judge, measure

FIGURES = {"planning_s": 1e-3, "iteration_s": 0.05, "sequences": 256.0, "iterations": 20.0}


def figures(**shares: float) -> dict[str, dict[str, float]]:
    return {name: FIGURES | {"share": share} for name, share in shares.items()}


def test_all_systems_plan_many_sequences() -> None:
    found = measure(1)
    assert list(found) == list(SYSTEMS)
    for name, one in found.items():
        assert one["iterations"] > 0 and one["planning_s"] > 0, name
        assert one["share"] == pytest.approx(one["planning_s"] / one["iteration_s"], rel=0.2)
    for name in ("fcfs", "priority", "slo"):
        assert found[name]["sequences"] == SEQUENCES
    assert found["slo, targets that bind"]["sequences"] < SEQUENCES


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
