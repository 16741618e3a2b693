"""Prediction errors of a worker, from the entries of its log."""

from typing import Any, NamedTuple

import pytest

from services.core.audit.record import BATCH, EVENT
from services.core.cost.model import CostModel
from services.core.planner.batch import Batch, Chunk, Microbatch
from services.core.planner.events import CostModelLearned, IterationFinished, Planned
from tideserve.sim.prediction import predicted_iterations

MODEL = CostModel(alpha=0.0, beta=1.0, gamma=2.0, lam=2.0)


class Entry(NamedTuple):
    kind: str
    value: Any


def planned(now_s: float, tokens: int) -> Entry:
    if not tokens:
        return Entry(BATCH, Planned(now_s, None))
    chunk = Chunk("a", 0, (1,) * tokens, (0,), None)
    return Entry(BATCH, Planned(now_s, Microbatch(1, Batch((chunk,)))))


def finished(now_s: float) -> Entry:
    return Entry(EVENT, IterationFinished(now_s, {}))


def test_the_work_between_iterations_counts_but_idle_time_does_not() -> None:
    entries = [
        *(planned(10.0, 4), finished(18.0)),  # 6 s predicted, 8 s measured
        *(planned(19.0, 4), finished(24.0)),  # begun at 18
        *(planned(24.0, 0), planned(100.0, 4), finished(106.0)),
        Entry(EVENT, CostModelLearned(MODEL.slowed(2))),
        *(planned(106.0, 4), finished(112.0)),
    ]
    ran = list(predicted_iterations(MODEL, entries))
    assert [iteration.measured_s for iteration in ran] == [8.0, 6.0, 6.0, 6.0]
    assert [iteration.models for iteration in ran] == [0, 0, 0, 1]
    assert [iteration.error for iteration in ran] == pytest.approx([0.25, 0.0, 0.0, 1.0])
    assert list(predicted_iterations(None, entries[:4])) == []
