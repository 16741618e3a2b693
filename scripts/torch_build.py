"""Determine the build of torch that pip would install: the CUDA build is ten times the CPU build.

Standard library only: this runs before anything is installed.
"""

import json
import platform
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from long_step import StepFailed

NVIDIA_DRIVER = Path("/proc/driver/nvidia")
# Packages with the CUDA libraries that the CUDA build needs.
CUDA_PACKAGES = ("nvidia", "cuda", "triton")
OTHER_MACHINE = re.compile(r"platform_machine\s*==\s*['\"](?P<machine>[^'\"]+)['\"]")


@dataclass(frozen=True)
class TorchBuild:
    """A build, and its sizes: downloaded to a temporary folder, and unpacked in `.venv`."""

    name: str
    download_mib: int
    unpacked_mib: int


CPU_BUILD = TorchBuild("CPU build", 512, 1024)
CUDA_BUILD = TorchBuild("CUDA build", 3 * 1024, 7 * 1024)


def has_nvidia_gpu() -> bool:
    """Whether an NVIDIA driver is installed."""
    return NVIDIA_DRIVER.exists() or shutil.which("nvidia-smi") is not None


def question(pip: Sequence[str | Path], arguments: Sequence[str | Path], answer: Path) -> list[str]:
    """The pip command that writes the packages to install for torch to `answer`."""
    asking = ["--dry-run", "--no-deps", "--ignore-installed", "--report", answer]
    return [str(word) for word in (*pip, *asking, *arguments)]


def build_in(answer: Path) -> TorchBuild:
    """The build in pip's report. Raises StepFailed if the report is invalid."""
    try:
        (package,) = json.loads(answer.read_text(encoding="utf-8"))["install"]
        metadata = package["metadata"]
        if metadata["version"].endswith("+cpu"):
            return CPU_BUILD
        needed = metadata.get("requires_dist", [])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StepFailed(
            "pip does not report the build of torch it would install; use a Python with a newer pip"
        ) from error
    return CUDA_BUILD if any(map(_is_cuda, needed)) else CPU_BUILD


def cuda_notice(build: TorchBuild) -> str:
    """Notice for the CUDA build on a machine without a GPU."""
    return (
        "This machine has no NVIDIA GPU, and the package index has the CUDA build of torch: about"
        f" {build.download_mib // 1024} GB to download and {build.unpacked_mib // 1024} GB of disk."
        " It works here too, but the CPU build is a tenth of the size: to use it, press Ctrl-C and"
        " run this again with TORCH_INDEX=<URL of an index with CPU builds of torch>."
    )


def _is_cuda(requirement: str) -> bool:
    """Whether a requirement installs CUDA libraries on this machine, extras aside."""
    _, _, marker = requirement.partition(";")
    if "extra" in marker:
        return False
    machine = OTHER_MACHINE.search(marker)
    if machine is not None and machine["machine"] != platform.machine():
        return False
    return requirement.lower().startswith(CUDA_PACKAGES)
