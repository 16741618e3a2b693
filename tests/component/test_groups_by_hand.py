"""`tideserve drop` and `tideserve restore`: command, gateway and memory manager are real."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from services.common.etcd import Store
from services.gateway import app as gateway_app
from services.gateway.config import Config as GatewayConfig
from services.memmgr import app as memmgr_app
from services.memmgr.config import Config as MemmgrConfig
from tests.support.byte_tokenizer import write_model_folder
from tests.support.control_plane import LEASE_TTL_S, service_address, serving
from tests.support.member import FakeMember, member, reporting
from tests.support.waiting import eventually
from tideserve.bench.systems.system import free_port
from tideserve.cli.errors import CommandError
from tideserve.cli.groups import drop, restore


@asynccontextmanager
async def gateway(store: Store, model_dir: Path, service: str = "memmgr") -> AsyncIterator[str]:
    """A gateway without a scheduler, once its status shows `service`; yields its URL."""
    write_model_folder(model_dir)
    port = free_port()
    config = GatewayConfig(
        host="127.0.0.1",
        port=port,
        etcd_url=store.url,
        lease_ttl_s=LEASE_TTL_S,
        model_name="m",
        model_dir=model_dir,
        expected_workers=2,
    )
    url = f"http://127.0.0.1:{port}"

    async def shown() -> bool:
        async with httpx.AsyncClient() as http:
            try:
                status = (await http.get(f"{url}/tideserve/v1/status")).json()
            except httpx.TransportError:
                return False
        return service in [row["name"] for row in status["services"]]

    async with serving(gateway_app.serve, config):
        await eventually(shown)
        yield url


@asynccontextmanager
async def members(store: Store) -> AsyncIterator[tuple[FakeMember, FakeMember]]:
    """Two members that serve alone, and a memory manager that leads."""
    config = MemmgrConfig(etcd_url=store.url, lease_ttl_s=LEASE_TTL_S, change_over_timeout_s=20)
    async with (
        serving(memmgr_app.serve, config),
        member(store, "w0") as one,
        member(store, "w1") as two,
        reporting(await service_address(store, "memmgr"), one, two),
    ):
        await eventually(lambda: one.engine.serving and two.engine.serving)
        yield one, two


async def test_drop_and_restore(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with members(store) as (one, two), gateway(store, tmp_path) as url:
        await asyncio.to_thread(drop, url, None, [])
        assert (one.engine.held, two.engine.held) == ({0, 1}, {2, 3})
        told = capsys.readouterr().out
        assert "group-w0, group-w1 merge: room for 8,200 tokens of KV instead of 3,200" in told
        assert "w0 for layers 0 to 1, w1 for layers 2 to 3 get ready" in told
        assert "stable: all members serve epoch" in told
        await asyncio.to_thread(restore, url, None, "group-w0")
        assert (one.engine.held, two.engine.held) == ({0, 1, 2, 3}, {0, 1, 2, 3})


async def test_what_cannot_be_is_one_sentence(store: Store, tmp_path: Path) -> None:
    async with members(store) as (_, two), gateway(store, tmp_path) as url:
        with pytest.raises(CommandError, match="answers 400: no groups are merged"):
            await asyncio.to_thread(restore, url, None, None)
        with pytest.raises(CommandError, match="there is no group 'group-9' that serves"):
            await asyncio.to_thread(drop, url, None, ["group-9", "group-w0"])
        two.engine.refuse = "it has no room"
        with pytest.raises(CommandError, match="w1 refused: it has no room"):
            await asyncio.to_thread(drop, url, None, [])


async def test_without_a_memory_manager_it_says_so(store: Store, tmp_path: Path) -> None:
    async with gateway(store, tmp_path, service="gateway") as url:
        with pytest.raises(CommandError, match="answers 503: no memory manager leads"):
            await asyncio.to_thread(drop, url, None, [])
