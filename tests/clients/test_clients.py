"""Clients, each with pytest in its own environment, call a cluster with the default model.

The checks of a client are in its file; `make client-tours CLIENTS=…` selects clients. A running
cluster is used if TIDESERVE_URL and TIDESERVE_GRPC are set.
"""

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from build_wheels import build

from benchmarks.systems.client_environment import ensure_client, install
from tests.support.cluster import REPOSITORY, Cluster
from tideserve.cli.cache import cache_root, create_cache
from tideserve.cli.model_store import resolve_model
from tideserve.cli.vllm_install import ensure_vllm

FOLDER = Path(__file__).parent
TIMEOUT_S = 1800
FILES = {
    "openai-2": "openai_client.py",
    "openai-3": "openai_client.py",
    "anthropic": "anthropic_client.py",
    "litellm": "litellm_client.py",
    "langchain-openai": "langchain_client.py",
    "openai-agents": "agents_client.py",
    "tideserve-client": "tideserve_client.py",
    "tritonclient": "triton_client.py",
    "kserve": "kserve_client.py",
    "guidellm": "guidellm_load.py",
    "aiperf": "aiperf_load.py",
    "vllm-bench": "vllm_load.py",
}
"""Files by client, named like its list of packages in requirements/clients."""


@pytest.fixture(scope="module")
def doors() -> Iterator[Mapping[str, str]]:
    if "TIDESERVE_URL" in os.environ:
        names = ("TIDESERVE_URL", "TIDESERVE_GRPC", "TIDESERVE_API_KEY")
        yield {name: os.environ[name] for name in names if name in os.environ}
        return
    # One thread: the clients and other processes need processors, too.
    options = {"workers": 1, "threads": 1, "memory": "1GiB", "dtype": "bfloat16"}
    with Cluster(None, **options) as cluster:  # type: ignore[arg-type]
        yield {"TIDESERVE_URL": cluster.url, "TIDESERVE_GRPC": cluster.grpc_target}


def environment_of(client: str, folder: Path) -> Path:
    """The Python of the client's environment in the cache folder, created if missing."""
    create_cache(cache_root())
    if client == "vllm-bench":  # the environment of the benchmarks
        python = ensure_vllm(cache_root(), print)
    else:
        python = ensure_client(client, cache_root(), print, torch=client == "guidellm")
    if client == "tideserve-client":
        ours = [
            w for w in build(folder) if w.name.startswith(("tideserve_api-", "tideserve_client-"))
        ]
        install(python, ["--no-deps", "--force-reinstall", *map(str, ours)], "wheels of this tree")
    pins = (REPOSITORY / "requirements" / "dev.txt").read_text().splitlines()
    pytests = [pin for pin in pins if pin.startswith(("pytest==", "pytest-asyncio=="))]
    install(python, pytests, "pytest")
    return python


@pytest.mark.slow
@pytest.mark.timeout(0)  # fetching an environment may take long
@pytest.mark.parametrize("client", FILES)
def test_a_client_passes_its_checks(client: str, doors: Mapping[str, str], tmp_path: Path) -> None:
    python = environment_of(client, tmp_path)
    kept = {name: os.environ[name] for name in ("LANG", "TZ") if name in os.environ}
    options = ("-v", "--noconftest", "--asyncio-mode=auto", "-p", "no:cacheprovider")
    status = subprocess.run(
        [python, "-m", "pytest", *options, "-c", os.devnull, FOLDER / FILES[client]],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
        check=False,
        env={
            **kept,
            **doors,
            "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "HOME": str(tmp_path),
            "PYTHONPATH": str(FOLDER),
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "TIDESERVE_MODEL_DIR": str(resolve_model(None, cache_root(), print, "auto")),
        },
    ).returncode
    assert status == 0
