"""Measured and predicted iteration times."""

from services.core.cost.iteration_time import IterationMeter, IterationTime
from services.core.cost.model import CostModel

MODEL = CostModel(alpha=0.0, beta=1.0, gamma=2.0, lam=1.0)


def test_phases_are_counted_separately() -> None:
    meter = IterationMeter(MODEL)
    meter.add(((10, 1), (20, 1)), 7.0, share=1.0)
    meter.add(((10, 1), (0, 4)), 10.0, share=1.0)
    assert meter.add(((0, 4),), 4.5, share=0.5) == 3.0
    assert meter.total == IterationTime(
        prefill_s=14.5, prefill_predicted_s=8.0 + 3.0, decode_s=7.0, decode_predicted_s=5.0
    )


def test_no_comparison_exists_without_a_cost_model() -> None:
    meter = IterationMeter(None)
    assert meter.add(((0, 4),), 1.0, share=1.0) == 0.0
    assert meter.total == IterationTime()
    assert meter.slowest_s == 1.0, "that is known without one"
    meter.add(((4, 1),), 0.5, share=1.0)
    assert 0.5 < meter.slowest_s < 1.0
