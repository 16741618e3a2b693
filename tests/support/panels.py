"""Weights in panels, where the processor has products with them."""

import pytest

from services.worker.engine.model.cpu_kernels.panel_gemm import product_address

needs_panel_product = pytest.mark.skipif(
    product_address() is None, reason="this processor has no bfloat16 products (avx512_bf16, AMX)"
)
