"""Serves the OpenAI API: chat completions, completions, responses and models."""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, Generic, TypeVar, cast

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message

from services.common.clock import unix_s
from services.gateway.api.chat import ChatRequest, parse_chat
from services.gateway.api.completion import CompletionRequest, parse_completion
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.parameters import CHAT, COMPLETION
from services.gateway.api.responses import FIELDS, ResponsesRequest, parse_responses
from services.gateway.api.responses import PATH as RESPONSES_PATH
from services.gateway.bounds.client import WatchedClient
from services.gateway.http.description import describe_body
from services.gateway.http.dialect import Dialect, StreamWriter, send_body
from services.gateway.http.format import (
    ChatFormat,
    CompletionFormat,
    Format,
    envelope_of,
    whole_body,
)
from services.gateway.http.response import GenerationResponse
from services.gateway.http.responses import ResponsesDialect
from services.gateway.http.sse import EventStream
from services.gateway.records.request_record import record_of
from services.gateway.serving.model_registry import ModelEntry, ModelRegistry
from services.gateway.serving.output import OutputPiece, Outputs, Usage, count_logprobs
from services.gateway.serving.prepared import PreparedRequest
from services.gateway.serving.serving import RequestServing, Writer
from services.gateway.text.tokenizer import TextPool
from services.gateway.vocabulary.errors import NoSuchModel, NoSuchRoute, NotSupported

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"

B = TypeVar("B", bound=GenerationRequest)


class OpenAIDialect(Generic[B]):
    """The Dialect of /v1/chat/completions and /v1/completions."""

    def __init__(
        self,
        parse: Callable[[dict[str, Any]], B],
        layout: Callable[[B], Format],
        pool: TextPool,
    ) -> None:
        """`layout` creates the JSON format of a response; `pool` encodes long responses."""
        self.kept_bytes = 0
        self._parse = parse
        self._layout = layout
        self._pool = pool

    def parse(self, data: dict[str, Any]) -> GenerationRequest:
        return self._parse(data)

    def whole(self, client: WatchedClient[Message], body: GenerationRequest) -> Writer:
        return WholeWriter(client, self._layout(cast(B, body)), body, self._pool)

    def stream(self, client: WatchedClient[Message], body: GenerationRequest) -> StreamWriter:
        return EventStream(client, self._layout(cast(B, body)), body, self._pool)


class WholeWriter:
    """A Writer that sends the response once all choices are complete."""

    def __init__(
        self,
        client: WatchedClient[Message],
        layout: Format,
        body: GenerationRequest,
        pool: TextPool,
    ) -> None:
        self._client = client
        self._layout = layout
        self._tier = body.service_tier
        self._pool = pool

    def begin(self, prepared: PreparedRequest) -> None:
        self._prepared = prepared
        self._layout.begin(prepared)
        self._outputs = Outputs(len(prepared.choices))

    async def piece(self, index: int, piece: OutputPiece) -> None:
        self._outputs.add(index, piece)

    async def finish(self, usage: Usage) -> None:
        size = sum(
            count_logprobs(output.logprobs, output.prompt_logprobs) for output in self._outputs.all
        )
        await send_body(self._client, await self._pool.run(partial(self._encoded, usage), size))

    def _encoded(self, usage: Usage) -> bytes:
        prepared = self._prepared
        envelope = envelope_of(prepared, self._tier)
        whole = whole_body(envelope, self._layout, prepared, self._outputs.all, usage)
        return msgspec.json.encode(whole)


def dialects_of(pool: TextPool, *, refuse_unknown: bool) -> dict[str, Callable[[], Dialect]]:
    """Makers of dialects by path; `refuse_unknown`: refuse bodies with unknown fields."""
    chat = partial(parse_chat, refuse_unknown=refuse_unknown)
    completion = partial(parse_completion, refuse_unknown=refuse_unknown)
    response = partial(parse_responses, refuse_unknown=refuse_unknown)
    return {
        CHAT_PATH: lambda: OpenAIDialect(chat, ChatFormat, pool),
        COMPLETION_PATH: lambda: OpenAIDialect(completion, CompletionFormat, pool),
        RESPONSES_PATH: lambda: ResponsesDialect(response),
    }


def router(serving: RequestServing, pool: TextPool) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/v1")
    _add_models(routes, serving.models)
    dialects = dialects_of(pool, refuse_unknown=serving.refuse_unknown)

    @routes.post(
        "/chat/completions",
        response_class=JSONResponse,
        openapi_extra=describe_body(ChatRequest, CHAT),
    )
    async def chat_completions(request: Request) -> Response:
        """Generate the assistant's next message."""
        return GenerationResponse(serving, pool, request, dialects[CHAT_PATH]())

    @routes.post(
        "/completions",
        response_class=JSONResponse,
        openapi_extra=describe_body(CompletionRequest, COMPLETION),
    )
    async def completions(request: Request) -> Response:
        """Generate the text that follows a prompt."""
        return GenerationResponse(serving, pool, request, dialects[COMPLETION_PATH]())

    @routes.post("/embeddings", response_class=JSONResponse)
    async def embeddings(request: Request) -> Response:
        """Embeddings are not supported."""
        only, principal = serving.models.only, record_of(request.scope).principal
        named = only is not None and principal.may_use(only.name)
        subject = f"the model '{only.name}' does" if only and named else "the models do"
        raise NotSupported(
            f"{subject} not support embeddings; use the server of an embedding model",
            param="model",
            code="unsupported",
        )

    _add_responses(routes, serving, pool, dialects[RESPONSES_PATH])
    return routes


def _add_responses(
    routes: APIRouter,
    serving: RequestServing,
    pool: TextPool,
    make_dialect: Callable[[], Dialect],
) -> None:
    """Add the routes of the Responses API."""

    @routes.post(
        "/responses",
        response_class=JSONResponse,
        openapi_extra=describe_body(ResponsesRequest, FIELDS.policy, FIELDS.passed_on),
    )
    async def responses(request: Request) -> Response:
        """Generate the next turn of a conversation; the server stores nothing."""
        return GenerationResponse(serving, pool, request, make_dialect())

    @routes.get("/responses/{response_id}", response_class=JSONResponse)
    @routes.delete("/responses/{response_id}", response_class=JSONResponse)
    async def stored_response(response_id: str) -> Response:
        """Responses are not stored."""
        raise NoSuchRoute("responses are not stored; keep the response of /v1/responses")


def _add_models(routes: APIRouter, models: ModelRegistry) -> None:
    """Add the routes that list the models."""
    created = unix_s()

    def describe(name: str, entry: ModelEntry) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "tideserve",
            "root": entry.root,
            "parent": entry.parent,
            "max_model_len": entry.max_model_len,
            # Fields that clients of Anthropic's API read.
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
            "lifecycle": "active",
        }

    @routes.get("/models", response_class=JSONResponse)
    async def list_models(request: Request) -> Response:
        """List the names of the served models that the key may use."""
        allowed = models.allowed(record_of(request.scope).principal)
        data = [describe(name, entry) for name, entry in allowed]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return JSONResponse({"object": "list", "data": data, "has_more": False} | ends)

    @routes.get("/models/{model_id:path}", response_class=JSONResponse)
    async def get_model(request: Request, model_id: str) -> Response:
        """Describe a model that the key may use."""
        # Report forbidden models as unknown: a key must not reveal other models.
        entry = models.allowed_entry(model_id, record_of(request.scope).principal)
        if entry is None:
            raise NoSuchModel(
                f"the model {model_id[:128]!a} does not exist for this key; see /v1/models",
                param="model",
            )
        return JSONResponse(describe(model_id, entry))
