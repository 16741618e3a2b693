"""Serves /tokenize and /detokenize, compatible with vLLM."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from services.gateway.api.json_object import parse_object
from services.gateway.api.tokens import (
    Detokenize,
    DetokenizeRequest,
    ParsedBody,
    Tokenize,
    TokenizeRequest,
    parse_detokenize,
    parse_tokenize,
)
from services.gateway.bounds.body_budget import BODY_BYTES_PER_ITEM
from services.gateway.bounds.client import ClientGone, WatchedClient
from services.gateway.http.description import describe_body
from services.gateway.http.dialect import guard_client, send_body
from services.gateway.http.response import read_body
from services.gateway.records.request_record import record_of
from services.gateway.serving.model_registry import ModelRegistry
from services.gateway.serving.serving import RequestServing
from services.gateway.text.tokenizer import TextPool

T = TypeVar("T", bound=ParsedBody)
Content = Callable[[], dict[str, Any]]


def router(serving: RequestServing, pool: TextPool) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    strict, models = serving.refuse_unknown, serving.models

    @routes.post(
        "/tokenize", response_class=JSONResponse, openapi_extra=describe_body(TokenizeRequest)
    )
    async def tokenize(request: Request) -> Response:
        """Tokenise a prompt, or a chat with the model's template."""

        async def compute(body: Tokenize) -> tuple[Content, int]:
            record = record_of(request.scope)
            model = models.entry(body.body.model, record.principal)
            entry = model.served.tokenizer.entry
            ids = await model.preparer.token_ids(body.body, record)
            max_model_len = model.max_model_len

            def content() -> dict[str, Any]:
                return {
                    "count": len(ids),
                    "max_model_len": max_model_len,
                    "tokens": ids,
                    "token_strs": list(map(entry, ids)) if body.entries else None,
                }

            return content, len(ids)

        parse = partial(parse_tokenize, served=_default(models, request), refuse_unknown=strict)
        return ComputedResponse(serving, pool, request, parse, compute)

    @routes.post(
        "/detokenize", response_class=JSONResponse, openapi_extra=describe_body(DetokenizeRequest)
    )
    async def detokenize(request: Request) -> Response:
        """Convert tokens to text, special tokens included."""

        async def compute(body: Detokenize) -> tuple[Content, int]:
            model = models.entry(body.model, record_of(request.scope).principal)
            text = await model.preparer.text_of(body.token_ids)
            return lambda: {"prompt": text}, len(text) // BODY_BYTES_PER_ITEM

        parse = partial(parse_detokenize, served=_default(models, request), refuse_unknown=strict)
        return ComputedResponse(serving, pool, request, parse, compute)

    return routes


def _default(models: ModelRegistry, request: Request) -> str | None:
    """The only model, by a name that the key may use; None: bodies must name a model."""
    if models.only is None:
        return None
    allowed = models.only.served.allowed_names(record_of(request.scope).principal)
    return next(iter(allowed), None)


class ComputedResponse(Response, Generic[T]):
    """A response without generation.

    The request occupies a slot of the gateway's concurrency limit until its client has read it.
    """

    def __init__(
        self,
        serving: RequestServing,
        pool: TextPool,
        request: Request,
        parse: Callable[[dict[str, Any]], T],
        compute: Callable[[T], Awaitable[tuple[Content, int]]],
    ) -> None:
        """`compute` returns a function that builds the JSON, and its approximate size in tokens."""
        super().__init__()
        self._serving = serving
        self._pool = pool
        self._request = request
        self._parse = parse
        self._compute = compute

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request. Raises GatewayError before the response begins."""
        record = record_of(scope)
        client = WatchedClient(send, self._serving.client_stall_s)
        try:
            with self._serving.entered(record) as lease:
                body = await read_body(
                    self._request, lease, self._pool, lambda data: self._parse(parse_object(data))
                )
                record.warnings += body.warnings
                content, size = await self._compute(body)
                # In the pool: building a long response would block the event loop.
                data = await self._pool.run(lambda: msgspec.json.encode(content()), size)
                async with guard_client(client, receive):
                    await send_body(client, data)
        except (ClientDisconnect, ClientGone):
            record.note_disconnect()
