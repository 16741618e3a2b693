"""The ASGI application at the admin port."""

from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.metrics_server import CONTENT_TYPE
from services.gateway.admin import groups
from services.gateway.admin.feed import Feed
from services.gateway.admin.guard import Guard
from services.gateway.cluster.cluster_client import ClusterClient
from services.gateway.cluster.group_client import GroupClient
from services.gateway.http.errors import add_handlers
from services.gateway.http.sse import HEADERS
from services.gateway.keys.key_ring import KeyRing
from services.gateway.records.metrics import Metrics

PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/draw.js": ("draw.js", "text/javascript; charset=utf-8"),
    "/words.js": ("words.js", "text/javascript; charset=utf-8"),
    "/feed.js": ("feed.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


def build(
    host: str,
    names: str,
    keys: KeyRing,
    cluster: ClusterClient,
    group_client: GroupClient,
    feed: Feed,
    metrics: Metrics,
) -> ASGIApp:
    """All routes for operators behind the guard; for `host` and `names` see Guard."""
    app = FastAPI(title="tideserve admin", docs_url=None, redoc_url=None, redirect_slashes=False)
    add_handlers(app)
    app.include_router(_page())
    app.include_router(_state(cluster, feed, metrics))
    app.include_router(groups.router(group_client))
    return Guard(app, host, names, keys, frozenset(PAGE))


def _page() -> APIRouter:
    """The live page: files of this package, read once."""
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
        """Services, workers, groups and decisions."""
        return JSONResponse(await cluster.status())

    @routes.get("/tideserve/v1/events", response_class=StreamingResponse)
    async def events() -> Response:
        """The same and rates as server-sent events, on change, at most four a second."""
        return _FeedResponse(feed)

    @routes.get("/metrics", response_class=Response)
    async def show_metrics() -> Response:
        """The metrics of this gateway, also where they are not public."""
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    return routes


class _FeedResponse(Response):
    """Watches the feed for as long as the response lasts."""

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raise ServiceUnavailable, before anything is sent, if there are too many viewers."""
        headers = {name.decode(): value.decode() for name, value in HEADERS}
        with self._feed.viewer() as frames:
            await StreamingResponse(frames, headers=headers)(scope, receive, send)
