"""Paced iterations last as long as the profile predicts, and late ones are counted."""

import pytest

from services.core.cost.model import CostModel
from services.core.cost.padded import Execution
from services.core.planner.batch import Batch, Chunk
from services.worker.engine.compute.pacer import SLICES, Pacer

BATCH = Batch((Chunk("a", 100, (1,), (0,), None), Chunk("b", 0, (1, 2, 3), (1,), None)))
MODEL = CostModel(alpha=0.0, beta=0.1, gamma=0.2, lam=0.2)


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def now_s(self) -> float:
        return self.now

    def sleep(self, duration_s: float) -> None:
        self.now += duration_s


def test_an_iteration_lasts_as_long_as_its_cost() -> None:
    clock = FakeClock()
    pacer = Pacer(MODEL, clock.now_s, clock.sleep)
    clock.now = 0.25
    pacer.pad(BATCH, started_s=0.0)
    assert clock.now == pytest.approx(MODEL.batch_s([(100, 1), (0, 3)])) == pytest.approx(0.6)
    assert (pacer.iterations_total, pacer.paced_late_total) == (1, 0)


def test_a_padded_iteration_lasts_as_long_as_with_prompts_of_the_greatest_length() -> None:
    prompts = Batch((Chunk("a", 0, (1,) * 4, (0,), None), Chunk("b", 0, (1,) * 9, (1,), None)))
    for execution, rows in (
        (Execution.RAGGED, [(0, 4), (0, 9)]),
        (Execution.PADDED, [(0, 9), (0, 9)]),
    ):
        clock = FakeClock()
        Pacer(MODEL, clock.now_s, clock.sleep, execution=execution).pad(prompts, started_s=0.0)
        assert clock.now == pytest.approx(MODEL.batch_s(rows))


def test_late_iterations_are_counted_and_not_padded(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    pacer = Pacer(MODEL, clock.now_s, clock.sleep)
    for _ in range(5):
        started_s = clock.now
        clock.now += 1.0
        pacer.pad(BATCH, started_s)
    assert clock.now == pytest.approx(5.0)
    assert (pacer.iterations_total, pacer.paced_late_total) == (5, 5)
    assert pacer.late_s == pytest.approx(5 * 0.4)
    records = [record for record in caplog.records if "paced_late_total" in record.getMessage()]
    assert len(records) == 3, "once for each doubling: 1, 2, 4"


def test_an_iteration_can_be_interrupted_while_it_is_padded() -> None:
    clock = FakeClock()
    pacer = Pacer(MODEL, clock.now_s, clock.sleep)
    asked = iter(range(SLICES + 1))
    assert not pacer.pad(BATCH, 0.0, interrupted=lambda: next(asked) == 7)
    assert clock.now == pytest.approx(8 * 0.6 / SLICES)
    assert pacer.iterations_total == 0, "it is not over"
    assert pacer.pad(BATCH, 0.0, interrupted=lambda: False)
    assert clock.now == pytest.approx(0.6)
    assert (pacer.iterations_total, pacer.paced_late_total) == (1, 0)
