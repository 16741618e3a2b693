"""Skips tests of panel weights on processors without their products."""

import pytest
import torch

from services.worker.engine.model.cpu_kernels.panel_gemm import panel_calls


def _needed(dtype: torch.dtype) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        panel_calls(dtype) is None, reason=f"this processor has no products in {dtype} for panels"
    )


needs_panel_product = _needed(torch.bfloat16)
needs_vectors = _needed(torch.float32)
PANEL_DTYPES = [
    pytest.param(torch.float32, marks=needs_vectors),
    pytest.param(torch.bfloat16, marks=needs_panel_product),
]
