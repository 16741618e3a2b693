"""The response of the generation endpoints, from reading the body to the last byte."""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar, cast

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.gateway.api.requests import Generation
from services.gateway.bounds.body_budget import BodyLease, Handover
from services.gateway.bounds.client import Client, ClientGone
from services.gateway.http.dialect import Dialect, StreamWriter, hang_up, send_body
from services.gateway.http.errors import error_response
from services.gateway.http.format import Format, envelope_of, tier_of, whole_body
from services.gateway.http.json_body import read_body
from services.gateway.http.sse import EventStream
from services.gateway.records.request_record import RequestRecord, record_of
from services.gateway.serving.output import Outputs, Piece, Usage, numbers_in
from services.gateway.serving.prepared import PreparedRequest
from services.gateway.serving.service_policy import PROMISE_HEADERS
from services.gateway.serving.serving import Serving, Writer
from services.gateway.text.tokenizer import TextPool
from services.gateway.vocabulary.errors import GatewayError

# How long a broken stream waits for its client to take the error event.
FAREWELL_S = 1.0
_PROMISE_HEADERS = frozenset(name.encode() for name in PROMISE_HEADERS)

B = TypeVar("B", bound=Generation)


class GenerationResponse(Response):
    """Reads the request and generates while it responds.

    So hanging up ends whatever is being done, and a request counts from before its body is read.
    """

    def __init__(
        self,
        serving: Serving,
        pool: TextPool,
        request: Request,
        dialect: Dialect,
    ) -> None:
        """`pool` is where long bodies are parsed."""
        super().__init__()
        self._serving = serving
        self._pool = pool
        self._request = request
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request; errors become the response, or the end of the stream."""
        serving, record = self._serving, record_of(scope)
        record.promise = _promise(scope)
        client = Client(send, serving.client_stall_s)
        try:
            with serving.entered(record) as lease:
                body = Handover(
                    await read_body(self._request, lease, self._pool, self._dialect.parse)
                )
                lease.keep(self._dialect.kept_bytes)
                await self._respond(body, record, lease, client, receive)
        except ClientDisconnect:
            record.hang_up()
        except GatewayError as error:
            serving.metrics.refused(error)
            await error_response(error, scope)(scope, receive, send)
            record.fail(error)

    async def _respond(
        self,
        body: Handover[Generation],
        record: RequestRecord,
        lease: BodyLease,
        client: Client[Message],
        receive: Receive,
    ) -> None:
        """Serve the request; raises GatewayError if it fails before the response has begun."""
        metrics = self._serving.metrics
        stream = self._dialect.stream(client, body.value) if body.value.stream else None
        writer = stream or self._dialect.whole(client, body.value)
        try:
            await self._serving.respond(
                body, record, lease, writer, client, hang_up=hang_up(receive)
            )
        except GatewayError as error:
            if not client.started:
                raise
            metrics.stream_failed(error.code or "error")
            record.fail(error)
            # A whole response that breaks off is shorter than its header says.
            if stream is not None:
                await stream.fail(error, FAREWELL_S)
        except ClientGone:
            record.hang_up()
            metrics.stream_failed("client_gone")


class OpenAIDialect(Generic[B]):
    """Chat and completions."""

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

    def parse(self, data: dict[str, Any]) -> Generation:
        """See Dialect."""
        return self._parse(data)

    def whole(self, client: Client[Message], body: Generation) -> Writer:
        """See Dialect."""
        return WholeWriter(client, self._layout(cast(B, body)), body, self._pool)

    def stream(self, client: Client[Message], body: Generation) -> StreamWriter:
        """See Dialect."""
        return EventStream(client, self._layout(cast(B, body)), body, self._pool)


class WholeWriter:
    """A response that is sent when all choices have ended."""

    def __init__(
        self, client: Client[Message], layout: Format, body: Generation, pool: TextPool
    ) -> None:
        self._client = client
        self._layout = layout
        self._tier = tier_of(body)
        self._pool = pool

    def begin(self, prepared: PreparedRequest) -> None:
        """See Writer."""
        self._prepared = prepared
        self._outputs = Outputs(len(prepared.choices))

    async def piece(self, index: int, piece: Piece) -> None:
        """See Writer."""
        self._outputs.add(index, piece)

    async def finish(self, usage: Usage) -> None:
        """See Writer."""
        size = sum(numbers_in(one.logprobs, one.prompt_logprobs) for one in self._outputs.all)
        await send_body(self._client, await self._pool.run(partial(self._written, usage), size))

    def _written(self, usage: Usage) -> bytes:
        prepared = self._prepared
        envelope = envelope_of(prepared, self._tier)
        whole = whole_body(envelope, self._layout, prepared, self._outputs.all, usage)
        return msgspec.json.encode(whole)


def _promise(scope: Scope) -> dict[str, str]:
    """The headers that say what the request wants to be promised."""
    return {
        name.decode(): value.decode("latin-1")
        for name, value in scope["headers"]
        if name in _PROMISE_HEADERS
    }
