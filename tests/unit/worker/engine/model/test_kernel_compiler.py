"""Compiling kernels where no cache may be written, and which models they fit."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from numba import njit
from numba.core.codegen import get_host_cpu_features

from services.worker.engine.model import cpu_kernels
from services.worker.engine.model.cpu_kernels import compiler
from services.worker.engine.model.cpu_kernels.cache import CACHE_VARIABLE


@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError("cannot cache function: no locator available"),
        OSError(28, "No space left on device"),
    ],
)
def test_kernels_are_compiled_whatever_the_matter_with_the_cache(
    failure: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_cache(*arguments: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise failure
        return njit(*arguments, **options)

    monkeypatch.setattr(compiler, "njit", without_cache)
    double = compiler.compiled("int64(int64)")(lambda number: 2 * number)
    assert double(21) == 42


@pytest.mark.parametrize("length", [0, 10, 100])
@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_broken_files_of_the_cache_are_no_obstacle(
    suffix: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def double(number: int) -> int:
        return 2 * number

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert compiler.compiled("int64(int64)")(double)(21) == 42
    files = list(tmp_path.rglob(f"*.{suffix}"))
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:length])
    assert compiler.compiled("int64(int64)")(double)(21) == 42


@pytest.mark.parametrize(
    ("device", "storage", "compute", "threads", "expected"),
    [
        ("cpu", torch.float32, torch.float32, 1, True),
        ("cpu", torch.bfloat16, torch.float32, 1, True),
        ("cpu", torch.bfloat16, torch.float32, 2, False),
        ("cpu", torch.float16, torch.float32, 1, False),
        ("cpu", torch.float64, torch.float64, 1, False),
        ("cuda", torch.float32, torch.float32, 1, False),
    ],
)
def test_the_kernels_fit_one_thread_that_computes_in_float32(
    device: str,
    storage: torch.dtype,
    compute: torch.dtype,
    threads: int,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert cpu_kernels.fit(torch.device(device), storage, compute) is expected


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ("+avx2,+avx512f,-amx-tile", "+avx2,+avx512f,-amx-tile,-prefer-256-bit"),
        ("+avx2,-avx512f", "+avx2,-avx512f"),
        ("", ""),
    ],
)
def test_vectors_are_as_wide_as_the_processor_has_them(features: str, expected: str) -> None:
    assert compiler.wide_vectors(features) == expected


@pytest.mark.parametrize("missing", ["avx512f", None])
def test_a_processor_of_which_a_hypervisor_hides_instructions_compiles_all_kernels(
    missing: str | None, tmp_path: Path
) -> None:
    """Hidden ones take along what builds on them; None: all are hidden but the oldest."""
    every = get_host_cpu_features()
    features = "" if missing is None else every.replace(f"+{missing}", f"-{missing}")
    done = subprocess.run(
        [sys.executable, "-c", f"import {cpu_kernels.__name__}.layer_range"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            CACHE_VARIABLE: str(tmp_path / "kernels"),
            "NUMBA_CPU_FEATURES": features,
        }
        | ({"NUMBA_CPU_NAME": "generic"} if missing is None else {}),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
