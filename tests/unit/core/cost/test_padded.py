"""Cost of padding: prompts of the greatest length and, in static batches, decodes."""

import pytest

from services.core.cost.model import CostModel
from services.core.cost.padded import Execution
from services.core.planner.batch import IterationShape
from tideserve.sim.time_model import CostTimeModel

CHUNKS = [(100, 1), (0, 30), (40, 1), (16, 200)]
MODEL = CostModel(alpha=1e-6, beta=1e-3, gamma=0.02, lam=0.01, kappa=1e-4)


def test_ragged_work_has_no_padding_cost() -> None:
    assert sorted(Execution.RAGGED.chunks(CHUNKS)) == sorted(CHUNKS)


def test_padded_prompts_are_as_long_as_the_longest() -> None:
    assert Execution.PADDED.chunks(CHUNKS) == [(100, 1), (40, 1), (16, 200), (16, 200)]


def test_static_decodes_read_the_longest_context() -> None:
    assert Execution.STATIC.chunks(CHUNKS) == [(100, 1), (100, 1), (16, 200), (16, 200)]


@pytest.mark.parametrize("execution", list(Execution))
def test_equal_lengths_need_no_padding(execution: Execution) -> None:
    assert execution.chunks([(7, 1), (7, 1)]) == [(7, 1), (7, 1)]
    assert execution.chunks([(0, 5), (0, 5)]) == [(0, 5), (0, 5)]
    assert execution.chunks([]) == []


@pytest.mark.parametrize("execution", list(Execution))
def test_a_simulated_iteration_lasts_as_long_as_a_paced_one(execution: Execution) -> None:
    decodes = [prefix for prefix, new in CHUNKS if new == 1]
    shape = IterationShape.of(decodes, [chunk for chunk in CHUNKS if chunk[1] > 1], execution)
    paced_s = MODEL.batch_s(execution.chunks(CHUNKS))
    assert CostTimeModel(MODEL).iteration_s(shape) == pytest.approx(paced_s)
