"""The ASGI application."""

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.types import ASGIApp

from services.common.version import installed_version
from services.gateway.canceller import Canceller
from services.gateway.http import anthropic, openai, operations, requests, responses_routes, tokens
from services.gateway.http.cors import with_cors
from services.gateway.http.errors import add_handlers
from services.gateway.http.front_door import FrontDoor
from services.gateway.http.parting import Parting
from services.gateway.keys.key_ring import KeyRing
from services.gateway.readiness import ReadinessProbe
from services.gateway.reception import Reception
from services.gateway.served_model import ServedModel
from services.gateway.serving import Serving
from services.gateway.tokenizer import TextPool


def build(
    model: ServedModel,
    serving: Serving,
    canceller: Canceller,
    pool: TextPool,
    probe: ReadinessProbe,
    keys: KeyRing,
    reception: Reception,
    public_metrics: bool,
    cors_origins: Sequence[str] = (),
) -> ASGIApp:
    """All routes for clients behind the front door; those for operators are at the admin port."""
    app = FastAPI(
        title="tideserve",
        version=installed_version(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    add_handlers(app)
    app.include_router(openai.router(model, serving, pool))
    app.include_router(responses_routes.router(model, serving, pool))
    app.include_router(anthropic.router(serving, pool))
    app.include_router(requests.router(canceller))
    app.include_router(tokens.router(model, serving, pool))
    app.include_router(operations.router(probe, serving.metrics, public_metrics))
    return Parting(with_cors(FrontDoor(app, keys, reception), cors_origins), serving.drain)
