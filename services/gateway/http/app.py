"""The ASGI application."""

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.types import ASGIApp

from services.common.version import installed_version
from services.gateway.cluster.readiness import ReadinessProbe
from services.gateway.http import anthropic, openai, operations, requests, responses_routes, tokens
from services.gateway.http.cors import with_cors
from services.gateway.http.direct import Direct
from services.gateway.http.errors import add_handlers
from services.gateway.http.front_door import HttpFrontDoor
from services.gateway.http.parting import Parting
from services.gateway.keys.key_ring import KeyRing
from services.gateway.model.served_model import ServedModel
from services.gateway.records.reception import Reception
from services.gateway.serving.canceller import Canceller
from services.gateway.serving.serving import RequestServing
from services.gateway.text.tokenizer import TextPool


def build(
    model: ServedModel,
    serving: RequestServing,
    canceller: Canceller,
    pool: TextPool,
    probe: ReadinessProbe,
    keys: KeyRing,
    reception: Reception,
    public_metrics: bool,
    cors_origins: Sequence[str] = (),
) -> ASGIApp:
    """All routes for clients, behind the front door; the admin port has the operators' routes."""
    app = FastAPI(
        title="tideserve",
        version=installed_version(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    add_handlers(app)
    routers = (
        openai.router(model, serving, pool),
        responses_routes.router(model, serving, pool),
        anthropic.router(serving, pool),
        requests.router(canceller),
        tokens.router(model, serving, pool),
        operations.router(probe, serving.metrics, public_metrics),
    )
    for router in routers:
        app.include_router(router)
    door = HttpFrontDoor(Direct(app, routers), keys, reception)
    return Parting(with_cors(door, cors_origins), serving.drain)
