"""A gateway's admin port in front of a real memory manager and two members."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from services.common.etcd import Store
from services.gateway import app as gateway_app
from services.gateway.config import GatewayConfig
from services.memmgr import app as memmgr_app
from services.memmgr.config import MemmgrConfig
from tests.support.byte_tokenizer import write_model_folder
from tests.support.control_plane import LEASE_TTL_S, service_address, serving
from tests.support.member import FakeMember, member, reporting
from tests.support.ports import free_port
from tests.support.waiting import eventually


@asynccontextmanager
async def admin_port(
    store: Store, model_dir: Path, service: str = "memmgr", **fields: Any
) -> AsyncIterator[str]:
    """Run a gateway without a scheduler until its status lists `service`; yield its admin URL."""
    write_model_folder(model_dir)
    port = free_port()
    config = GatewayConfig(
        host="127.0.0.1",
        port=0,
        admin_port=port,
        etcd_url=store.url,
        lease_ttl_s=LEASE_TTL_S,
        model_name="m",
        model_dir=model_dir,
        expected_workers=2,
        **fields,
    )
    url = f"http://127.0.0.1:{port}"

    async def shown() -> bool:
        async with httpx.AsyncClient() as http:
            try:
                headers = {"authorization": f"Bearer {config.admin_key}"}
                answer = await http.get(f"{url}/tideserve/v1/status", headers=headers)
            except httpx.TransportError:
                return False
        return service in [row["name"] for row in answer.json()["services"]]

    async with serving(gateway_app.serve, config):
        await eventually(shown)
        yield url


@asynccontextmanager
async def members(store: Store, **record: Any) -> AsyncIterator[tuple[FakeMember, FakeMember]]:
    """Two single-worker groups and a leading memory manager; `record`: fields of both workers."""
    config = MemmgrConfig(etcd_url=store.url, lease_ttl_s=LEASE_TTL_S, change_over_timeout_s=20)
    async with (
        serving(memmgr_app.serve, config),
        member(store, "w0", **record) as first,
        member(store, "w1", **record) as second,
        reporting(await service_address(store, "memmgr"), first, second),
    ):
        await eventually(lambda: first.engine.serving and second.engine.serving)
        yield first, second
