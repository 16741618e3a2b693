"""The kernel for few rows against the matrix library."""

import pytest
import torch

from services.worker.engine.model.cpu_kernels.skinny_gemm import SkinnyProduct

SHAPES = [(1, 8), (3, 100), (4, 16), (10, 7), (64, 576), (33, 1536)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 64])
def test_skinny_gemm_equals_the_matrix_product(
    rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = torch.randn(shape).to(dtype)
    inputs = torch.randn(rows, shape[1])
    expected = inputs.double() @ weight.double().t()
    torch.testing.assert_close(
        SkinnyProduct(weight)(inputs).double(), expected, rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    product = SkinnyProduct(torch.randn(50, 576).to(dtype))
    rows = torch.randn(32, 576)
    together = product(rows)
    for index in range(len(rows)):
        assert torch.equal(product(rows[index : index + 1])[0], together[index])
        assert torch.equal(product(rows[index:])[0], together[index])


def test_the_weight_is_not_copied() -> None:
    weight = torch.zeros(8, 16)
    product = SkinnyProduct(weight)
    weight += 1
    assert torch.equal(product(torch.ones(1, 16)), torch.full((1, 8), 16.0))


def test_mismatched_rows_are_refused_and_no_rows_are_allowed() -> None:
    product = SkinnyProduct(torch.ones(8, 16))
    with pytest.raises(ValueError, match="do not match"):
        product(torch.ones(2, 17))
    assert product(torch.ones(0, 16)).shape == (0, 8)


def test_non_finite_values_propagate() -> None:
    weight = torch.ones(4, 16)
    rows = torch.ones(2, 16)
    rows[0, 3], rows[1, 5] = torch.nan, torch.inf
    output = SkinnyProduct(weight)(rows)
    assert output[0].isnan().all() and output[1].isposinf().all()
