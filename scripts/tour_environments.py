"""An environment of its own for each client of scripts/tours, in the cache folder.

The lists are in requirements/clients.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import build_wheels

from benchmarks.systems.client_environment import ensure_client, install
from tideserve.cli.cache import cache_root, create_cache
from tideserve.cli.errors import SystemUnavailable
from tideserve.cli.vllm_install import ensure_vllm

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
    try:
        if client.name == VLLM:
            return ensure_vllm(cache_root(), say)
        python = ensure_client(client.name, cache_root(), say, torch=client.torch)
        if client.own:
            _install_own(python)
    except (SystemUnavailable, build_wheels.BuildFailed) as error:
        raise EnvironmentFailed(str(error)) from error
    return python


def _install_own(python: Path) -> None:
    """Install the wheels of clients as this tree has them now."""
    with tempfile.TemporaryDirectory(prefix="tideserve-wheels-") as folder:
        wheels = build_wheels.build(Path(folder))
        ours = [str(one) for one in wheels if one.name.startswith(OWN)]
        install(python, ["--no-deps", "--force-reinstall", *ours], "the wheels of this tree")
