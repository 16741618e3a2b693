"""What has to be installed where a worker computes on a GPU, told before anything starts."""

import os
import shutil
from importlib.util import find_spec

import torch

from services.worker.errors import DeviceError

PACKAGES = ("cuda", "triton")
"""What torch's build for CUDA brings along."""
COMPILERS = ("cc", "gcc", "clang")


def check_gpu_needs() -> None:
    """Raises DeviceError that says what is missing and how to get it."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if torch.version.cuda is None or missing:
        raise DeviceError(
            f"this is torch {torch.__version__}, which computes on CPUs alone; install torch's"
            " build for CUDA (docs/gpus.md), or take --device out"
        )
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), *COMPILERS))):
        raise DeviceError(
            "Triton needs a C compiler once for each kernel, and none of "
            f"{', '.join(COMPILERS)} is on PATH; install one (Debian and Ubuntu: apt-get install"
            " gcc libc6-dev)"
        )
