from pathlib import Path

import pytest
import torch

from services.worker.engine.compute.gpu_needs import COMPILERS, check_gpu_needs
from services.worker.errors import DeviceError
from tests.support.device import ON_GPU

if ON_GPU:
    pytest.skip("a machine with all that is needed", allow_module_level=True)


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A build for CUDA with two GPUs; returns the folder of its compiler."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("services.worker.engine.compute.gpu_needs.PACKAGES", ())
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / COMPILERS[-1]).touch(mode=0o755)
    return tmp_path


def gpu_error(device: str = "cuda") -> str:
    with pytest.raises(DeviceError) as caught:
        check_gpu_needs(torch.device(device))
    return str(caught.value)


def test_a_torch_build_without_cuda_is_reported() -> None:
    assert "`make clean`, then `make serve` without TORCH_INDEX; docs/gpus.md" in gpu_error()


def test_a_missing_compiler_is_reported(cuda_build: Path) -> None:
    check_gpu_needs(torch.device("cuda"))
    (cuda_build / COMPILERS[-1]).unlink()
    assert "apt-get install gcc" in gpu_error()


@pytest.mark.usefixtures("cuda_build")
def test_a_gpu_without_a_driver_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system")

    monkeypatch.setattr(torch.cuda, "init", no_driver)
    assert "no GPU can be used: Found no NVIDIA driver" in gpu_error()


@pytest.mark.usefixtures("cuda_build")
def test_a_missing_gpu_is_reported() -> None:
    check_gpu_needs(torch.device("cuda:1"))
    assert "there is no GPU 2: this machine has 2" in gpu_error("cuda:2")
