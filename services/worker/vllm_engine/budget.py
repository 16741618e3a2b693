"""Computes the KV cache size of a worker that runs vLLM: its memory less the parameters."""

from math import prod
from pathlib import Path

from services.common.safetensors_header import DAMAGED, read_header
from services.worker.errors import BudgetTooSmall, ModelError

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
"""Bytes per value, by the worker's `dtype`."""
_FLOATS = frozenset({"BF16", "F16", "F32", "F64"})
"""Types in weight files that are converted to `dtype` on loading; other types are kept."""
_MIB = 1 << 20
LEAST_KV_BYTES = 16 * _MIB


def parameter_bytes(model_dir: Path, dtype: str) -> int:
    """Bytes of the parameters once loaded as `dtype`.

    Raises:
        ModelError: if the folder has no weights, or they cannot be read.
    """
    paths = sorted(model_dir.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{model_dir} has no *.safetensors weights; choose a folder with weights")
    return sum(_bytes_in(path, DTYPE_BYTES[dtype]) for path in paths)


def kv_bytes(memory_bytes: int, parameters: int) -> int:
    """Bytes that remain for KV; raises BudgetTooSmall below `LEAST_KV_BYTES`."""
    remaining = memory_bytes - parameters
    if remaining < LEAST_KV_BYTES:
        raise BudgetTooSmall(
            needed_bytes=parameters + LEAST_KV_BYTES,
            budget_bytes=memory_bytes,
            parameter_bytes=parameters,
            staging_bytes=0,
        )
    return remaining


def _bytes_in(path: Path, float_bytes: int) -> int:
    try:
        return sum(
            prod(entry["shape"]) * float_bytes
            if entry["dtype"] in _FLOATS
            else entry["data_offsets"][1] - entry["data_offsets"][0]
            for entry in read_header(path).tensors.values()
        )
    except DAMAGED as error:
        raise ModelError(f"{path} is not a valid safetensors file; download it again") from error
