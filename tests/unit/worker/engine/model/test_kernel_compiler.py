"""Compiling kernels without a writable cache, and the models that they support."""

import os
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numba.core.caching import FunctionCache
from numba.core.codegen import get_host_cpu_features

from services.worker.engine.model import cpu_kernels
from services.worker.engine.model.cpu_kernels import compiler
from services.worker.engine.model.cpu_kernels.compiler import CACHE_VARIABLE
from tests.support.python import run_python


@pytest.mark.parametrize("step", ["__init__", "load_overload", "save_overload"])
@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError("cannot cache function: no locator available"),
        OSError(28, "No space left on device"),
    ],
)
def test_kernels_are_compiled_despite_cache_errors(
    step: str,
    failure: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: Any) -> None:
        raise failure

    monkeypatch.setattr(FunctionCache, step, failing)
    double = compiler.compiled("int64(int64)")(lambda number: 2 * number)
    assert double(21) == 42


@pytest.mark.parametrize("length", [0, 10, 100])
@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_damaged_cache_files_are_replaced(
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
def test_kernels_support_a_single_float32_thread(
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
def test_vector_width_follows_the_processor(features: str, expected: str) -> None:
    assert compiler.wide_vectors(features) == expected


def environment(folder: Path, **variables: str) -> dict[str, str]:
    own = {"PYTHONPATH": os.pathsep.join(sys.path), CACHE_VARIABLE: str(folder / "kernels")}
    return {**os.environ, **own, **variables}


@pytest.mark.parametrize("missing", ["avx512f", None])
def test_a_processor_of_which_a_hypervisor_hides_instructions_compiles_all_kernels(
    missing: str | None, tmp_path: Path
) -> None:
    """Hidden instructions hide their extensions; None: only the oldest are visible."""
    every = get_host_cpu_features()
    features = "" if missing is None else every.replace(f"+{missing}", f"-{missing}")
    names = {"NUMBA_CPU_NAME": "generic"} if missing is None else {}
    env = environment(tmp_path, NUMBA_CPU_FEATURES=features, **names)
    done = run_python("-m", cpu_kernels.__name__, "layer_range", env=env)
    assert done.returncode == 0, done.stderr


PROGRAM = """
import torch
from services.worker.engine.model.cpu_kernels.rms_norm import RmsNorm, norm_scale, normalize

weight, hidden = torch.full((8,), 2.0, dtype=torch.bfloat16), torch.full((1, 8), 3.0)
assert torch.allclose(RmsNorm(weight, 0.0)(hidden), torch.full((1, 8), 2.0))
print(normalize.signatures, len(norm_scale.signatures))
"""


def test_kernels_are_loaded_for_the_model_dtype_with_their_callees(
    tmp_path: Path,
) -> None:
    # Generic, so that nothing comes from beside the sources.
    env = environment(tmp_path, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")

    def found() -> str:
        done = run_python("-c", PROGRAM, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    compiled, loaded = found(), found()
    assert compiled.count("uint16") == 1
    assert compiled.endswith(" 1"), "the kernel that it calls is compiled with it"
    assert loaded == compiled[:-1] + "0", "it has the kernel that it calls in it"


def test_a_call_from_python_finds_any_declared_dtype() -> None:
    def total(values: Any) -> Any:
        return values[0] + values[1]

    kernel = compiler.compiled("int64(STORED[::1])")(total)
    kernel.load(torch.bfloat16)
    assert [str(signature) for (signature,) in kernel.signatures] == ["array(uint16, 1d, C)"]
    assert kernel(np.array([1, 2], np.float32)) == 3
    with pytest.raises(TypeError, match="No matching definition"):
        kernel(np.array([1, 2], np.int8))
