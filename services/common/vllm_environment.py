"""The environment of a process of vLLM, the same for a worker's engine and for a benchmark."""

import os
from collections.abc import Mapping
from pathlib import Path

_NOT_INHERITED = frozenset({"PYTHONPATH", "VLLM_CPU_KVCACHE_SPACE"})
"""Our modules would hide vLLM's; that size of the KV cache would win over the one that is given."""


def compiled_folder(python: Path) -> Path:
    """Where compiled kernels are kept: beside the virtual environment that has `python`."""
    environment = python.parent.parent
    return environment.with_name(f"{environment.name}-compiled")


def vllm_environment(
    inherited: Mapping[str, str], python: Path, threads: int, on_cpu: bool = True
) -> dict[str, str]:
    """`inherited`, with what vLLM needs. `python` is that of its virtual environment.

    Compiled kernels are kept, so that later starts take seconds; a folder that cannot be written to
    leaves vLLM its own.
    """
    kept = {name: value for name, value in inherited.items() if name not in _NOT_INHERITED}
    found = {
        **kept,
        "PATH": f"{python.parent}{os.pathsep}{inherited.get('PATH', '')}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Its processes begin anew, so that each can ask the kernel to end with its parent.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    compiled = compiled_folder(python)
    if os.access(compiled if compiled.exists() else compiled.parent, os.W_OK):
        found |= {
            "VLLM_CACHE_ROOT": str(compiled / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(compiled / "torchinductor"),
        }
    if on_cpu:
        found |= {
            # Not as whole compiled models: 0.32.0's CPU build cannot load those and compiles anew.
            "VLLM_USE_AOT_COMPILE": "0",
            # Its engine computes within its own process. By default it has another one do so on a
            # CPU, and polls for the answer: where all cores compute, that stalls the other for up
            # to two seconds. Measured on two cores: throughput of `steady` 14 to 29 % lower, P99
            # TTFT 0.5 to 1.3 s in place of 0.2 to 0.3 s.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": str(threads),
        }
    return found
