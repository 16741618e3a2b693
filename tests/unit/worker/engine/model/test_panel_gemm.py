"""Products with weights in panels."""

import math

import numpy as np
import pytest
import torch

from services.worker.engine.memory.panels import panels_of
from services.worker.engine.model.cpu_kernels import panel_gemm
from services.worker.engine.model.cpu_kernels.compiler import stored_array
from services.worker.engine.model.cpu_kernels.panel_gemm import PanelProduct, narrow_rows
from tests.support.panels import PANEL_DTYPES, needs_panel_product


def product_of(weight: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> PanelProduct:
    return PanelProduct(panels_of(weight.to(dtype)).contiguous())


def test_rows_are_rounded_as_torch_rounds() -> None:
    numbers = torch.randn(4, 1000) * torch.logspace(-38, 38, 1000)
    ties = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, math.inf, -math.inf, 0.0, -0.0])
    numbers[0, :8] = ties
    rounded = np.empty(numbers.shape, np.uint16)
    narrow_rows(numbers.numpy(), rounded)
    assert np.array_equal(rounded, stored_array(numbers.bfloat16()))
    broken = np.full((1, 1), np.nan, np.float32)
    broken.view(np.uint32)[0, 0] |= 0xFFFF
    narrow_rows(broken, rounded[:1, :1])
    assert torch.from_numpy(rounded[:1, :1].copy()).view(torch.bfloat16).isnan().all()


@pytest.mark.parametrize("dtype", PANEL_DTYPES)
@pytest.mark.parametrize("row_count", [1, 5, 63, 64, 65, 200])
@pytest.mark.parametrize("shape", [(64, 2), (192, 30), (128, 576)])
def test_a_product_is_exact_where_numbers_are(
    shape: tuple[int, int], row_count: int, dtype: torch.dtype
) -> None:
    weight = torch.randint(-8, 8, shape).float()
    rows = torch.randint(-8, 8, (row_count, shape[1])).float()
    assert torch.equal(product_of(weight, dtype)(rows), rows @ weight.t())


@pytest.mark.parametrize("dtype", PANEL_DTYPES)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    product, rows = product_of(torch.randn(128, 576), dtype), torch.randn(150, 576)
    together = product(rows)
    for first, last in ((0, 1), (3, 20), (63, 65), (10, 139), (5, 9), (7, 13)):
        assert torch.equal(product(rows[first:last]), together[first:last])


@needs_panel_product
def test_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit panels"):
        product_of(torch.randn(64, 8))(torch.randn(1, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "features", ["+avx2,+fma", "+avx512f,+avx512bw", "+avx512bf16,-avx512f", ""]
)
def test_a_processor_without_the_instructions_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, features: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(panel_gemm, "processor_features", lambda: set(features.split(",")))
    assert panel_gemm.panel_calls.__wrapped__(dtype) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_have_no_product(dtype: torch.dtype) -> None:
    assert panel_gemm.panel_calls(dtype) is None


@pytest.mark.parametrize("dtype", PANEL_DTYPES)
def test_another_torch_and_a_wrong_product_are_not_used(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    find = panel_gemm.panel_calls.__wrapped__
    assert find(dtype) is not None
    with monkeypatch.context() as patch:
        patch.setitem(panel_gemm._PRODUCTS, dtype, "no_such_symbol")
        assert find(dtype) is None
    monkeypatch.setattr(PanelProduct, "__call__", lambda _self, rows: rows @ rows.t())
    assert find(dtype) is None
