"""The short way to the generation endpoints, past the framework's machinery.

They read their bodies themselves, take nothing that is injected and answer their errors themselves;
what the framework did around a handler was a tenth of the Python calls of a short request. They
stay routes of the application, which describes them and answers all other methods.
"""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.records.request_record import OPERATIONS

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class Direct:
    """Calls the endpoints that generate, and passes all other requests to the application."""

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter]) -> None:
        """`routers` have the endpoints; a handler's only argument is the request."""
        self._app = app
        self._routes = {
            route.path: (route, cast(Endpoint, route.endpoint))
            for router in routers
            for route in router.routes
            if isinstance(route, APIRoute) and route.path in OPERATIONS
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the request answered."""
        found = None
        if scope["type"] == "http" and scope["method"] == "POST":
            found = self._routes.get(scope["path"])
        if found is None:
            await self._app(scope, receive, send)
            return
        scope["route"], endpoint = found
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)
