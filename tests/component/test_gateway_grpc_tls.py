"""gRPC over TLS at the public port: certificate, renewal, and client certificates."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.common.etcd import Store
from services.gateway.app import serve
from services.gateway.config import GatewayConfig
from tests.support.byte_tokenizer import write_model_folder
from tests.support.certified import DAY, Certified
from tests.support.control_plane import LEASE_TTL_S, serving
from tests.support.ports import free_port
from tests.support.waiting import eventually
from tideserve import client as tide
from tideserve.cli.certificates import Authority, write_pair
from tideserve.client import AsyncClient, Tls

HOSTS = ("localhost", "127.0.0.1")


@asynccontextmanager
async def gateway(store: Store, folder: Path, **fields: Any) -> AsyncIterator[str]:
    """Run a gateway without a cluster; yields the address of its gRPC over TLS."""
    write_model_folder(folder / "model")
    port = free_port()
    config = GatewayConfig(
        etcd_url=store.url,
        lease_ttl_s=LEASE_TTL_S,
        model_name="m",
        model_dir=folder / "model",
        port=free_port(),
        public_grpc_port=port,
        http_tls_cert_file=folder / "http.pem",
        http_tls_key_file=folder / "http-key.pem",
        **fields,
    )
    async with serving(serve, config):
        yield f"127.0.0.1:{port}"


async def lets_in(target: str, tls: Tls | bool) -> bool:
    """Whether a client gets a response."""
    async with AsyncClient(target, tls=tls, timeout_s=3) as client:
        try:
            return [model.id for model in await client.models()] == ["m"]
        except (tide.Unavailable, tide.DeadlineExceeded):
            return False


@pytest.fixture
def certified(tmp_path: Path) -> Certified:
    certified = Certified(tmp_path)
    write_pair(tmp_path, "http", certified.authority.issue("http", HOSTS, DAY))
    return certified


async def test_only_tls_is_accepted_and_only_trusted_servers_are_called(
    store: Store, tmp_path: Path, certified: Certified
) -> None:
    stranger = tmp_path / "stranger.pem"
    stranger.write_bytes(Authority.create("stranger").files.cert)
    async with gateway(store, tmp_path) as target:
        trust = Tls(ca_file=certified.ca_file)
        await eventually(lambda: lets_in(target, trust))
        assert not await lets_in(target, False)
        assert not await lets_in(target, Tls(ca_file=stranger))
        assert not await lets_in(target, Tls(ca_file=certified.ca_file, server_name="other"))
        assert await lets_in(target, Tls(ca_file=certified.ca_file, server_name="localhost"))


async def test_a_renewed_certificate_is_used(
    store: Store, tmp_path: Path, certified: Certified
) -> None:
    async with gateway(store, tmp_path) as target:
        old = Tls(ca_file=certified.ca_file)
        await eventually(lambda: lets_in(target, old))
        authority = Authority.create("new")
        new_ca = tmp_path / "new.pem"
        new_ca.write_bytes(authority.files.cert)
        async with AsyncClient(target, tls=old, timeout_s=20) as standing:
            assert await standing.models()
            write_pair(tmp_path, "fresh", authority.issue("http", HOSTS, DAY))
            for end in (".pem", "-key.pem"):
                os.replace(tmp_path / f"fresh{end}", tmp_path / f"http{end}")
            await eventually(lambda: lets_in(target, Tls(ca_file=new_ca)))
            assert not await lets_in(target, old)
            assert await standing.models(), "a connection keeps what it began with"


async def test_client_certificates_can_be_required(
    store: Store, tmp_path: Path, certified: Certified
) -> None:
    clients = Authority.create("clients")
    ca = tmp_path / "clients.pem"
    ca.write_bytes(clients.files.cert)
    write_pair(tmp_path, "client", clients.issue("client", ("client",), DAY))
    write_pair(tmp_path, "wrong", certified.authority.issue("client", ("client",), DAY))
    async with gateway(store, tmp_path, public_grpc_ca_file=ca) as target:

        def shown(name: str) -> Tls:
            pair = (tmp_path / f"{name}.pem", tmp_path / f"{name}-key.pem")
            return Tls(certified.ca_file, *pair)

        await eventually(lambda: lets_in(target, shown("client")))
        assert not await lets_in(target, shown("wrong"))
        assert not await lets_in(target, Tls(ca_file=certified.ca_file))


async def test_a_client_ca_needs_a_server_certificate(store: Store, tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model")
    config = GatewayConfig(
        etcd_url=store.url,
        model_name="m",
        model_dir=tmp_path / "model",
        port=free_port(),
        public_grpc_port=0,
        public_grpc_ca_file=tmp_path / "ca.pem",
    )
    with pytest.raises(BaseExceptionGroup) as caught:
        async with serving(serve, config):
            pass
    assert caught.group_contains(ConfigError, match="'public_grpc_ca_file' needs")
