"""Builds the JSON of OpenAI's Responses API, streamed and complete."""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import Message

from services.common.clock import unix_s
from services.gateway.api.chat import ChatRequest
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.responses import FIELDS, PreparedResponse
from services.gateway.bounds.client import WatchedClient
from services.gateway.http.dialect import StreamWriter, send_json
from services.gateway.http.format import TIERS
from services.gateway.http.logprobs import LogprobFormat
from services.gateway.http.response_items import Items
from services.gateway.http.sse import EventChannel, typed_event
from services.gateway.serving.output import OutputPiece, Usage
from services.gateway.serving.prepared import PreparedRequest
from services.gateway.serving.serving import Writer
from services.gateway.vocabulary.errors import GatewayError

Event = dict[str, Any]


class ResponsesDialect:
    """The Dialect of /v1/responses."""

    def __init__(self, parse: Callable[[dict[str, Any]], PreparedResponse]) -> None:
        self.kept_bytes = 0
        self._parse = parse

    def parse(self, data: dict[str, Any]) -> GenerationRequest:
        body = self._parse(data)
        self._echoed, self.kept_bytes = body.echoed, body.size_bytes
        return body.chat

    def whole(self, client: WatchedClient[Message], body: GenerationRequest) -> Writer:
        return WholeResponse(client, ResponseBuilder(self._echoed, body))

    def stream(self, client: WatchedClient[Message], body: GenerationRequest) -> StreamWriter:
        return ResponseStream(client, ResponseBuilder(self._echoed, body))


class ResponseBuilder:
    """Builds a response and its stream events from output pieces."""

    def __init__(self, echoed: Mapping[str, Any], chat: GenerationRequest) -> None:
        """`echoed`: fields of the request that the response repeats; see PreparedResponse."""
        assert isinstance(chat, ChatRequest), "a body of this API is converted to a chat"
        self._echoed = {
            **echoed,
            "parallel_tool_calls": chat.parallel_tool_calls is not False,
            "reasoning": {"effort": chat.reasoning_effort, "summary": None},
        }
        self._wants_logprobs = chat.output_logprobs is not None
        self._limited = False  # whether the output reached its limit
        self._next_number = 0

    def prepare(self, prepared: PreparedRequest) -> None:
        """Set the prepared request."""
        self._prepared = prepared
        logprobs = LogprobFormat(prepared.texts, by_id=False)
        self._items = Items(logprobs if self._wants_logprobs else None)

    def begin(self) -> list[Event]:
        """The first events."""
        kinds = ("response.created", "response.in_progress")
        return self._numbered([{"type": kind, "response": self._in_progress()} for kind in kinds])

    def push(self, piece: OutputPiece) -> list[Event]:
        """Add output; return its events."""
        self._limited = piece.parsed.finish_reason == "length"
        return self._numbered(self._items.push(piece))

    def end(self, usage: Usage) -> list[Event]:
        """The last events, after all output."""
        events = self._items.close(_status(self._limited))
        response = self.response(usage)
        kind = f"response.{response['status']}"
        return self._numbered([*events, {"type": kind, "response": response}])

    def fail(self, error: GatewayError) -> list[Event]:
        """The last events of a failed response."""
        message, param = FIELDS.names.translated(error)
        failed = {
            **self._in_progress(),
            "status": "failed",
            "error": {"code": _failure(error), "message": message},
            "output": self._items.written("incomplete"),
        }
        failure = {"type": "error", "code": error.code, "message": message, "param": param}
        return self._numbered([failure, {"type": "response.failed", "response": failed}])

    def response(self, usage: Usage) -> dict[str, Any]:
        """The response object, after all output."""
        # A stop string, or the model, may end the output within a call.
        incomplete = self._limited or self._items.truncated
        return {
            **self._in_progress(),
            "status": _status(incomplete),
            "completed_at": None if incomplete else unix_s(),
            "incomplete_details": {"reason": "max_output_tokens"} if self._limited else None,
            "output": self._items.written(_status(self._limited)),
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _in_progress(self) -> dict[str, Any]:
        """The response object before any output, with the echoed fields of the request."""
        prepared = self._prepared
        sampling = prepared.choices[0].request.sampling
        return {
            "id": prepared.response_id,
            "object": "response",
            "created_at": prepared.created,
            "status": "in_progress",
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": prepared.model,
            "output": [],
            "previous_response_id": None,
            "service_tier": TIERS[prepared.service_class],
            "store": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "usage": None,
            **self._echoed,
        }

    def _numbered(self, events: list[Event]) -> list[Event]:
        first, self._next_number = self._next_number, self._next_number + len(events)
        return [event | {"sequence_number": first + i} for i, event in enumerate(events)]


def _status(incomplete: bool) -> str:
    return "incomplete" if incomplete else "completed"


def _failure(error: GatewayError) -> str:
    """The error code of a failed response; the API has a fixed set of codes."""
    return "rate_limit_exceeded" if error.status == 429 else "server_error"


class WholeResponse:
    """A Writer that sends the response once it is complete."""

    def __init__(self, client: WatchedClient[Message], builder: ResponseBuilder) -> None:
        self._client = client
        self._builder = builder

    def begin(self, prepared: PreparedRequest) -> None:
        self._builder.prepare(prepared)

    async def piece(self, index: int, piece: OutputPiece) -> None:
        self._builder.push(piece)

    async def finish(self, usage: Usage) -> None:
        await send_json(self._client, self._builder.response(usage))


class ResponseStream:
    """A StreamWriter that sends the response as events; the first output starts it."""

    def __init__(self, client: WatchedClient[Message], builder: ResponseBuilder) -> None:
        self._client = client
        self._channel = EventChannel(client)
        self._builder = builder

    def begin(self, prepared: PreparedRequest) -> None:
        self._builder.prepare(prepared)

    async def piece(self, index: int, piece: OutputPiece) -> None:
        events = [] if self._client.started else self._builder.begin()
        events += self._builder.push(piece)
        if events:
            await self._channel.send(b"".join(map(typed_event, events)))

    async def finish(self, usage: Usage) -> None:
        events = self._builder.end(usage)
        await self._channel.send(b"".join(map(typed_event, events)), last=True)

    async def fail(self, error: GatewayError, timeout_s: float) -> None:
        events = self._builder.fail(error)
        await self._channel.send_final(b"".join(map(typed_event, events)), timeout_s)
