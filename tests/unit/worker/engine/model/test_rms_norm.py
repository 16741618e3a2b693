"""The compiled norm against the definition."""

import pytest
import torch

from services.worker.engine.model.cpu_kernels.rms_norm import RmsNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 7), (1, 14, 576), (3, 16)])
def test_rms_norm_divides_by_the_root_mean_square(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight = torch.randn(shape[-1]).to(dtype)
    hidden = 100 * torch.randn(shape)
    mean_square = hidden.double().pow(2).mean(-1, keepdim=True)
    expected = hidden.double() * (mean_square + 1e-5).rsqrt() * weight.double()
    actual = RmsNorm(weight, 1e-5)(hidden)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_need_not_be_contiguous() -> None:
    hidden = torch.randn(6, 2, 16).transpose(0, 1)
    norm = RmsNorm(torch.ones(16), 1e-6)
    assert torch.equal(norm(hidden), norm(hidden.contiguous()))
