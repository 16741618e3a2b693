"""The admin port: a server of its own beside the public one."""

import asyncio
import logging
import socket

from services.common.address import is_loopback
from services.gateway.admin.app import build
from services.gateway.admin.feed import Feed
from services.gateway.admin.lifecycle import kept_apart, kept_up
from services.gateway.admin.live_state import LiveState
from services.gateway.cluster.cluster_client import ClusterClient
from services.gateway.cluster.group_client import GroupClient
from services.gateway.cluster.readiness import ReadinessProbe
from services.gateway.http.server import HttpServer
from services.gateway.http.tls import ServerTls
from services.gateway.keys.key_ring import KeyRing
from services.gateway.records.metrics import Metrics

log = logging.getLogger(__name__)


class AdminPort:
    """Serves operators, also while the gateway drains."""

    def __init__(
        self,
        keys: KeyRing,
        cluster: ClusterClient,
        groups: GroupClient,
        probe: ReadinessProbe,
        metrics: Metrics,
        tls: ServerTls | None,
        *,
        model: str,
        host: str,
        names: str,
        keep_alive_s: float,
    ) -> None:
        """`host` and `names`: see Guard. `tls` is that of the public port; a loopback `host`
        does without.
        """
        self._feed = Feed(LiveState(model, cluster, probe, metrics).look)
        app = build(host, names, keys, cluster, groups, self._feed, metrics)
        self._http = HttpServer(app, None if is_loopback(host) else tls, keep_alive_s)

    async def run(self, listener: socket.socket) -> None:
        """Serve until `close`, which ends the feeds of all viewers; never fails."""
        log.info("listening for operators on %s:%d", *listener.getsockname()[:2])
        await kept_apart(self._serve(listener), "the port for operators")

    async def _serve(self, listener: socket.socket) -> None:
        async with asyncio.TaskGroup() as tasks:
            feed = tasks.create_task(kept_up(self._feed.run, "the live page's feed"))
            await self._http.serve([listener])
            feed.cancel()

    def close(self) -> None:
        """End `run` within seconds."""
        self._feed.close()
        self._http.stop()
