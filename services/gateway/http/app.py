"""Builds the ASGI application of the public HTTP port: routes and middleware."""

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, cast

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.version import installed_version
from services.gateway.batches.service import BatchService
from services.gateway.bounds.drain import Drain
from services.gateway.cluster.cluster_metrics import ClusterMetrics
from services.gateway.cluster.readiness import GatewayReadiness
from services.gateway.http import batches_routes, messages, openai, operations, tokens
from services.gateway.http.cors import with_cors
from services.gateway.http.errors import add_handlers
from services.gateway.http.request_middleware import RequestMiddleware
from services.gateway.keys.key_ring import KeyRing
from services.gateway.records.request_record import OPERATIONS
from services.gateway.records.request_recorder import RequestRecorder
from services.gateway.serving.canceller import Canceller
from services.gateway.serving.serving import RequestServing
from services.gateway.text.tokenizer import TextPool

_CLOSE = (b"connection", b"close")


class CloseWhenDraining:
    """ASGI middleware that closes connections after their response once the gateway is leaving.

    Otherwise kept-alive connections would carry requests long after the load balancer has removed
    this gateway.
    """

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request; add `connection: close` to its response if the gateway leaves."""

        def closing_send(message: Message) -> Awaitable[None]:
            if self._drain.leaving and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
            return send(message)

        await self._app(scope, receive, closing_send if scope["type"] == "http" else send)


Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class DirectDispatch:
    """Calls the generation endpoints without FastAPI; forwards all other requests to `app`.

    These endpoints read their bodies and send their errors themselves and need no dependency
    injection. FastAPI's wrapper was a tenth of the Python calls of a short request. The endpoints
    stay registered in `app`, for the OpenAPI description and for other HTTP methods.
    """

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter]) -> None:
        """`routers` have the endpoints, whose handlers take only the request."""
        self._app = app
        self._routes = {
            route.path: (route, cast(Endpoint, route.endpoint))
            for router in routers
            for route in router.routes
            if isinstance(route, APIRoute) and route.path in OPERATIONS
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the endpoint, or forward the request."""
        match = None
        if scope["type"] == "http" and scope["method"] == "POST":
            match = self._routes.get(scope["path"])
        if match is None:
            await self._app(scope, receive, send)
            return
        scope["route"], endpoint = match
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


def include_with_head(app: FastAPI, router: APIRouter) -> None:
    """Include a router in `app`, and serve HEAD on its routes that have GET."""
    # Starlette serves HEAD for GET, FastAPI does not.
    router.routes += [
        APIRoute(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
        for route in router.routes
        if isinstance(route, APIRoute) and "GET" in (route.methods or ())
    ]
    app.include_router(router)


def build(
    serving: RequestServing,
    canceller: Canceller,
    pool: TextPool,
    probe: GatewayReadiness,
    keys: KeyRing,
    recorder: RequestRecorder,
    public_metrics: bool,
    cors_origins: Sequence[str] = (),
    batches: BatchService | None = None,
    cluster_metrics: ClusterMetrics | None = None,
    overloaded_status: int = 503,
) -> ASGIApp:
    """The application of the public port. Routes for operators are on the admin port.

    `batches` None: files and batches are not served. `cluster_metrics` None: /metrics has those of
    the gateway only. `overloaded_status`: status of 503 errors of Anthropic's API.
    """
    app = FastAPI(
        title="tideserve",
        version=installed_version(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    add_handlers(app)
    routers = (
        openai.router(serving, pool),
        messages.router(serving, pool),
        tokens.router(serving, pool),
        *batches_routes.routers(batches, serving, pool),
        operations.router(
            *(canceller, probe, serving.models, serving.metrics, public_metrics),
            lambda: serving.drain.inflight,
            cluster_metrics,
        ),
    )
    for router in routers:
        include_with_head(app, router)
    checked = RequestMiddleware(
        DirectDispatch(app, routers), keys, recorder, overloaded_status=overloaded_status
    )
    # CORS outside the key check: browsers send preflight requests without a key.
    return CloseWhenDraining(with_cors(checked, cors_origins), serving.drain)
