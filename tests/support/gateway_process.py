"""A gateway process in front of a fake cluster."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.support.byte_tokenizer import write_model_folder
from tests.support.control_plane import LEASE_TTL_S
from tests.support.fake_cluster import FakeCluster
from tests.support.ports import free_port
from tests.support.waiting import eventually

STOP_S = 60.0


@dataclass(frozen=True)
class GatewayProcess:
    """A gateway process, its ports and its log."""

    url: str
    grpc_port: int
    process: psutil.Process
    log: Path

    @property
    def rss(self) -> int:
        """Its resident memory in bytes."""
        return int(self.process.memory_info().rss)


@asynccontextmanager
async def gateway_process(
    cluster: FakeCluster, folder: Path, open_files: int | None = None, **fields: Any
) -> AsyncIterator[GatewayProcess]:
    """A ready gateway process; `open_files`: its hard limit of descriptors."""
    write_model_folder(folder / "model")
    port, grpc_port = free_port(), free_port()
    config = {
        "port": port,
        "public_grpc_port": grpc_port,
        "etcd_url": cluster.store.url,
        "lease_ttl_s": LEASE_TTL_S,
        "model_name": "m",
        "model_dir": str(folder / "model"),
        "log_level": "warning",
        **fields,
    }
    path, log = folder / "gateway.yaml", folder / "gateway.log"
    path.write_text(yaml.safe_dump(config))
    limited = () if open_files is None else ("prlimit", f"--nofile={open_files}:{open_files}")
    process = await asyncio.create_subprocess_exec(
        *(*limited, sys.executable, "-m", "services.gateway", "--config", str(path)),
        stderr=log.open("wb"),
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=url) as client:

            async def ready() -> bool:
                assert process.returncode is None, "the gateway exited"
                try:
                    return (await client.get("/ready")).status_code == 200
                except httpx.TransportError:
                    return False

            try:
                await eventually(ready)
            except AssertionError as error:
                error.add_note(log.read_text())
                raise
        yield GatewayProcess(url, grpc_port, psutil.Process(process.pid), log)
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), STOP_S)
