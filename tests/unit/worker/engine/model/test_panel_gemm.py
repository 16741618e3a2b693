"""Products with weights in panels."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.engine.memory.panels import panels_of
from services.worker.engine.model.cpu_kernels import panel_gemm
from services.worker.engine.model.cpu_kernels.compiler import (
    VECTOR_FLOATS,
    WIDE_FLOATS,
    stored_array,
)
from services.worker.engine.model.cpu_kernels.panel_gemm import PanelProduct, narrow_rows
from services.worker.engine.model.cpu_kernels.vector_product import multiply
from tests.support.panels import PANEL_DTYPES, needs_panel_product, needs_vectors

BY_VECTORS = np.zeros(2, np.int64)
PRODUCTS = [
    *(pytest.param(*dtype.values, None, marks=dtype.marks) for dtype in PANEL_DTYPES),
    pytest.param(torch.bfloat16, BY_VECTORS, marks=needs_vectors),
]
"""A dtype, and what computes it: what this processor has, or vectors."""


def product_of(
    weight: torch.Tensor, dtype: torch.dtype = torch.bfloat16, calls: np.ndarray | None = None
) -> PanelProduct:
    return PanelProduct(panels_of(weight.to(dtype)).contiguous(), calls)


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


@pytest.mark.parametrize(("dtype", "calls"), PRODUCTS)
@pytest.mark.parametrize("row_count", [1, 2, 3, 4, 5, 6, 7, 63, 64, 65, 600])
@pytest.mark.parametrize("shape", [(64, 2), (192, 30), (128, 576), (64, 2050)])
def test_a_product_is_exact_where_numbers_are(
    shape: tuple[int, int], row_count: int, dtype: torch.dtype, calls: np.ndarray | None
) -> None:
    weight = torch.randint(-8, 8, shape).float()
    rows = torch.randint(-8, 8, (row_count, shape[1])).float()
    assert torch.equal(product_of(weight, dtype, calls)(rows), rows @ weight.t())


@pytest.mark.parametrize(("dtype", "calls"), PRODUCTS)
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype, calls: np.ndarray | None) -> None:
    product, rows = product_of(torch.randn(128, 576), dtype, calls), torch.randn(150, 576)
    together = product(rows)
    for first, last in ((0, 1), (3, 20), (63, 65), (10, 139), (5, 9), (7, 13)):
        assert torch.equal(product(rows[first:last]), together[first:last])


@needs_panel_product
def test_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="do not match panels"):
        product_of(torch.randn(64, 8))(torch.randn(1, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", ["+avx2", "+avx512f,+avx512bw", "+fma", ""])
def test_panels_are_disabled_on_unsupported_processors(
    monkeypatch: pytest.MonkeyPatch, features: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(panel_gemm, "processor_features", lambda: set(features.split(",")))
    assert panel_gemm.panel_calls.__wrapped__(dtype) is None


@needs_vectors
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", ["+avx2,+fma", "+avx2,+fma,+avx512bf16,-avx512f"])
def test_vectors_multiply_where_torch_has_no_product(
    monkeypatch: pytest.MonkeyPatch, features: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(panel_gemm, "processor_features", lambda: set(features.split(",")))
    calls = panel_gemm.panel_calls.__wrapped__(dtype)
    assert calls is not None
    assert not calls.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_have_no_product(dtype: torch.dtype) -> None:
    assert panel_gemm.panel_calls(dtype) is None


@needs_vectors
def test_panels_are_disabled_for_an_untested_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panel_gemm, "_matrix_instructions", lambda: ["amx_bf16"])
    assert panel_gemm._torch_calls() is not None
    monkeypatch.setattr(panel_gemm, "_PRODUCT", "no_such_symbol")
    assert panel_gemm._torch_calls() is None


@needs_vectors
def test_vectors_multiply_where_torch_s_product_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panel_gemm, "_torch_calls", lambda: np.ones(2, np.int64))
    monkeypatch.setattr(panel_gemm, "_is_correct", lambda calls, _dtype: not calls.any())
    calls = panel_gemm.panel_calls.__wrapped__(torch.bfloat16)
    assert calls is not None
    assert not calls.any()


@pytest.mark.parametrize(("dtype", "calls"), PRODUCTS)
@pytest.mark.parametrize("inputs", [576, 2050])
def test_a_product_of_no_rows_is_empty(
    inputs: int, dtype: torch.dtype, calls: np.ndarray | None
) -> None:
    product = product_of(torch.randn(64, inputs), dtype, calls)
    assert product(torch.randn(0, inputs)).shape == (0, 64)


_PRODUCTS_BY_VECTORS = """
import sys
import torch
from services.worker.engine.memory.panels import panels_of
from services.worker.engine.model.cpu_kernels.compiler import VECTOR_FLOATS
from services.worker.engine.model.cpu_kernels.panel_gemm import PanelProduct, panel_calls
assert VECTOR_FLOATS == int(sys.argv[1])
for dtype in (torch.float32, torch.bfloat16):
    assert not panel_calls(dtype).any()
    weight = torch.randint(-8, 8, (128, 300)).float()
    product = PanelProduct(panels_of(weight.to(dtype)).contiguous())
    for count in (1, 2, 3, 6, 64, 70):
        rows = torch.randint(-8, 8, (count, 300)).float()
        assert torch.equal(product(rows), rows @ weight.t()), (dtype, count)
print("right")
"""


AVX2 = "+avx2,+fma,+f16c,+bmi,+bmi2"
needs_wide_vectors = pytest.mark.skipif(
    VECTOR_FLOATS < WIDE_FLOATS, reason="this processor has no vectors of 512 bits"
)


@needs_vectors
@pytest.mark.parametrize(
    ("processor", "features", "vector_floats"),
    [
        ("haswell", AVX2, 8),
        pytest.param(
            *("skylake-avx512", f"{AVX2},+avx512f,+avx512bw,+avx512dq,+avx512vl", 16),
            marks=needs_wide_vectors,
        ),
    ],
)
def test_products_are_right_on_processors_without_products_of_bfloat16(
    processor: str, features: str, vector_floats: int, tmp_path: Path
) -> None:
    environment = os.environ | {
        "NUMBA_CPU_NAME": processor,
        "NUMBA_CPU_FEATURES": features,
        "TIDESERVE_KERNEL_CACHE": str(tmp_path / "kernels"),
    }
    run = [sys.executable, "-c", _PRODUCTS_BY_VECTORS, str(vector_floats)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


@pytest.mark.parametrize("dtype", PANEL_DTYPES)
def test_a_wrong_product_is_not_used(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    find = panel_gemm.panel_calls.__wrapped__
    assert find(dtype) is not None
    monkeypatch.setattr(PanelProduct, "__call__", lambda _self, rows: rows @ rows.t())
    assert find(dtype) is None


@needs_vectors
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("add", [0, 1])
@pytest.mark.parametrize("depth", [4, 64, 200])
@pytest.mark.parametrize("columns", [1, 16, 24, 50, 64])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 20])
def test_vectors_write_only_the_columns_of_the_product(
    rows: int, columns: int, depth: int, add: int, dtype: torch.dtype
) -> None:
    """Within a wider matrix, at an offset and with a row stride."""
    generator = torch.Generator().manual_seed(rows * columns + depth)
    left = torch.randint(-8, 8, (rows, depth + 6), generator=generator).float()
    right = torch.randint(-8, 8, (64, depth), generator=generator).float()
    buffer = torch.randint(-8, 8, (rows + 2, columns + 5), generator=generator).float()
    wanted = buffer.clone()
    product = left[:, 3 : 3 + depth] @ right[:columns].t()
    wanted[1 : 1 + rows, 2 : 2 + columns] = product + add * wanted[1 : 1 + rows, 2 : 2 + columns]
    panel = stored_array(panels_of(right.to(dtype)).contiguous())
    begin, end = panel.ctypes.data, panel.ctypes.data + panel.nbytes
    multiply(
        *(rows, columns, depth, depth + 6, columns + 5, add),
        *(stored_array(left.to(dtype).flatten()), 3, begin, end),
        *(buffer.view(-1).numpy(), columns + 5 + 2),
    )
    assert torch.equal(buffer, wanted)
