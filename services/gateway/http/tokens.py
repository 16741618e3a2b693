"""Routes that turn texts and tokens into each other, as vLLM has them."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from services.gateway.api.tokens import (
    Asked,
    Detokenize,
    DetokenizeRequest,
    Tokenize,
    TokenizeRequest,
    parse_detokenize,
    parse_tokenize,
)
from services.gateway.body_budget import BODY_BYTES_PER_ITEM
from services.gateway.http.description import takes
from services.gateway.http.json_body import read_body
from services.gateway.request_record import HUNG_UP, record_of
from services.gateway.served_model import ServedModel
from services.gateway.serving import Serving
from services.gateway.tokenizer import TextPool

T = TypeVar("T", bound=Asked)
Content = Callable[[], dict[str, Any]]


def router(model: ServedModel, serving: Serving, pool: TextPool) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    strict = serving.refuse_unknown

    @routes.post("/tokenize", response_class=JSONResponse, openapi_extra=takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """The tokens of a prompt, or of a chat through the model's template."""

        async def answer(asked: Tokenize) -> tuple[Content, int]:
            entry = model.tokenizer.entry
            ids = await serving.preparer.token_ids(asked.body, record_of(request.scope))
            max_model_len = serving.preparer.max_model_len()

            def content() -> dict[str, Any]:
                return {
                    "count": len(ids),
                    "max_model_len": max_model_len,
                    "tokens": ids,
                    "token_strs": list(map(entry, ids)) if asked.entries else None,
                }

            return content, len(ids)

        parse = partial(parse_tokenize, served=model.name, refuse_unknown=strict)
        return await answered(serving, pool, request, parse, answer)

    @routes.post("/detokenize", response_class=JSONResponse, openapi_extra=takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of tokens, special ones included."""

        async def answer(asked: Detokenize) -> tuple[Content, int]:
            record = record_of(request.scope)
            text = await serving.preparer.text_of(asked.model, asked.token_ids, record)
            return lambda: {"prompt": text}, len(text) // BODY_BYTES_PER_ITEM

        parse = partial(parse_detokenize, served=model.name, refuse_unknown=strict)
        return await answered(serving, pool, request, parse, answer)

    return routes


async def answered(
    serving: Serving,
    pool: TextPool,
    request: Request,
    parse: Callable[[dict[str, Any]], T],
    answer: Callable[[T], Awaitable[tuple[Content, int]]],
) -> Response:
    """The response, counted as a request while it is worked on.

    `answer` tells what makes the response, and about how many tokens or words are in it.
    """
    with serving.entered(record_of(request.scope)) as lease:
        try:
            asked = await read_body(request, lease, pool, parse)
        except ClientDisconnect:
            # Nobody reads it.
            return Response(status_code=HUNG_UP)
        record_of(request.scope).warnings += asked.warnings
        content, size = await answer(asked)
        data = await pool.run(lambda: msgspec.json.encode(content()), size)
        return Response(data, media_type="application/json")
