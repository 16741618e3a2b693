"""Serves the generation endpoints, from the request body to the last byte of the response.

With an Idempotency-Key the response is shared: cached, and sent to all requests with the key.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Coroutine, Hashable, Mapping
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.common.timeouts import timeout
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.json_object import parse_object
from services.gateway.bounds.body_budget import (
    BODY_BYTES_MAX,
    BODY_BYTES_PER_ITEM,
    BodyLease,
    TakenOnce,
)
from services.gateway.bounds.client import ClientGone, WatchedClient
from services.gateway.bounds.shared_response import ResponseReader, SharedResponse
from services.gateway.http.dialect import Dialect, guard_client, wait_for_disconnect
from services.gateway.http.errors import error_response, status_of
from services.gateway.records.request_record import RequestRecord, fingerprint_of, record_of
from services.gateway.serving.service_policy import SLO_HEADERS
from services.gateway.serving.serving import RequestServing
from services.gateway.text.tokenizer import TextPool
from services.gateway.vocabulary.errors import (
    BadRequest,
    BodyTimeout,
    BodyTooLarge,
    GatewayError,
    UnsupportedMediaType,
)

BODY_TIMEOUT_S = 30.0

T = TypeVar("T")


async def read_body(
    request: Request, lease: BodyLease, pool: TextPool, parse: Callable[[bytearray], T]
) -> T:
    """Read a JSON body, charge it to `lease` and parse it.

    Raises:
        GatewayError: if the headers or the body are invalid, too large or late.
        ClientDisconnect: if the client disconnects before the end of the body.
    """
    _check_headers(request)
    body = await _read(request, lease)
    return await pool.run(lambda: parse(body), len(body) // BODY_BYTES_PER_ITEM)


def _check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMediaType(
            "the content type must be application/json; set the header Content-Type"
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("compressed bodies are not supported; send it uncompressed")
    # Refuse early by the announced length; `_read` checks the actual bytes.
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > BODY_BYTES_MAX:
        _too_large()


async def _read(request: Request, lease: BodyLease) -> bytearray:
    body = bytearray()
    try:
        async with timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                if len(body) + len(part) > BODY_BYTES_MAX:
                    _too_large()
                lease.take(len(part))
                body += part
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    return body


def _too_large() -> NoReturn:
    raise BodyTooLarge(f"the body exceeds the limit of {BODY_BYTES_MAX} bytes; shorten it")


HEADER = b"idempotency-key"
REPLAYED = (b"idempotent-replayed", b"true")
"""Header of a response that an earlier request with the same Idempotency-Key produced."""
KEY_LENGTH_MAX = 255
# A string of RFC 9651, or its content without quotes, as most clients send it.
_KEY = re.compile(rb'[!#-~]{1,%d}|"[ !#-~]{1,%d}"' % (KEY_LENGTH_MAX, KEY_LENGTH_MAX))
_MESSAGE_BYTES = 256
"""Approximate overhead of a message in bytes."""


def idempotency_key_of(scope: Scope) -> Hashable | None:
    """The cache key of the request's response; None without an Idempotency-Key.

    Follows draft-ietf-httpapi-idempotency-key-header, with 409 for 422. An idempotency key is valid
    per owner, permitted models and route.

    Raises:
        BadRequest: if the header is invalid.
    """
    key = next((value for name, value in scope["headers"] if name == HEADER), None)
    if key is None:
        return None
    if not _KEY.fullmatch(key):
        raise BadRequest(
            f"the header Idempotency-Key must be a key of 1 to {KEY_LENGTH_MAX} ASCII"
            " characters, quoted if it has spaces; send a UUID, for example",
            code="invalid_idempotency_key",
        )
    # Keys of an owner with different models must not see each other's responses.
    principal = record_of(scope).principal
    return principal.owner, principal.models, scope["path"], key.strip(b'"')


def response_sink(shared: SharedResponse[Message], record: RequestRecord) -> WatchedClient[Message]:
    """A client object that stores messages in `shared`; `record`: of the producing request."""

    async def put(message: Message) -> None:
        if message["type"] == "http.response.start":
            shared.warnings = record.warnings
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        await shared.put(message, _MESSAGE_BYTES + len(message.get("body", b"")), last)

    # A sink cannot stall: readers are watched for stalls instead.
    return WatchedClient(put, 0)


async def send_shared_response(
    shared: SharedResponse[Message],
    reader: ResponseReader[Message],
    record: RequestRecord,
    client: WatchedClient[Message],
) -> None:
    """Send a shared response to a client; `record`: of the client's request."""
    # Return right after the last message: the server reports a finished response as a disconnect.
    while (message := await reader.next()) is not None:
        if message["type"] == "http.response.start":
            record.warnings = shared.warnings
            replayed = (REPLAYED,) if record.replayed else ()
            # Copy the message: other readers share it, and the middleware adds headers.
            message = {**message, "headers": [*message["headers"], *replayed]}
        await client.send(message)


# Timeout for the error event that ends a failed stream.
ERROR_EVENT_TIMEOUT_S = 1.0
_SLO_HEADERS = frozenset(name.encode() for name in SLO_HEADERS)


class GenerationResponse(Response):
    """Reads the body, generates and responds.

    All three happen within the ASGI response, so that a disconnect cancels the work and the request
    occupies its slot from the start of its body. With an Idempotency-Key, a separate task produces
    a shared response, from which this and repeated requests read. The task continues after a
    disconnect of its client; the call of the first request waits for its end.
    """

    def __init__(
        self,
        serving: RequestServing,
        pool: TextPool,
        request: Request,
        dialect: Dialect,
    ) -> None:
        """`pool` parses long bodies."""
        super().__init__()
        self._serving = serving
        self._pool = pool
        self._request = request
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request. Errors become the response, or the last event of the stream."""
        serving, record = self._serving, record_of(scope)
        record.slo_headers = _slo_headers(scope)
        client = WatchedClient(send, serving.client_stall_s)
        try:
            key = idempotency_key_of(scope)
            cached = key is not None and key in serving.idempotency_cache
            with serving.entered(record, cached) as lease:
                body, digest = await self._read(lease, record, idempotent=key is not None)
                if key is None:
                    await self._generate(
                        body, record, lease, client, client, wait_for_disconnect(receive)
                    )
                else:
                    shared, new = serving.idempotency_cache.claim(key, digest, record.response_id)
                    if not new:
                        # A replay generates nothing: release the bytes of its body.
                        serving.classify(body.value, record)
                        lease.keep(0)
                        lease.release()
                        record.note_replay(shared.response_id)
                        serving.metrics.count_replay()
                    producer = self._produce(shared, body, record, lease) if new else None
                    # Delete the reference, so that the producer can free the body.
                    del body
                    await self._send_shared(shared, producer, record, client, receive)
        except ClientDisconnect:
            record.note_disconnect()
        except ClientGone:
            record.note_disconnect()
            serving.metrics.count_failed_stream("client_gone")
        except GatewayError as error:
            serving.metrics.count_refusal(error, record.service_class, record.model)
            await error_response(error, scope)(scope, receive, send)
            record.fail(error, status_of(error, scope))

    async def _read(
        self, lease: BodyLease, record: RequestRecord, idempotent: bool
    ) -> tuple[TakenOnce[GenerationRequest], bytes]:
        """The parsed body and, if `idempotent`, its digest."""

        def parse(data: bytearray) -> tuple[TakenOnce[GenerationRequest], bytes]:
            record.fingerprint = fingerprint_of(data)
            fields = parse_object(data)
            digest = self._digest(data, fields) if idempotent else b""
            return TakenOnce(self._dialect.parse(fields)), digest

        body_and_digest = await read_body(self._request, lease, self._pool, parse)
        lease.keep(self._dialect.kept_bytes)
        return body_and_digest

    def _digest(self, data: bytearray, fields: Mapping[str, Any]) -> bytes:
        """A digest that is equal for bodies that differ only in the name of the same model."""
        name = fields.get("model")
        entry = self._serving.models.find(name) if isinstance(name, str) else None
        # An adapter has one name, and its model another.
        if entry is None or entry.adapter is not None or not entry.served.aliases:
            return hashlib.sha256(data).digest()
        resolved = json.dumps({**fields, "model": entry.name})
        return hashlib.sha256(resolved.encode()).digest()

    async def _generate(
        self,
        body: TakenOnce[GenerationRequest],
        record: RequestRecord,
        lease: BodyLease,
        sink: WatchedClient[Message],
        client: WatchedClient[Message] | None,
        disconnect: Coroutine[Any, Any, None],
    ) -> bool:
        """Generate the response into `sink`; return whether it is complete.

        `client` is watched for stalls; `disconnect` raises ClientGone once no client is left.

        Raises:
            GatewayError: if the request fails before the response has begun.
            ClientGone: if no client is left.
        """
        metrics = self._serving.metrics
        stream = self._dialect.stream(sink, body.value) if body.value.stream else None
        writer = stream or self._dialect.whole(sink, body.value)
        try:
            await self._serving.respond(body, record, lease, writer, client, disconnect=disconnect)
        except GatewayError as error:
            if not sink.started:
                raise
            metrics.count_failed_stream(error.code or "error")
            record.fail(error)
            # A response that is not streamed ends early, short of its Content-Length.
            if stream is not None:
                await stream.fail(error, ERROR_EVENT_TIMEOUT_S)
            return False
        return True

    async def _produce(
        self,
        shared: SharedResponse[Message],
        body: TakenOnce[GenerationRequest],
        record: RequestRecord,
        lease: BodyLease,
    ) -> None:
        """Generate a shared response for all its readers."""
        whole = False
        error: GatewayError | None = GatewayError("internal error of the gateway; retry")
        sink = response_sink(shared, record)
        try:
            with self._serving.charged(record):
                whole = await self._generate(body, record, lease, sink, None, shared.abandoned())
        except GatewayError as failure:
            error = failure
        except ClientGone:
            error = None
        finally:
            # Readers of a started response receive its error event instead.
            shared.end(whole, None if sink.started else error)

    async def _send_shared(
        self,
        shared: SharedResponse[Message],
        producer: Coroutine[Any, Any, None] | None,
        record: RequestRecord,
        client: WatchedClient[Message],
        receive: Receive,
    ) -> None:
        """Run `producer` and send the shared response to this client.

        The producer continues after a disconnect of this client.

        Raises:
            GatewayError: if the request fails before the response has begun.
            ClientGone: if this client disconnected or stalled.
        """
        # Time limit that the producer's own limits precede, so that readers receive its error.
        limit_s = self._serving.longest_s + ERROR_EVENT_TIMEOUT_S
        # Raise outside the task group: an exception inside would cancel the producer.
        gone = False
        async with asyncio.TaskGroup() as tasks:
            with shared.reading() as reader:
                if producer is not None:
                    tasks.create_task(producer)
                try:
                    async with guard_client(client, receive, limit_s):
                        await send_shared_response(shared, reader, record, client)
                except ClientGone:
                    gone = True
        if gone:
            raise ClientGone
        if shared.error is not None:
            raise shared.error


def _slo_headers(scope: Scope) -> dict[str, str]:
    """The headers that request a service class or latency targets."""
    return {
        name.decode(): value.decode("latin-1")
        for name, value in scope["headers"]
        if name in _SLO_HEADERS
    }
