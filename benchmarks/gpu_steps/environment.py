"""Versions, the GPU's attributes, and whether UCX loads and which transports it has."""

import os
import platform
import subprocess
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.gpu_steps.figures import Figures, step_parser
from services.worker.engine.transfer.ucx_config import UcxConfig
from services.worker.engine.transfer.ucx_transport import UcxTransport, load_ucxx

PACKAGES = (
    *("torch", "triton", "numpy", "numba", "transformers", "tokenizers", "grpcio", "protobuf"),
    *("libucx-cu13", "libucxx-cu13", "ucxx-cu13", "cuda-bindings"),
)
ATTRIBUTES = (
    "MULTIPROCESSOR_COUNT",
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    "HANDLE_TYPE_FABRIC_SUPPORTED",
    "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
    "ASYNC_ENGINE_COUNT",
    "MEMORY_CLOCK_RATE",
    "L2_CACHE_SIZE",
)
SMI = "name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit,pcie.link.gen.current"


def main() -> None:
    """Collect the facts and write the file."""
    chosen = step_parser(__doc__).parse_args()
    figures = Figures(chosen.file)
    figures.measure("versions", versions)
    figures.measure("ucx", ucx)
    figures.measure("ucx_lane_ready_ms", lane_ready_ms)
    figures.measure("torch", partial(torch_facts, chosen.dry))
    if not chosen.dry:
        figures.measure("smi", smi)
        figures.measure("attributes", attributes)
    figures.end()


def versions() -> dict[str, Any]:
    """Versions of Python, the kernel and packages; None for a missing package."""
    packages: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "packages": packages,
    }


def ucx() -> dict[str, Any]:
    """The transports that UCX finds, with those for CUDA memory. Raises UcxUnavailable."""
    ucxx = load_ucxx()
    context = ucxx.UCXContext({"TLS": "all"})
    info = context.info
    lines = [line for line in info.splitlines() if "resource" in line and "/" in line]
    return {
        "version": list(ucxx.get_ucx_version()),
        "cuda": bool(context.cuda_support),
        "transports": [line.split()[-1] for line in lines],
    }


def lane_ready_ms() -> float:
    """Time to open a UCX context and worker with the options of a lane. Raises UcxUnavailable."""
    began_s = time.perf_counter()
    UcxTransport(UcxConfig())
    return 1e3 * (time.perf_counter() - began_s)


def torch_facts(dry: bool) -> dict[str, Any]:
    """Durations of the import and of the first CUDA context, and the device's memory in bytes."""
    began_s = time.perf_counter()
    import torch

    facts: dict[str, Any] = {"import_s": time.perf_counter() - began_s, "cuda": torch.version.cuda}
    if dry:
        return facts
    began_s = time.perf_counter()
    torch.zeros(1, device="cuda").cpu()
    facts["context_s"] = time.perf_counter() - began_s
    facts["name"] = torch.cuda.get_device_name()
    facts["free_bytes"], facts["total_bytes"] = torch.cuda.mem_get_info()
    facts["capability"] = torch.cuda.get_device_capability()
    return facts


def smi() -> dict[str, str]:
    """Fields of nvidia-smi. Raises OSError, CalledProcessError."""
    command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    return dict(zip(SMI.split(","), map(str.strip, done.stdout.split(",")), strict=False))


def attributes() -> dict[str, int]:
    """Attributes of the device, as the driver reports them."""
    from cuda.bindings import driver

    from services.worker.engine.memory.cuda_driver import call

    names = driver.CUdevice_attribute
    device = call(driver.cuDeviceGet, 0)
    return {
        name.lower(): int(
            call(
                driver.cuDeviceGetAttribute,
                getattr(names, f"CU_DEVICE_ATTRIBUTE_{name}"),
                device,
            )
        )
        for name in ATTRIBUTES
    }


if __name__ == "__main__":
    main()
