"""The form of OpenAI's chats and completions."""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar, cast

import msgspec
from starlette.types import Message

from services.gateway.api.generation import GenerationRequest
from services.gateway.bounds.client import WatchedClient
from services.gateway.http.dialect import StreamWriter, send_body
from services.gateway.http.format import Format, envelope_of, whole_body
from services.gateway.http.sse import EventStream
from services.gateway.serving.output import OutputPiece, Outputs, Usage, numbers_in
from services.gateway.serving.prepared import PreparedRequest
from services.gateway.serving.serving import Writer
from services.gateway.text.tokenizer import TextPool

B = TypeVar("B", bound=GenerationRequest)


class OpenAIDialect(Generic[B]):
    """Chat and completions; a Dialect."""

    def __init__(
        self,
        parse: Callable[[dict[str, Any]], B],
        layout: Callable[[B], Format],
        pool: TextPool,
    ) -> None:
        """`pool` is where long responses are written."""
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
    """A response that is sent when all choices have ended; a Writer."""

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
        self._outputs = Outputs(len(prepared.choices))

    async def piece(self, index: int, piece: OutputPiece) -> None:
        self._outputs.add(index, piece)

    async def finish(self, usage: Usage) -> None:
        size = sum(numbers_in(one.logprobs, one.prompt_logprobs) for one in self._outputs.all)
        await send_body(self._client, await self._pool.run(partial(self._written, usage), size))

    def _written(self, usage: Usage) -> bytes:
        prepared = self._prepared
        envelope = envelope_of(prepared, self._tier)
        whole = whole_body(envelope, self._layout, prepared, self._outputs.all, usage)
        return msgspec.json.encode(whole)
