"""Compiling kernels where no cache may be written, and which models they fit."""

from typing import Any

import pytest
import torch
from numba import njit

from services.worker.model import cpu_kernels
from services.worker.model.cpu_kernels import compiler


def test_without_a_folder_for_the_cache_kernels_are_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read_only(*arguments: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(*arguments, **options)

    monkeypatch.setattr(compiler, "njit", read_only)
    double = compiler.compiled("int64(int64)")(lambda number: 2 * number)
    assert double(21) == 42


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
