from pathlib import Path

import pytest
import torch

from services.worker.engine.compute import gpu_needs
from services.worker.errors import DeviceError


def test_a_build_of_torch_without_cuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match=r"torch's build for CUDA \(docs/gpus.md\)"):
        gpu_needs.check_gpu_needs()


def test_a_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpu_needs, "PACKAGES", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match="apt-get install gcc"):
        gpu_needs.check_gpu_needs()
    compiler = tmp_path / "clang"
    compiler.touch(mode=0o755)
    gpu_needs.check_gpu_needs()
