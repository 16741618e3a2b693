"""Status of a local cluster whose gateway is down, read from etcd and the other services."""

import asyncio
from typing import Any

from services.common.errors import ConfigError, StoreError
from services.common.etcd import open_store
from services.common.settings import load_settings
from services.common.timeouts import timeout
from services.common.transport import transport_of
from services.gateway.cluster.cluster_client import ClusterClient
from services.gateway.cluster.cluster_view import ClusterView
from services.gateway.config import GatewayConfig
from tideserve.cli.cluster_folder import ClusterFolder
from tideserve.cli.errors import unusable

CONNECT_TIMEOUT_S = 4.0
READ_TIMEOUT_S = 6.0
UNKNOWN: dict[str, Any] = {"services": [], "etcd": {"version": None}, "workers": [], "groups": []}


def direct_status(folder: ClusterFolder) -> dict[str, Any]:
    """The status that the gateway would report, from etcd and the services themselves.

    If etcd does not answer, only `errors` is filled.

    Raises:
        CommandError: if the configuration of the gateway is invalid.
    """
    with unusable(ConfigError):
        config = load_settings(GatewayConfig, folder.gateway_config, {}).config
        try:
            return asyncio.run(_ask(config))
        except (StoreError, TimeoutError):
            return UNKNOWN | {
                "errors": [
                    f"etcd at {config.etcd_url} does not answer, so the workers and groups are"
                    " unknown; see `tideserve logs etcd`"
                ]
            }


async def _ask(config: GatewayConfig) -> dict[str, Any]:
    """Raises ConfigError, StoreError, TimeoutError."""
    store = open_store(config)
    await store.connect(CONNECT_TIMEOUT_S)
    view = ClusterView(store, lambda: None)
    following = asyncio.create_task(view.run())
    try:
        async with timeout(READ_TIMEOUT_S):
            await view.loaded()
        return await ClusterClient(view, transport_of(config).dial, store).status()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await store.close()
