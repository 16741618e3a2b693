"""bfloat16 in LLVM: its type, and whether the processor rounds to it and multiplies it."""

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
    """Whether LLVM has the instruction for this processor, in vectors of 16 float32.

    What the processor says of itself is not enough: LLVM takes an instruction away together with
    any that it builds on, and it ends the process where it must compile one that it lacks. So the
    rounding that belongs to the same extension is compiled, which it can always do.
    """
    return any("vcvtneps2bf16" in line and "zmm" in line for line in assembly(_ROUNDED))


class BFloat16(ir.Type):
    """The type of LLVM that llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash(BFloat16)
