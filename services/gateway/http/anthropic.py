"""Routes of Anthropic's Messages API."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from services.gateway.api.chat import ChatRequest
from services.gateway.api.messages import (
    VOCABULARY,
    CountTokensRequest,
    MessagesRequest,
    parse_count,
    parse_messages,
)
from services.gateway.http.description import takes
from services.gateway.http.messages import MessagesDialect
from services.gateway.http.messages_error import SCHEMA
from services.gateway.http.response import GenerationResponse
from services.gateway.http.tokens import AnsweredResponse, Content
from services.gateway.records.request_record import record_of
from services.gateway.serving.serving import RequestServing
from services.gateway.text.tokenizer import TextPool


def router(serving: RequestServing, pool: TextPool) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/v1/messages")
    strict = serving.refuse_unknown
    described = partial(takes, error=SCHEMA)

    @routes.post(
        "",
        response_class=JSONResponse,
        openapi_extra=described(MessagesRequest, VOCABULARY.policy, VOCABULARY.passed_on),
    )
    async def messages(request: Request) -> Response:
        """The assistant's next message."""
        parse = partial(parse_messages, refuse_unknown=strict)
        return GenerationResponse(serving, pool, request, MessagesDialect(parse))

    @routes.post(
        "/count_tokens", response_class=JSONResponse, openapi_extra=described(CountTokensRequest)
    )
    async def count_tokens(request: Request) -> Response:
        """How many input tokens a message would have."""

        async def answer(body: ChatRequest) -> tuple[Content, int]:
            ids = await serving.preparer.token_ids(body, record_of(request.scope))
            return lambda: {"input_tokens": len(ids)}, 1

        parse = partial(parse_count, refuse_unknown=strict)
        return AnsweredResponse(serving, pool, request, parse, answer)

    return routes
