"""Routes of our own: cancelling requests, probes and metrics."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from services.common.metrics_server import CONTENT_TYPE
from services.common.version import installed_version
from services.gateway.cluster.readiness import Readiness, ReadinessProbe
from services.gateway.records.metrics import Metrics
from services.gateway.records.request_record import record_of
from services.gateway.serving.canceller import Canceller


def router(
    canceller: Canceller, probe: ReadinessProbe, metrics: Metrics, public_metrics: bool
) -> APIRouter:
    """The routes; /metrics only where it is public."""
    routes = APIRouter()

    @routes.post("/v1/requests/{request_id:path}/cancel", response_class=JSONResponse)
    async def cancel(request: Request, request_id: str) -> Response:
        """Ends the requests of the same owner that go by the id: that of a response, a chosen one
        or that of a header. One that is over, or unknown, is no error; `found` tells it."""
        found = await canceller.cancel(record_of(request.scope).principal.owner, request_id)
        return JSONResponse({"id": request_id, "object": "request.cancelled", "found": found})

    @routes.get("/live", response_class=JSONResponse)
    async def live() -> Response:
        """The process runs."""
        return JSONResponse({"status": "live"})

    @routes.get("/ready", response_class=JSONResponse)
    async def ready() -> Response:
        """200 while a request can be placed, and all expected workers accept requests."""
        state = probe.look()
        return JSONResponse(_body(state, state.ready), 200 if state.ready else 503)

    @routes.get("/health", response_class=JSONResponse)
    async def health() -> Response:
        """200 while at least one group serves."""
        healthy = probe.healthy()
        return JSONResponse(_body(probe.look(), healthy), 200 if healthy else 503)

    @routes.get("/version", response_class=JSONResponse)
    async def version() -> Response:
        """The version of this release."""
        return JSONResponse({"version": installed_version()})

    if public_metrics:

        @routes.get("/metrics", response_class=Response)
        async def show_metrics() -> Response:
            """The metrics of this gateway alone."""
            return Response(metrics.render(), media_type=CONTENT_TYPE)

    return routes


def _body(state: Readiness, good: bool) -> dict[str, Any]:
    return {
        "status": "ok" if good else "unavailable",
        "missing": list(state.missing),
        "workers_expected": state.workers_expected,
        "workers_registered": state.workers_registered,
        "groups_serving": state.groups_serving,
    }
