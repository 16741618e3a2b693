"""Routes of the OpenAI API."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from services.common.clock import unix_s
from services.gateway.api.requests import (
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
)
from services.gateway.errors import ModelNotFound
from services.gateway.http.format import ChatFormat, CompletionFormat
from services.gateway.http.generation import GenerationResponse, OpenAIDialect
from services.gateway.request_record import record_of
from services.gateway.served_model import ServedModel
from services.gateway.serving import Serving
from services.gateway.tokenizer import TextPool


def _takes(kind: type[ChatRequest] | type[CompletionRequest]) -> dict[str, Any]:
    """The part of the OpenAPI description that tells what an endpoint takes.

    Bodies are parsed by `json_body`, which is stricter than the framework.
    """
    schema = kind.model_json_schema(ref_template=f"#/components/schemas/{kind.__name__}{{model}}")
    definitions = schema.pop("$defs", {})
    for name, definition in definitions.items():
        _inline(schema, f"#/components/schemas/{kind.__name__}{name}", definition)
    # Harmless OpenAI fields are ignored, so this is not the whole list.
    schema.pop("additionalProperties", None)
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def _inline(node: Any, reference: str, definition: dict[str, Any]) -> None:
    """Replace references in `node`, in place."""
    if isinstance(node, dict):
        if node.get("$ref") == reference:
            del node["$ref"]
            node.update(definition)
        for child in node.values():
            _inline(child, reference, definition)
    elif isinstance(node, list):
        for child in node:
            _inline(child, reference, definition)


def router(model: ServedModel, serving: Serving, pool: TextPool) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/v1")
    created = unix_s()
    texts = model.tokenizer.texts

    def describe() -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": created,
            "owned_by": "tideserve",
            "max_model_len": serving.preparer.max_model_len(),
        }

    @routes.get("/models", response_class=JSONResponse)
    async def list_models(request: Request) -> Response:
        """The served model, in a list, if the key allows it."""
        allowed = record_of(request.scope).principal.may_use(model.name)
        return JSONResponse({"object": "list", "data": [describe()] if allowed else []})

    @routes.get("/models/{model_id:path}", response_class=JSONResponse)
    async def get_model(request: Request, model_id: str) -> Response:
        """One model, if the key allows it."""
        allowed = record_of(request.scope).principal.may_use(model.name)
        if model_id != model.name or not allowed:
            raise ModelNotFound(
                f"the model {model_id[:128]!a} does not exist for this key; see /v1/models",
                param="model",
            )
        return JSONResponse(describe())

    @routes.post(
        "/chat/completions", response_class=JSONResponse, openapi_extra=_takes(ChatRequest)
    )
    async def chat_completions(request: Request) -> Response:
        """The assistant's next message."""
        parse = partial(parse_chat, refuse_unknown=serving.refuse_unknown)
        dialect = OpenAIDialect(parse, partial(ChatFormat, texts=texts))
        return GenerationResponse(serving, pool, request, dialect)

    @routes.post(
        "/completions", response_class=JSONResponse, openapi_extra=_takes(CompletionRequest)
    )
    async def completions(request: Request) -> Response:
        """The text that follows a prompt."""
        parse = partial(parse_completion, refuse_unknown=serving.refuse_unknown)
        dialect = OpenAIDialect(parse, partial(CompletionFormat, texts=texts))
        return GenerationResponse(serving, pool, request, dialect)

    return routes
