"""Weights in panels, where the processor has products with them."""

import pytest

from services.worker.engine.model.cpu_kernels.panel_gemm import panel_calls

needs_panel_product = pytest.mark.skipif(
    panel_calls() is None, reason="this processor has no bfloat16 products (avx512_bf16, AMX)"
)
