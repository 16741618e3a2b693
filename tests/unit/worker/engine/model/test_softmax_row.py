"""Weights of a row of scores, compared with torch's softmax."""

import numpy as np
import pytest
import torch
from numba import njit

from services.worker.engine.model.cpu_kernels.softmax_row import weigh_row

KEYS = 64


@njit
def weigh(scores, row, begin, end, highest, weights):  # type: ignore[no-untyped-def]
    return weigh_row(scores, row, KEYS, 0, begin, end, highest, np.float32(0.125), weights)


@njit
def weigh_whole(scores, row, highest, weights):  # type: ignore[no-untyped-def]
    return weigh_row(scores, row, KEYS, 1, 0, KEYS, highest, np.float32(0.125), weights)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_whole_row_equals_a_bounded_row(stored: torch.dtype) -> None:
    """Bitwise, so that a row is the same in any tile."""
    scores = 8 * torch.randn(1, KEYS)
    rows = []
    for whole in (False, True):
        weights = torch.zeros(1, KEYS, dtype=stored)
        array = weights.numpy() if stored == torch.float32 else weights.view(torch.uint16).numpy()
        highest = np.float32(9.0)
        if whole:
            result = weigh_whole(scores.numpy(), 0, highest, array)
        else:
            result = weigh(scores.numpy(), 0, 0, KEYS, highest, array)
        rows.append((result, array.tolist()))
    assert rows[0] == rows[1]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("begin", "end"), [(0, 64), (0, 1), (63, 64), (5, 41), (16, 48)])
@pytest.mark.parametrize("highest", [float("-inf"), 40.0])
def test_weights_equal_those_of_softmax(
    stored: torch.dtype, begin: int, end: int, highest: float
) -> None:
    torch.manual_seed(begin + end)
    scores = 8 * torch.randn(3, KEYS)
    weights = torch.full((3, KEYS), 7.0, dtype=stored)
    array = weights.numpy() if stored == torch.float32 else weights.view(torch.uint16).numpy()
    peak, total = weigh(scores.numpy(), 1, begin, end, np.float32(highest), array)
    wanted = torch.zeros(KEYS)
    assert peak == max(highest, scores[1, begin:end].max())
    wanted[begin:end] = ((scores[1, begin:end] - peak) * 0.125).exp()
    assert total == pytest.approx(float(wanted.sum()), rel=1e-5)
    torch.testing.assert_close(weights[1].float(), wanted.to(stored).float(), rtol=8e-3, atol=1e-6)
    if stored == torch.float32:
        torch.testing.assert_close(weights[1], wanted, rtol=1e-5, atol=0)
    assert not weights[1, :begin].any() and not weights[1, end:].any()
    assert (weights[[0, 2]] == 7.0).all()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("highest", [0.0, 5e5, -3e4])
def test_the_smallest_weight_does_not_underflow(stored: torch.dtype, highest: float) -> None:
    """Also relative to a score far from 0, whose products are rounded."""
    scores = torch.tensor([[highest, highest - 1e30] + [highest - 2e5] * (KEYS - 2)])
    weights = torch.full((1, KEYS), 7.0, dtype=stored)
    array = weights.numpy() if stored == torch.float32 else weights.view(torch.uint16).numpy()
    peak, total = weigh(scores.numpy(), 0, 0, KEYS, np.float32(-np.inf), array)
    # One that becomes bfloat16 is less exact there.
    error = 0.0 if stored == torch.float32 else 4e-3 if highest else 1e-5
    assert peak == highest and total == pytest.approx(1.0, rel=error)
    assert float(weights.sum()) == pytest.approx(1.0, rel=max(error, 1e-6))
