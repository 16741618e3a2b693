"""Tokens drawn by torch's operations are those that the host draws."""

import numpy as np
import pytest
import torch

from services.worker.engine.model.cpu_kernels.candidates import Scratch
from services.worker.engine.model.cpu_kernels.token_choice import DrawTerms, TokenChooser
from services.worker.engine.sampling.device_draw import DRAW_ROWS, draw_on_device
from tests.support.device import DEVICE

VOCAB, ROWS = 700, 2 * DRAW_ROWS + 5


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_those_of_the_host(seed: int) -> None:
    """In float64, in which both add up; rows have ties, and tokens that are forbidden."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (ROWS, VOCAB)).round(1)
    logits[rng.random((ROWS, VOCAB)) < 0.2] = -np.inf
    terms = [
        DrawTerms(
            float(rng.choice([0.0, 0.2, 1.0, 3.0])),
            int(rng.choice([-1, 0, 1, 5, 50, VOCAB + 1])),
            float(rng.choice([0.01, 0.3, 0.9, 1.0])),
            float(rng.choice([0.0, 0.05, 0.5])),
        )
        for _ in range(ROWS)
    ]
    numbers = rng.random(ROWS)
    wanted, _ = TokenChooser(Scratch.of(VOCAB, "float64"))(logits.copy(), terms, numbers)
    there = torch.from_numpy(logits).to(DEVICE)
    assert draw_on_device(there, range(ROWS), terms, numbers) == wanted
    some = [30, 2, 7]
    chosen = [terms[row] for row in some]
    found = draw_on_device(there, some, chosen, numbers[some])
    assert found == [wanted[row] for row in some]


def test_a_row_without_numbers_is_taken_greedily() -> None:
    logits = torch.zeros(2, 10, device=DEVICE)
    logits[0, 4] = torch.inf
    logits[1] = -torch.inf
    terms = [DrawTerms(1.0, 0, 1.0, 0.0), DrawTerms(1.0, 3, 0.5, 0.0)]
    assert draw_on_device(logits, (0, 1), terms, np.array([0.9, 0.9])) == [4, 0]
