"""Serves the admin port: an HTTP server for operators, with its own address and keys."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.address import is_loopback
from services.common.clock import monotonic_s
from services.common.metrics_server import CONTENT_TYPE
from services.common.tls import ServerTls
from services.gateway.admin.adapters import adapter_routes
from services.gateway.admin.feed import Feed
from services.gateway.admin.guard import AdminGuard
from services.gateway.admin.live_state import LiveState, no_batches
from services.gateway.batches.service import BatchService
from services.gateway.bounds.connections import ClientConnections, ConnectionLimits
from services.gateway.cluster.cluster_client import ClusterClient
from services.gateway.cluster.group_client import GroupClient
from services.gateway.cluster.readiness import GatewayReadiness
from services.gateway.http.app import include_with_head
from services.gateway.http.errors import add_handlers
from services.gateway.http.server import HttpServer
from services.gateway.http.sse import DONE, HEADERS, event
from services.gateway.keys.key_ring import KeyRing
from services.gateway.records.metrics import Metrics
from services.gateway.serving.adapter_loader import AdapterLoader
from services.gateway.vocabulary.errors import GatewayError
from services.gateway.vocabulary.message import GroupStep

log = logging.getLogger(__name__)

PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/draw.js": ("draw.js", "text/javascript; charset=utf-8"),
    "/text.js": ("text.js", "text/javascript; charset=utf-8"),
    "/feed.js": ("feed.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

GROUPS_MAX = 64
CONNECTIONS = ConnectionLimits(all_max=48, address_max=48, restricted_max=16)
"""Connections of the port; beyond them the oldest one that has a request is closed."""

Names = Annotated[list[str], Query(max_length=GROUPS_MAX)]


def build(
    host: str,
    names: str,
    keys: KeyRing,
    cluster: ClusterClient,
    group_client: GroupClient,
    feed: Feed,
    metrics: Metrics,
    loader: AdapterLoader,
) -> ASGIApp:
    """The application with all routes, behind the guard; `host` and `names`: see AdminGuard."""
    app = FastAPI(title="tideserve admin", docs_url=None, redoc_url=None, redirect_slashes=False)
    add_handlers(app)
    routers = (_page(), _state(cluster, feed, metrics), _groups(group_client))
    for router in (*routers, adapter_routes(loader)):
        include_with_head(app, router)
    return AdminGuard(app, host, names, keys, frozenset(PAGE))


def _page() -> APIRouter:
    """The live page: files of this package, loaded once."""
    routes = APIRouter()
    folder = files("services.gateway.admin") / "page"
    for path, (name, media_type) in PAGE.items():
        routes.add_route(path, _file(folder.joinpath(name).read_bytes(), media_type))
    return routes


def _file(content: bytes, media_type: str) -> Any:
    async def show(_request: object) -> Response:
        return Response(content, media_type=media_type, headers={"cache-control": "no-cache"})

    return show


def _state(cluster: ClusterClient, feed: Feed, metrics: Metrics) -> APIRouter:
    routes = APIRouter()

    @routes.get("/tideserve/v1/status", response_class=JSONResponse)
    async def status() -> Response:
        """The status of services, workers, groups and decisions."""
        return JSONResponse(await cluster.status())

    @routes.get("/tideserve/v1/events", response_class=StreamingResponse)
    async def events() -> Response:
        """The status and rates as server-sent events: on change, at most four per second."""
        return _FeedResponse(feed)

    @routes.get("/metrics", response_class=Response)
    async def show_metrics() -> Response:
        """The metrics of this gateway, also if they are not public."""
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    return routes


class _FeedResponse(Response):
    """Streams the feed; counts as a viewer for the duration of the response."""

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream the feed. Raises ServiceUnavailable first if there are too many viewers."""
        headers = {name.decode(): value.decode() for name, value in HEADERS}
        if scope["method"] == "HEAD":
            await Response(headers=headers)(scope, receive, send)
            return
        with self._feed.viewer() as frames:
            await StreamingResponse(frames, headers=headers)(scope, receive, send)


def _groups(groups: GroupClient) -> APIRouter:
    """Manual changes; each step of a merge or split is sent as a server-sent event."""
    routes = APIRouter()

    @routes.post("/tideserve/v1/groups/merge", response_class=StreamingResponse)
    async def merge(group: Names = []) -> Response:  # noqa: B006  # FastAPI copies it
        """Merge the given groups in order; default: all groups."""
        return await _streamed(groups.merge(group))

    @routes.post("/tideserve/v1/groups/split", response_class=StreamingResponse)
    async def split(
        group: Annotated[str | None, Query(max_length=256)] = None,
        parts: Annotated[int | None, Query(ge=2, le=1000)] = None,
    ) -> Response:
        """Split a group; default: the only merged group, into single workers."""
        return await _streamed(groups.split(group, parts))

    @routes.post("/tideserve/v1/requests/move", response_class=JSONResponse)
    async def move(
        source: Annotated[str, Query(max_length=256)],
        target: Annotated[str | None, Query(max_length=256)] = None,
        requests: Annotated[int | None, Query(ge=1, le=1_000_000)] = None,
    ) -> Response:
        """Move running requests from a worker; default: all, to the one with the most free KV."""
        return JSONResponse(asdict(await groups.move(source, target, requests)))

    return routes


async def _streamed(steps: AsyncIterator[GroupStep]) -> Response:
    """Stream the steps; a refused command gets an error response with its HTTP status."""
    # Wait for the first step: the HTTP status must be known before the response begins.
    first = await anext(steps)
    return StreamingResponse(_events(first, steps), media_type="text/event-stream")


async def _events(first: GroupStep, steps: AsyncIterator[GroupStep]) -> AsyncIterator[bytes]:
    yield _event(first)
    try:
        async for step in steps:
            yield _event(step)
    except GatewayError as error:
        yield event(error.body())
        return
    yield DONE


def _event(step: GroupStep) -> bytes:
    return event({"phase": step.phase, "epoch": step.epoch, "message": step.message})


RETRY_S = 1.0
LOG_INTERVAL_S = 60.0


async def restart_on_failure(work: Callable[[], Awaitable[None]], name: str) -> None:
    """Run `work`; after an exception log it and restart after `RETRY_S` seconds.

    Logs at most once per `LOG_INTERVAL_S` seconds.
    """
    logged_s = -LOG_INTERVAL_S
    while True:
        try:
            await work()
            return
        except Exception:
            if monotonic_s() - logged_s >= LOG_INTERVAL_S:
                logged_s = monotonic_s()
                log.exception("%s failed and restarts; clients are not affected", name)
        await asyncio.sleep(RETRY_S)


async def log_failure(work: Awaitable[None], name: str) -> None:
    """Run `work`; log an exception instead of raising it."""
    try:
        await work
    except Exception:
        log.exception(
            "%s failed; clients are not affected; restart this gateway to recover it", name
        )


class AdminPort:
    """The server for operators; it also serves while the gateway drains."""

    def __init__(
        self,
        keys: KeyRing,
        cluster: ClusterClient,
        groups: GroupClient,
        probe: GatewayReadiness,
        metrics: Metrics,
        loader: AdapterLoader,
        tls: ServerTls | None,
        batches: BatchService | None = None,
        *,
        models: Sequence[str],
        host: str,
        names: str,
        keep_alive_s: float,
    ) -> None:
        """`host` and `names`: see AdminGuard. `tls`: of the public port, unused on loopback."""
        open_batches = no_batches if batches is None else batches.open_batches
        self._feed = Feed(LiveState(models, cluster, probe, metrics, open_batches).poll)
        app = build(host, names, keys, cluster, groups, self._feed, metrics, loader)
        connections = ClientConnections(CONNECTIONS, metrics.count_closed_connection)
        self._http = HttpServer(
            app, None if is_loopback(host) else tls, keep_alive_s, connections, "admin"
        )

    async def run(self, listener: socket.socket) -> None:
        """Serve until `close`, which also ends all feeds. Logs failures instead of raising."""
        log.info("admin port listening on %s:%d", *listener.getsockname()[:2])
        await log_failure(self._serve(listener), "the admin port")

    async def _serve(self, listener: socket.socket) -> None:
        async with asyncio.TaskGroup() as tasks:
            feed = tasks.create_task(restart_on_failure(self._feed.run, "the live page's feed"))
            await self._http.serve([listener])
            feed.cancel()

    def close(self) -> None:
        """Stop `run` within seconds."""
        self._feed.close()
        self._http.stop()
