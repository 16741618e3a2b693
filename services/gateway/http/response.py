"""The response of the generation endpoints, from reading the body to the last byte."""

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.gateway.api.generation import GenerationRequest
from services.gateway.bounds.body_budget import BodyLease, TakenOnce
from services.gateway.bounds.client import ClientGone, WatchedClient
from services.gateway.http.dialect import Dialect, hang_up
from services.gateway.http.errors import error_response
from services.gateway.http.json_body import read_body
from services.gateway.records.request_record import RequestRecord, record_of
from services.gateway.serving.service_policy import PROMISE_HEADERS
from services.gateway.serving.serving import RequestServing
from services.gateway.text.tokenizer import TextPool
from services.gateway.vocabulary.errors import GatewayError

# How long a broken stream waits for its client to take the error event.
FAREWELL_S = 1.0
_PROMISE_HEADERS = frozenset(name.encode() for name in PROMISE_HEADERS)


class GenerationResponse(Response):
    """Reads the request and generates while it responds.

    So hanging up ends whatever is being done, and a request counts from before its body is read.
    """

    def __init__(
        self,
        serving: RequestServing,
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
        client = WatchedClient(send, serving.client_stall_s)
        try:
            with serving.entered(record) as lease:
                body = TakenOnce(
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
        body: TakenOnce[GenerationRequest],
        record: RequestRecord,
        lease: BodyLease,
        client: WatchedClient[Message],
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


def _promise(scope: Scope) -> dict[str, str]:
    """The headers that ask for a class or for targets."""
    return {
        name.decode(): value.decode("latin-1")
        for name, value in scope["headers"]
        if name in _PROMISE_HEADERS
    }
