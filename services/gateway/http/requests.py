"""Routes about requests that run."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from services.gateway.canceller import Canceller
from services.gateway.request_record import record_of


def router(canceller: Canceller) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/v1/requests")

    @routes.post("/{request_id}/cancel", response_class=JSONResponse)
    async def cancel(request: Request, request_id: str) -> Response:
        """Ends a request of the same owner, by the id of its response or the one that was chosen
        for it; one that is over, or unknown, is no error."""
        await canceller.cancel(record_of(request.scope).principal.owner, request_id)
        return JSONResponse({"id": request_id, "object": "request.cancelled"})

    return routes
