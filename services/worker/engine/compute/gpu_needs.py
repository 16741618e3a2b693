"""What has to be there where a worker computes on a GPU, told before a model is read."""

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch

from services.worker.config import only_cpus
from services.worker.errors import DeviceError

PACKAGES = ("cuda", "triton")
"""What torch's build for CUDA brings along."""
COMPILERS = ("gcc", "clang")


def check_gpu_needs(device: torch.device) -> None:
    """Raises DeviceError that says what is missing and how to get it."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if torch.version.cuda is None or missing:
        raise DeviceError(only_cpus(torch.__version__))
    compilers = (os.environ["CC"],) if "CC" in os.environ else COMPILERS
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not any(map(shutil.which, compilers)) or not header.exists():
        raise DeviceError(
            f"Triton needs a C compiler ({' or '.join(compilers)}) and {header}, once for each"
            " kernel, and one of them is missing; install them (Debian and Ubuntu: apt-get install"
            " gcc libc6-dev python3-dev)"
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
            f"there is no GPU {index}, since this machine shows {count}, the first of which is 0;"
            " start fewer workers, or let them share one with --device cuda:0"
        )
