"""Routes of OpenAI's Responses API."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from services.gateway.api.responses import PATH, VOCABULARY, ResponsesRequest, parse_responses
from services.gateway.http.description import takes
from services.gateway.http.response import GenerationResponse
from services.gateway.http.responses import ResponsesDialect
from services.gateway.model.served_model import ServedModel
from services.gateway.serving.serving import RequestServing
from services.gateway.text.tokenizer import TextPool
from services.gateway.vocabulary.errors import NoSuchRoute


def router(model: ServedModel, serving: RequestServing, pool: TextPool) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix=PATH)
    parse = partial(parse_responses, refuse_unknown=serving.refuse_unknown)

    @routes.post(
        "",
        response_class=JSONResponse,
        openapi_extra=takes(ResponsesRequest, VOCABULARY.policy, VOCABULARY.passed_on),
    )
    async def responses(request: Request) -> Response:
        """What follows in a conversation, of which nothing is stored."""
        dialect = ResponsesDialect(parse, model.tokenizer.texts)
        return GenerationResponse(serving, pool, request, dialect)

    @routes.get("/{response_id}", response_class=JSONResponse)
    @routes.delete("/{response_id}", response_class=JSONResponse)
    async def stored_response(response_id: str) -> Response:
        """No response is stored."""
        raise NoSuchRoute("no response is stored; keep what /v1/responses answers")

    return routes
