"""Routes of the OpenAI API."""

from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from services.common.clock import unix_s
from services.gateway.api.chat import ChatRequest, parse_chat
from services.gateway.api.completion import CompletionRequest, parse_completion
from services.gateway.api.parameters import CHAT, COMPLETION
from services.gateway.http.description import takes
from services.gateway.http.format import ChatFormat, CompletionFormat
from services.gateway.http.openai_dialect import OpenAIDialect
from services.gateway.http.response import GenerationResponse
from services.gateway.model.served_model import ServedModel
from services.gateway.records.request_record import record_of
from services.gateway.serving.serving import RequestServing
from services.gateway.text.tokenizer import TextPool
from services.gateway.vocabulary.errors import NoSuchModel, NotSupported


def router(model: ServedModel, serving: RequestServing, pool: TextPool) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/v1")
    _add_models(routes, model, serving)
    texts = model.tokenizer.texts

    @routes.post(
        "/chat/completions", response_class=JSONResponse, openapi_extra=takes(ChatRequest, CHAT)
    )
    async def chat_completions(request: Request) -> Response:
        """The assistant's next message."""
        parse = partial(parse_chat, refuse_unknown=serving.refuse_unknown)
        dialect = OpenAIDialect(parse, partial(ChatFormat, texts=texts), pool)
        return GenerationResponse(serving, pool, request, dialect)

    @routes.post(
        "/completions",
        response_class=JSONResponse,
        openapi_extra=takes(CompletionRequest, COMPLETION),
    )
    async def completions(request: Request) -> Response:
        """The text that follows a prompt."""
        parse = partial(parse_completion, refuse_unknown=serving.refuse_unknown)
        dialect = OpenAIDialect(parse, partial(CompletionFormat, texts=texts), pool)
        return GenerationResponse(serving, pool, request, dialect)

    @routes.post("/embeddings", response_class=JSONResponse)
    async def embeddings() -> Response:
        """No worker makes embeddings so far, whatever the model."""
        raise NotSupported(
            f"the model '{model.name}' does not make embeddings here; ask a server of an"
            " embedding model",
            param="model",
            code="unsupported",
        )

    return routes


def _add_models(routes: APIRouter, model: ServedModel, serving: RequestServing) -> None:
    """Add the routes that tell which models there are."""
    created = unix_s()

    def describe(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "tideserve",
            "root": model.name,
            "parent": None,
            "max_model_len": serving.preparer.max_model_len(),
            # Fields that clients of Anthropic's API read.
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
            "lifecycle": "active",
        }

    def allowed(request: Request) -> tuple[str, ...]:
        return model.allowed_names(record_of(request.scope).principal)

    @routes.get("/models", response_class=JSONResponse)
    async def list_models(request: Request) -> Response:
        """The served model and its aliases that the key may use."""
        data = [describe(name) for name in allowed(request)]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return JSONResponse({"object": "list", "data": data, "has_more": False} | ends)

    @routes.get("/models/{model_id:path}", response_class=JSONResponse)
    async def get_model(request: Request, model_id: str) -> Response:
        """One model, if the key allows it."""
        if model_id not in allowed(request):
            raise NoSuchModel(
                f"the model {model_id[:128]!a} does not exist for this key; see /v1/models",
                param="model",
            )
        return JSONResponse(describe(model_id))
