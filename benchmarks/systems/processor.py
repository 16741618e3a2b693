"""The processor of this machine, and its fastest dtype for serving."""

import platform
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16_PRODUCTS = ("avx512_bf16", "amx_bf16", "bf16")
"""Flags of processors that multiply bfloat16; the last flag is Arm's."""
REPORTED_FLAGS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "sve", "bf16"),
)
"""Flags that determine the speed of matrix products."""

READ_BYTES = 128 << 20
"""More than the caches hold."""
READS = 3
GPUS_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Processor:
    """The name of a processor, and its flags that are in `REPORTED_FLAGS`, in that order."""

    name: str
    flags: tuple[str, ...]


def read_processor(path: Path = CPUINFO) -> Processor:
    """The first processor in /proc/cpuinfo; without that file, only the machine type."""
    entries: dict[str, str] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            entries.setdefault(key.strip(), value.strip())
    except OSError:
        entries = {}
    name = entries.get("model name") or platform.processor() or platform.machine()
    flags = (entries.get("flags") or entries.get("Features") or "").split()
    return Processor(name, tuple(flag for flag in REPORTED_FLAGS if flag in flags))


def read_gpus() -> list[str]:
    """Name and driver of each NVIDIA GPU from nvidia-smi; empty without it."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=GPUS_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return completed.stdout.splitlines()


def fastest_dtype(flags: Collection[str]) -> str:
    """bfloat16 if the processor multiplies it, else float32: emulation is slower with many rows.

    The rule is the same for every system, so that no trial is needed. `steady` also measures
    float32 and compares in that dtype where it is faster.
    """
    return "bfloat16" if any(flag in flags for flag in BFLOAT16_PRODUCTS) else "float32"


def read_bytes_per_s() -> float:
    """Memory read bandwidth of a core, the best of a few tries."""
    values = np.ones(READ_BYTES // 4, np.float32)
    times_s = []
    for _ in range(READS):
        began_s = time.perf_counter()
        values.max()
        times_s.append(time.perf_counter() - began_s)
    return READ_BYTES / min(times_s)
