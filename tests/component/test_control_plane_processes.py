"""The scheduler and the memory manager as processes: memory, signals, bad configuration."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from services.common.etcd import Store
from services.common.grpc_client import open_channel
from services.common.membership import SERVICES
from tests.support.control_plane import service_address
from tests.support.waiting import DEADLINE_S
from tideserve.common.v1 import process_pb2, process_pb2_grpc

RSS_BYTES_MAX = 120_000_000
SERVICE_NAMES = ["scheduler", "memmgr"]


@asynccontextmanager
async def process(
    name: str, folder: Path, config: dict[str, object], by_environment: bool = False
) -> AsyncIterator[asyncio.subprocess.Process]:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    variables = {f"TIDESERVE__{key.upper()}": str(value) for key, value in config.items()}
    # Kubernetes sets this variable for a Service of that name.
    variables["TIDESERVE_PORT"] = "tcp://10.0.0.1:8000"
    given = [] if by_environment else ["--config", str(path)]
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"services.{name}", *given),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | (variables if by_environment else {}),
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def exit_of(started: asyncio.subprocess.Process) -> tuple[int | None, str]:
    async with asyncio.timeout(DEADLINE_S):
        _, stderr = await started.communicate()
    return started.returncode, stderr.decode()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@pytest.mark.parametrize(("name", "by_environment"), [("scheduler", False), ("memmgr", True)])
async def test_a_service_is_small_and_drains_on_sigterm(
    store: Store, name: str, by_environment: bool, tmp_path: Path
) -> None:
    config: dict[str, object] = {"etcd_url": store.url, "metrics_port": 0}
    async with process(name, tmp_path, config, by_environment) as started:
        address = await service_address(store, name)
        async with open_channel(address) as channel:
            stub = process_pb2_grpc.ProcessServiceStub(channel)
            answer = await stub.GetProcess(process_pb2.GetProcessRequest(), timeout=DEADLINE_S)
        assert list(answer.pids) == [started.pid]
        assert 0 < answer.rss_bytes <= RSS_BYTES_MAX
        started.send_signal(signal.SIGTERM)
        assert (await exit_of(started))[0] == 0
        assert await store.list_prefix(f"{SERVICES}{name}/") == {}


@pytest.mark.parametrize("name", SERVICE_NAMES)
async def test_an_unknown_key_is_reported_in_one_sentence(name: str, tmp_path: Path) -> None:
    config: dict[str, object] = {"etcd_url": "127.0.0.1:9", "prot": 1}
    async with process(name, tmp_path, config) as started:
        code, stderr = await exit_of(started)
    assert code == 2
    assert "unknown configuration key 'prot'" in stderr
    assert "did you mean 'port'?" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("name", SERVICE_NAMES)
@pytest.mark.parametrize("key", ["port", "metrics_port"])
async def test_a_port_in_use_is_reported_in_one_sentence(
    store: Store, name: str, key: str, tmp_path: Path
) -> None:
    taken = port_of(store.url)
    async with process(name, tmp_path, {"etcd_url": store.url, key: taken}) as started:
        code, stderr = await exit_of(started)
    assert code == 2
    assert f"127.0.0.1:{taken}" in stderr
    assert "choose another" in stderr
    assert "Traceback" not in stderr


async def test_an_unreachable_etcd_is_reported_in_one_sentence(tmp_path: Path) -> None:
    async def end_of(name: str) -> tuple[int | None, str]:
        async with process(name, tmp_path, {"etcd_url": "127.0.0.1:9"}) as started:
            return await exit_of(started)

    for code, stderr in await asyncio.gather(*map(end_of, SERVICE_NAMES)):  # each waits
        assert code == 2
        assert "etcd at 127.0.0.1:9 cannot be reached" in stderr
        assert "Traceback" not in stderr
