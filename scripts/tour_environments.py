"""An environment of its own for each client of scripts/tours, in the cache folder.

An environment is made again when its list in requirements/clients/ has changed.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import build_wheels

from tideserve.bench.errors import SystemUnavailable
from tideserve.bench.systems.vllm_install import TORCH, ensure_vllm
from tideserve.cli.cache import cache_root, create_cache

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "requirements" / "clients"
INSTALL_TIMEOUT_S = 1800
STAMP = "tideserve-list"
OWN = ("tideserve_api-", "tideserve_client-")


class EnvironmentFailed(Exception):
    """A client's environment could not be made; the message says why."""


@dataclass(frozen=True)
class Client:
    """One client: its name, which is that of its list, and the tour in scripts/tours.

    `package`: what its list calls it, where that is not its name.
    `torch`: it needs torch, which is installed first so that no list pulls another build.
    `own`: the wheels of this tree are installed, too.
    `grpc`: it comes through the gRPC door.
    """

    name: str
    tour: str
    package: str = ""
    torch: bool = False
    own: bool = False
    grpc: bool = False


VLLM = "vllm-bench"
"""It has no list: its environment is the one that the benchmarks have for vLLM."""

CLIENTS = (
    Client("openai-2", "openai_client", package="openai"),
    Client("openai-3", "openai_client", package="openai"),
    Client("anthropic", "anthropic_client"),
    Client("litellm", "litellm_client"),
    Client("langchain-openai", "langchain_client"),
    Client("openai-agents", "agents_client"),
    Client("tideserve-client", "tideserve_client", own=True, grpc=True),
    Client("tritonclient", "triton_client", grpc=True),
    Client("kserve", "kserve_client", grpc=True),
    Client("guidellm", "guidellm_load", torch=True),
    Client("aiperf", "aiperf_load"),
    Client(VLLM, "vllm_load"),
)


def ensure(client: Client, say: Callable[[str], None]) -> Path:
    """The Python of the client's environment, made now if it is not there.

    Raises:
        EnvironmentFailed: if it cannot be made.
    """
    create_cache(cache_root())
    if client.name == VLLM:
        try:
            return ensure_vllm(cache_root(), say)
        except SystemUnavailable as error:
            raise EnvironmentFailed(str(error)) from error
    wanted = LISTS / f"{client.name}.txt"
    folder = cache_root() / "clients" / client.name
    python, stamp = folder / "bin" / "python", folder / STAMP
    digest = hashlib.sha256(wanted.read_bytes()).hexdigest()
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q"]
    if not stamp.is_file() or stamp.read_text() != digest:
        say(f"{client.name}: installing into {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        if client.torch:
            index = os.environ.get("TORCH_INDEX")
            run_pip([*pip, TORCH, *(["--index-url", index] if index else [])], TORCH)
        run_pip([*pip, "--no-deps", "-r", str(wanted)], wanted.name)
        stamp.write_text(digest)
    if client.own:
        _install_own(pip)
    return python


def _install_own(pip: Sequence[str]) -> None:
    """Install the wheels of clients as this tree has them now."""
    with tempfile.TemporaryDirectory(prefix="tideserve-wheels-") as folder:
        try:
            wheels = build_wheels.build(Path(folder))
        except build_wheels.BuildFailed as error:
            raise EnvironmentFailed(str(error)) from error
        ours = [str(one) for one in wheels if one.name.startswith(OWN)]
        run_pip([*pip, "--no-deps", "--force-reinstall", *ours], "the wheels of this tree")


def run_pip(command: Sequence[str], what: str) -> None:
    """Run a command of pip's that installs `what`. Raises EnvironmentFailed."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFailed(
            f"pip did not install {what} within {INSTALL_TIMEOUT_S} s; try again"
        ) from error
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise EnvironmentFailed(f"pip could not install {what}: {last}")
