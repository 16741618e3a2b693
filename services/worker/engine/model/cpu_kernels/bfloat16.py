"""bfloat16 in LLVM: its type, and detection of the CPU instructions that round and multiply it."""

from functools import cache

from llvmlite import ir

from services.worker.engine.model.cpu_kernels.compiler import VECTOR_FLOATS, assembly

_LANES = VECTOR_FLOATS

_ROUNDED = f"""
define <{_LANES} x bfloat> @rounded(<{_LANES} x float> %sums) {{
  %pairs = fptrunc <{_LANES} x float> %sums to <{_LANES} x bfloat>
  ret <{_LANES} x bfloat> %pairs
}}
"""


@cache
def has_pair_products() -> bool:
    """Whether LLVM can emit avx512_bf16 instructions for this CPU, in 512-bit vectors."""
    # The CPU's feature flags do not suffice: LLVM disables an extension if an extension that it
    # depends on is missing, and aborts the process if it must emit a disabled instruction. Rounding
    # belongs to the same extension and always compiles, so check which instruction LLVM emits.
    return any("vcvtneps2bf16" in line and "zmm" in line for line in assembly(_ROUNDED))


class BFloat16(ir.Type):
    """LLVM's bfloat type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash(BFloat16)
