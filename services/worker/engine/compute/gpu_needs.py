"""What a GPU needs before a model is loaded: a CUDA build of torch, a compiler, the GPU itself."""

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch

from services.worker.config import DEVICES
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.errors import DeviceError, cpu_only_torch_error

PACKAGES = ("cuda", "triton")
"""Modules that torch's CUDA build installs."""
COMPILERS = ("gcc", "clang")


def check_gpu_needs(device: torch.device) -> None:
    """Raise DeviceError if a CUDA build of torch, a C compiler or the GPU itself is missing."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if torch.version.cuda is None or missing:
        raise DeviceError(cpu_only_torch_error(torch.__version__))
    # Triton compiles a launcher in C for each kernel.
    compilers = (os.environ["CC"],) if "CC" in os.environ else COMPILERS
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not any(map(shutil.which, compilers)) or not header.exists():
        raise DeviceError(
            f"Triton needs a C compiler ({' or '.join(compilers)}) and {header} to compile its"
            " kernels, but at least one is missing; install them (Debian and Ubuntu: apt-get"
            " install gcc libc6-dev python3-dev)"
        )
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(
            f"no GPU can be used: {error}; nvidia-smi shows GPUs and the version of their driver"
        ) from error
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise DeviceError(
            f"there is no GPU {index}: this machine has {count}, numbered from 0;"
            " start fewer workers, or let them share a GPU with --device cuda:0"
        )


def usable_device(config: RunnerConfig) -> torch.device:
    """Return the configured device. Raises DeviceError if it cannot be used."""
    device = torch.device(config.device)
    if device.type not in DEVICES:
        raise DeviceError(
            f"device {config.device} has no memory backend; choose one of {sorted(DEVICES)}"
        )
    if device.type == "cuda":
        check_gpu_needs(device)
    return device
