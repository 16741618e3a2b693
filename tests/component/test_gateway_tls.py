"""A real gateway with HTTPS at its public port and at a network-facing admin port."""

import ssl
from pathlib import Path

import httpx
import pytest

from services.common.etcd import Store
from services.gateway.app import serve
from services.gateway.config import GatewayConfig
from tests.support.byte_tokenizer import write_model_folder
from tests.support.certified import DAY, Certified
from tests.support.control_plane import LEASE_TTL_S, serving
from tests.support.ports import free_port
from tests.support.waiting import eventually
from tideserve.cli.certificates import write_pair

KEY = "k" * 32


@pytest.mark.parametrize(("admin_host", "admin_scheme"), [("0.0.0.0", "https"), ("::1", "http")])
async def test_network_facing_ports_accept_https_only(
    store: Store, tmp_path: Path, admin_host: str, admin_scheme: str
) -> None:
    certified = Certified(tmp_path)
    hosts = ("localhost", "127.0.0.1", "::1")
    write_pair(tmp_path, "http", certified.authority.issue("http", hosts, DAY))
    write_model_folder(tmp_path / "model")
    port, admin_port = free_port(), free_port()
    config = GatewayConfig(
        etcd_url=store.url,
        lease_ttl_s=LEASE_TTL_S,
        model_name="m",
        model_dir=tmp_path / "model",
        port=port,
        admin_host=admin_host,
        admin_port=admin_port,
        admin_key=KEY,
        http_tls_cert_file=tmp_path / "http.pem",
        http_tls_key_file=tmp_path / "http-key.pem",
    )
    trust = ssl.create_default_context(cafile=certified.ca_file)
    admin = "127.0.0.1" if admin_host == "0.0.0.0" else f"[{admin_host}]"
    spoken = {f"127.0.0.1:{port}": "https", f"{admin}:{admin_port}": admin_scheme}
    paths = {f"127.0.0.1:{port}": "/v1/models", f"{admin}:{admin_port}": "/"}
    async with serving(serve, config), httpx.AsyncClient(verify=trust, timeout=20) as http:

        async def answers(scheme: str, place: str) -> bool:
            try:
                return (await http.get(f"{scheme}://{place}{paths[place]}")).status_code == 200
            except httpx.TransportError:
                return False

        for place, scheme in spoken.items():
            await eventually(lambda place=place, scheme=scheme: answers(scheme, place))
            assert not await answers({"http": "https", "https": "http"}[scheme], place)
