"""Two engines in separate network namespaces, as in two containers, merge over TCP.

Each listens on 0.0.0.0 at the same fixed ports, and is reached at its advertised address. Needs
root, to create namespaces.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from services.common.advertise import advertised_host
from services.core.groups.layer_map import Stage
from services.core.request import Limits, Request, Sampling
from services.worker import engine_client
from services.worker.config import WorkerConfig
from tests.support.engine_processes import EngineProcesses
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

LAYERS = 4
HOSTS = {"w0": "10.213.77.1", "w1": "10.213.77.2"}
LANE_PORTS = {50061, 50062}
UCX_PORTS = range(50063, 50067)
TIMEOUT_S = 30


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=TIMEOUT_S, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[dict[str, str]]:
    """A namespace for each worker, joined by a pair of virtual interfaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("ss") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = {worker: f"tide{os.getpid()}{worker}" for worker in HOSTS}
    with ExitStack() as stack:
        for name in names.values():
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made here: {error.stderr.decode()}")
            stack.callback(ip, "netns", "delete", name)
        first, second = names.values()
        ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "eth0", "netns", second)
        for worker, name in names.items():
            ip("-n", name, "address", "add", f"{HOSTS[worker]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield names


@pytest.fixture
async def engines(
    namespaces: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EngineProcesses]:
    real = asyncio.create_subprocess_exec

    async def inside(*command: str, **options: Any) -> asyncio.subprocess.Process:
        (worker,) = [name for name in HOSTS if f"/{name}/engine-" in " ".join(command)]
        return await real("ip", "netns", "exec", namespaces[worker], *command, **options)

    monkeypatch.setattr(engine_client.asyncio, "create_subprocess_exec", inside)
    config = WorkerConfig(
        etcd_url="",
        model_name="m",
        model_dir=make_tiny_model(tmp_path / "model", layers=LAYERS),
        run_dir=tmp_path,
        memory_bytes=64 << 20,
        dtype="float64",
        profile_when_idle=False,
        host="0.0.0.0",
        activation_port=min(LANE_PORTS),
        bulk_port=max(LANE_PORTS),
        ucx_ports=f"{UCX_PORTS[0]}-{UCX_PORTS[-1]}",
        # Shared memory would bypass the namespaces.
        ucx_transports="tcp",
    )
    made = EngineProcesses()
    try:
        await made.start(config, tuple(HOSTS), HOSTS)
        if not made.workers["w0"].facts.bulk_address:
            pytest.skip("UCX cannot be loaded on this machine")
        yield made
    finally:
        await made.stop()


def listening(namespace: str) -> dict[int, str]:
    """Listening ports and their addresses."""
    command = ["ip", "netns", "exec", namespace, "ss", "-Hltn"]
    lines = subprocess.run(
        command, check=True, timeout=TIMEOUT_S, capture_output=True, text=True
    ).stdout.splitlines()
    places = [line.split()[3].rpartition(":") for line in lines]
    return {int(port): host for host, _, port in places}


async def test_workers_connected_by_the_network_only_merge(
    engines: EngineProcesses, namespaces: dict[str, str]
) -> None:
    for worker, namespace in namespaces.items():
        facts = engines.workers[worker].facts
        assert facts.activation_address == f"{HOSTS[worker]}:{min(LANE_PORTS)}"
        assert facts.bulk_address == f"{HOSTS[worker]}:{max(LANE_PORTS)}"
        ports = listening(namespace)
        assert {ports[port] for port in LANE_PORTS} == {"0.0.0.0"}
        # A network policy must permit these ports, and no others.
        assert set(ports) <= LANE_PORTS | set(UCX_PORTS)
    for number, worker in enumerate(HOSTS):
        request = Request(f"r{number}", (3, 4, 5), Sampling(0.0), Limits(300), 0.0)
        await engines.serve(request, worker)
    streams = engines.streams.values()
    await engines.until(lambda: all(len(stream.tokens) > 5 for stream in streams))
    assert await engines.reconfigure([[Stage("w0", 0, 2), Stage("w1", 2, LAYERS)]])
    await engines.until(lambda: engines.moved == 1)
    await engines.until(lambda: all(stream.over for stream in streams))
    first, second = (stream.output() for stream in streams)
    assert len(first) == 300 and first == second


def test_the_advertised_address_is_that_of_the_namespace(
    namespaces: dict[str, str],
) -> None:
    """`advertise: auto` in a container uses the routes of its network."""
    code = (
        "from services.common.advertise import advertised_host as a;"
        f"print(a('auto', '0.0.0.0', 'http://{HOSTS['w0']}:2379'))"
    )
    addresses = {}
    for worker, namespace in namespaces.items():
        command = ["ip", "netns", "exec", namespace, engine_client.sys.executable, "-c", code]
        done = subprocess.run(
            command, check=True, timeout=TIMEOUT_S, capture_output=True, text=True
        )
        addresses[worker] = done.stdout.strip()
    assert addresses == HOSTS
    assert advertised_host("auto", HOSTS["w1"], "http://127.0.0.1:1") == HOSTS["w1"]
