"""The response of the generation endpoints, from reading the body to the last byte."""

import asyncio
import hashlib
import re
from collections.abc import Callable, Coroutine, Hashable
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
from services.gateway.http.dialect import Dialect, hang_up, present
from services.gateway.http.errors import error_response
from services.gateway.records.request_record import RequestRecord, record_of
from services.gateway.serving.service_policy import PROMISE_HEADERS
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
    """What `parse` makes of the body, which is JSON and whose bytes `lease` then holds.

    Raises:
        GatewayError: whatever is wrong with the body.
        ClientDisconnect: if the client hung up before its end.
    """
    _check_headers(request)
    body = await _read(request, lease)
    return await pool.run(lambda: parse(body), len(body) // BODY_BYTES_PER_ITEM)


def _check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMediaType(
            "the content type must be application/json; set the header Content-Type so"
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("compressed bodies are not supported; send it as it is")
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
    raise BodyTooLarge(f"the body is larger than the limit of {BODY_BYTES_MAX} bytes; shorten it")


HEADER = b"idempotency-key"
REPLAYED = (b"idempotent-replayed", b"true")
"""Stands in every answer that another request has, or had, too."""
KEY_LENGTH_MAX = 255
# A string of RFC 9651 or, as most clients send it, what stands in one.
_KEY = re.compile(rb'[!#-~]{1,%d}|"[ !#-~]{1,%d}"' % (KEY_LENGTH_MAX, KEY_LENGTH_MAX))
_MESSAGE_BYTES = 256
"""About what a message takes beside its body."""


def idempotency_key_of(scope: Scope) -> Hashable | None:
    """What the request's answer is kept by; None for a request without an Idempotency-Key.

    draft-ietf-httpapi-idempotency-key-header, with 409 for 422. The key is good for the bearers of
    keys of one owner with the same rights, on one route.

    Raises:
        BadRequest: if the key is none.
    """
    keys = [value for name, value in scope["headers"] if name == HEADER]
    if not keys:
        return None
    if len(keys) > 1 or not _KEY.fullmatch(keys[0]):
        raise BadRequest(
            f"the header Idempotency-Key must be one key of 1 to {KEY_LENGTH_MAX} ASCII characters"
            " without blanks, with or without quotes around it; a UUID is good",
            code="invalid_idempotency_key",
        )
    principal = record_of(scope).principal
    return principal.owner, principal.models, scope["path"], keys[0].strip(b'"')


def response_sink(answer: SharedResponse[Message], record: RequestRecord) -> WatchedClient[Message]:
    """Takes the answer for its readers. `record` is that of the request which is answered."""

    async def put(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.warnings = record.warnings
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        await answer.put(message, _MESSAGE_BYTES + len(message.get("body", b"")), last)

    # Each reader is watched for itself.
    return WatchedClient(put, 0)


async def send_answer(
    answer: SharedResponse[Message],
    reader: ResponseReader[Message],
    record: RequestRecord,
    client: WatchedClient[Message],
) -> None:
    """Send all of an answer to a client whose `record` says whether another request has it, too.

    It returns at the last message at once: the server tells of a finished response that its client
    has gone.
    """
    while (message := await reader.next()) is not None:
        if message["type"] == "http.response.start":
            record.warnings = answer.warnings
            mark = (REPLAYED,) if record.replayed else ()
            # Other readers get this message, too, and doors add headers to it.
            message = {**message, "headers": [*message["headers"], *mark]}
        await client.send(message)


# How long a broken stream waits for its client to take the error event.
ERROR_EVENT_TIMEOUT_S = 1.0
_PROMISE_HEADERS = frozenset(name.encode() for name in PROMISE_HEADERS)


class GenerationResponse(Response):
    """Reads the request and generates while it responds.

    So hanging up ends whatever is being done, and a request counts from before its body is read.
    The answer to a request with an Idempotency-Key is made beside the response, which reads it: so
    it outlives its client, and others may read it. Its maker ends with the response that began it.
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
            name = idempotency_key_of(scope)
            answered = name is not None and name in serving.answers
            with serving.entered(record, answered) as lease:
                body, digest = await self._read(lease, keyed=name is not None)
                if name is None:
                    await self._make(body, record, lease, client, client, hang_up(receive))
                else:
                    answer, new = serving.answers.claim(name, digest, record.response_id)
                    if not new:
                        serving.classify(body.value, record)
                        lease.keep(0)
                        lease.release()
                        record.replays(answer.response_id)
                        serving.metrics.replayed()
                    run = self._run(answer, body, record, lease) if new else None
                    # Nobody else may hold it while the answer is made.
                    del body
                    await self._share(answer, run, record, client, receive)
        except ClientDisconnect:
            record.hang_up()
        except ClientGone:
            record.hang_up()
            serving.metrics.stream_failed("client_gone")
        except GatewayError as error:
            serving.metrics.refused(error, record.service_class)
            await error_response(error, scope)(scope, receive, send)
            record.fail(error)

    async def _read(
        self, lease: BodyLease, keyed: bool
    ) -> tuple[TakenOnce[GenerationRequest], bytes]:
        """What the body asks for, and a digest of its bytes if there is a key."""

        def parse(data: bytearray) -> tuple[TakenOnce[GenerationRequest], bytes]:
            parsed = self._dialect.parse(parse_object(data))
            return TakenOnce(parsed), hashlib.sha256(data).digest() if keyed else b""

        read = await read_body(self._request, lease, self._pool, parse)
        lease.keep(self._dialect.kept_bytes)
        return read

    async def _make(
        self,
        body: TakenOnce[GenerationRequest],
        record: RequestRecord,
        lease: BodyLease,
        sink: WatchedClient[Message],
        client: WatchedClient[Message] | None,
        gone: Coroutine[Any, Any, None],
    ) -> bool:
        """Make the response; returns whether it is whole.

        It goes to `sink`; `client` is to be watched, and `gone` raises ClientGone when nobody wants
        it any more.

        Raises:
            GatewayError: if it fails before it has begun.
            ClientGone: if nobody wants it any more.
        """
        metrics = self._serving.metrics
        stream = self._dialect.stream(sink, body.value) if body.value.stream else None
        writer = stream or self._dialect.whole(sink, body.value)
        try:
            await self._serving.respond(body, record, lease, writer, client, hang_up=gone)
        except GatewayError as error:
            if not sink.started:
                raise
            metrics.stream_failed(error.code or "error")
            record.fail(error)
            # A whole response that breaks off is shorter than its header says.
            if stream is not None:
                await stream.fail(error, ERROR_EVENT_TIMEOUT_S)
            return False
        return True

    async def _run(
        self,
        answer: SharedResponse[Message],
        body: TakenOnce[GenerationRequest],
        record: RequestRecord,
        lease: BodyLease,
    ) -> None:
        """Make an answer for all who read it."""
        whole = False
        error: GatewayError | None = GatewayError("internal error of the gateway; try again")
        sink = response_sink(answer, record)
        try:
            with self._serving.charged(record):
                whole = await self._make(body, record, lease, sink, None, answer.abandoned())
        except GatewayError as failure:
            error = failure
        except ClientGone:
            error = None
        finally:
            answer.end(whole, None if sink.started else error)

    async def _share(
        self,
        answer: SharedResponse[Message],
        run: Coroutine[Any, Any, None] | None,
        record: RequestRecord,
        client: WatchedClient[Message],
        receive: Receive,
    ) -> None:
        """Send an answer to this client; `run` makes it, even when this client has gone.

        Raises:
            GatewayError: if the answer fails before it has begun.
            ClientGone: if this client went away, or took nothing any more.
        """
        # By then the answer has ended, and has told its readers why.
        limit_s = self._serving.longest_s + ERROR_EVENT_TIMEOUT_S
        gone = False
        async with asyncio.TaskGroup() as tasks:
            with answer.reading() as reader:
                if run is not None:
                    tasks.create_task(run)
                try:
                    async with present(client, receive, limit_s):
                        await send_answer(answer, reader, record, client)
                except ClientGone:
                    gone = True
        if gone:
            raise ClientGone
        if answer.error is not None:
            raise answer.error


def _promise(scope: Scope) -> dict[str, str]:
    """The headers that ask for a class or for targets."""
    return {
        name.decode(): value.decode("latin-1")
        for name, value in scope["headers"]
        if name in _PROMISE_HEADERS
    }
