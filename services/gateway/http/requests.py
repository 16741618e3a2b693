"""Routes about requests that run."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from services.gateway.records.request_record import record_of
from services.gateway.serving.canceller import Canceller


def router(canceller: Canceller) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/v1/requests")

    @routes.post("/{request_id:path}/cancel", response_class=JSONResponse)
    async def cancel(request: Request, request_id: str) -> Response:
        """Ends the requests of the same owner that go by the id: that of a response, a chosen one
        or that of a header. One that is over, or unknown, is no error; `found` tells it."""
        found = await canceller.cancel(record_of(request.scope).principal.owner, request_id)
        return JSONResponse({"id": request_id, "object": "request.cancelled", "found": found})

    return routes
