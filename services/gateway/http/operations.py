"""Routes for operations: cancellation, probes, load, version and metrics."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from services.common.metrics_server import CONTENT_TYPE
from services.common.version import installed_version
from services.core.ids import NAME_LENGTH_MAX
from services.gateway.cluster.cluster_metrics import ClusterMetrics
from services.gateway.cluster.readiness import NO_GROUP, GatewayReadiness, Readiness
from services.gateway.records.metrics import Metrics
from services.gateway.records.request_record import record_of
from services.gateway.serving.canceller import Canceller
from services.gateway.serving.model_registry import ModelRegistry

ModelName = Annotated[str | None, Query(max_length=NAME_LENGTH_MAX)]


def router(
    canceller: Canceller,
    probe: GatewayReadiness,
    models: ModelRegistry,
    metrics: Metrics,
    public_metrics: bool,
    inflight: Callable[[], int],
    cluster_metrics: ClusterMetrics | None = None,
) -> APIRouter:
    """The routes; /metrics only if `public_metrics`.

    `inflight`: generation requests inside the gateway. `cluster_metrics` are part of /metrics.
    """
    routes = APIRouter()

    @routes.post("/v1/requests/{request_id:path}/cancel", response_class=JSONResponse)
    async def cancel(request: Request, request_id: str) -> Response:
        """Cancel the caller's requests with the id: a response id, or the client's own id from the
        body or the x-request-id header. `found` is false for unknown and completed requests."""
        cancelled = await canceller.cancel(record_of(request.scope).principal.owner, request_id)
        return JSONResponse({"id": request_id, "object": "request.cancelled", "found": cancelled})

    _add_probes(routes, probe, models)

    @routes.get("/load", response_class=JSONResponse)
    async def load() -> Response:
        """The number of generation requests inside this gateway."""
        return JSONResponse({"server_load": inflight()})

    @routes.get("/version", response_class=JSONResponse)
    async def version() -> Response:
        """The version of the gateway."""
        return JSONResponse({"version": installed_version()})

    if public_metrics:

        @routes.get("/metrics", response_class=Response)
        async def show_metrics() -> Response:
            """The metrics of this gateway in Prometheus format."""
            text = metrics.render()
            if cluster_metrics is not None:
                text += await cluster_metrics.render()
            return Response(text, media_type=CONTENT_TYPE)

    return routes


def _add_probes(routes: APIRouter, probe: GatewayReadiness, models: ModelRegistry) -> None:
    """Add the routes that need no key."""

    @routes.get("/live", response_class=JSONResponse)
    async def live() -> Response:
        """Liveness: 200 while the process runs."""
        return JSONResponse({"status": "live"})

    @routes.get("/ready", response_class=JSONResponse)
    async def ready(model: ModelName = None) -> Response:
        """Readiness: 200 while a request can be scheduled and the expected workers are ready.

        With `model`, for requests that name this model."""
        state = probe.evaluate() if model is None else _state_of(model)
        return JSONResponse(_body(state, state.ready), 200 if state.ready else 503)

    def _state_of(name: str) -> Readiness:
        entry = models.find(name)
        state = probe.of(entry.name) if entry is not None else None
        # Like a model without workers: clients without a key must not learn names.
        return state or Readiness(None, 0, 0, (NO_GROUP,))

    @routes.get("/health", response_class=JSONResponse)
    async def health() -> Response:
        """Health: 200 while at least one group serves."""
        healthy = probe.healthy()
        return JSONResponse(_body(probe.evaluate(), healthy), 200 if healthy else 503)

    @routes.get("/ping", response_class=Response)
    @routes.post("/ping", response_class=Response)
    async def ping() -> Response:
        """Health without a body, for platforms that probe this route."""
        return Response(status_code=200 if probe.healthy() else 503)


def _body(state: Readiness, good: bool) -> dict[str, Any]:
    return {
        "status": "ok" if good else "unavailable",
        "missing": list(state.missing),
        "workers_expected": state.workers_expected,
        "workers_registered": state.workers_registered,
        "groups_serving": state.groups_serving,
        "workers_without_drops": dict(state.without_drops),
    }
