"""The response of the generation endpoints, from tokenising to the last byte."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.clock import monotonic_s
from services.common.timeouts import timeout
from services.core.request import FinishReason
from services.gateway.drain import Drain
from services.gateway.errors import Draining, Expired, GatewayError, first_gateway_error
from services.gateway.generation import Generator
from services.gateway.http.body_budget import BodyBudget, BodyLease
from services.gateway.http.call import Call, CallFactory, note_call
from services.gateway.http.errors import error_response
from services.gateway.http.format import Output, Usage, whole_body
from services.gateway.http.sse import Client, ClientGone, EventStream
from services.gateway.message import Job
from services.gateway.metrics import Metrics
from services.gateway.output import Piece
from services.gateway.request_record import RequestRecord, record_of

# How long a broken stream waits for its client to take the error event.
FAREWELL_S = 1.0


@dataclass(frozen=True, slots=True)
class Machinery:
    """What every response needs."""

    factory: CallFactory
    generator: Generator
    drain: Drain
    bodies: BodyBudget
    metrics: Metrics
    request_timeout_s: float
    client_stall_s: float


@dataclass(slots=True)
class _Tally:
    """What has come of the choices."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    texts: dict[int, list[str]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.output_tokens)

    def outputs(self) -> list[Output]:
        return [
            Output("".join(self.texts[index]), self.reasons[index]) for index in sorted(self.texts)
        ]


class GenerationResponse(Response):
    """Reads the request and generates while it responds.

    So hanging up ends whatever is being done, and a request counts from before its body is read.
    """

    def __init__(self, machinery: Machinery, read: Callable[[BodyLease], Awaitable[Call]]) -> None:
        """`read` makes a call of the body; it may raise GatewayError and ClientDisconnect."""
        super().__init__()
        self._machinery = machinery
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request; errors become the response, or the end of the stream."""
        machinery = self._machinery
        client = Client(send, machinery.client_stall_s)
        record = record_of(scope)
        try:
            with machinery.drain.enter(), machinery.bodies.lease() as lease:
                call = await self._read(lease)
                note_call(record, call)
                await _Generation(machinery, call, lease, client, record).run(receive)
        except ClientDisconnect:
            record.hang_up()
        except GatewayError as error:
            machinery.metrics.refused(error)
            await error_response(error)(scope, receive, send)
            record.fail(error)


class _Generation:
    """The response to one call."""

    def __init__(
        self,
        machinery: Machinery,
        call: Call,
        lease: BodyLease,
        client: Client,
        record: RequestRecord,
    ) -> None:
        self._machinery = machinery
        self._call = call
        self._lease = lease
        self._client = client
        self._record = record
        self._events = EventStream(client, call.envelope, call.layout, call.include_usage)

    async def run(self, receive: Receive) -> None:
        """Serve the call; raises GatewayError if it fails before the response has begun."""
        metrics = self._machinery.metrics
        try:
            await self._guarded(receive)
        except GatewayError as error:
            if not self._client.started:
                raise
            metrics.stream_failed(error.code or "error")
            self._record.fail(error)
            await self._events.fail(error, FAREWELL_S)
        except ClientGone:
            self._record.hang_up()
            metrics.stream_failed("client_gone")

    async def _guarded(self, receive: Receive) -> None:
        """Run until done, or until the client goes, time is up or the gateway must end.

        Raises:
            GatewayError, ClientGone: one of them, whichever ended it.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                guards = [
                    tasks.create_task(_hang_up(receive)),
                    tasks.create_task(self._client.watch()),
                    tasks.create_task(_cut(self._machinery.drain)),
                ]
                async with timeout(self._machinery.request_timeout_s):
                    await self._serve()
                for guard in guards:
                    guard.cancel()
        except BaseExceptionGroup as group:
            gone, others = group.split(ClientGone)
            if gone is not None and (others is None or first_gateway_error(others) is not None):
                raise ClientGone from None
            if group.split(TimeoutError)[1] is None:
                raise Expired("the request took too long; ask for fewer tokens") from None
            if (error := first_gateway_error(group)) is not None:
                raise error from None
            raise

    async def _serve(self) -> None:
        machinery, call, events, record = self._machinery, self._call, self._events, self._record
        jobs = await machinery.factory.jobs(call)
        record.tokenised_s = monotonic_s()
        # What fits into the context is small beside the bodies that do not.
        self._lease.release()
        tally = _Tally(prompt_tokens=sum(len(job.prompt_ids) for job in jobs))
        record.prompt_tokens = tally.prompt_tokens
        machinery.metrics.prompt_in(tally.prompt_tokens)

        async def take(index: int, piece: Piece) -> None:
            tally.output_tokens += piece.tokens
            record.output_tokens = tally.output_tokens
            if piece.tokens and record.first_token_s is None:
                record.first_token_s = monotonic_s()
            if piece.finish_reason is not None:
                record.finish_reasons.append(piece.finish_reason)
            if call.stream:
                await events.piece(index, piece)
                return
            tally.texts.setdefault(index, []).append(piece.text)
            if piece.finish_reason is not None:
                tally.reasons[index] = piece.finish_reason

        await self._run(jobs, take)
        if call.stream:
            await events.finish(tally.usage())
        else:
            await self._send_whole(tally)

    async def _run(
        self, jobs: Sequence[Job], take: Callable[[int, Piece], Awaitable[None]]
    ) -> None:
        run, arrived_s = self._machinery.generator.run, self._record.parsed_s
        assert arrived_s is not None, "the body has been read"

        async def run_choice(index: int, job: Job) -> None:
            choice = self._record.add_choice()
            async with contextlib.aclosing(run(job, choice, arrived_s)) as pieces:
                async for piece in pieces:
                    await take(index, piece)

        if len(jobs) == 1:
            await run_choice(0, jobs[0])
            return
        async with asyncio.TaskGroup() as tasks:
            for index, job in enumerate(jobs):
                tasks.create_task(run_choice(index, job))

    async def _send_whole(self, tally: _Tally) -> None:
        envelope = self._call.envelope
        data = whole_body(envelope, self._call.layout, tally.outputs(), tally.usage())
        body = msgspec.json.encode(data)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        await self._client.send(start)
        await self._client.send({"type": "http.response.body", "body": body})


async def _hang_up(receive: Receive) -> None:
    """Raise ClientGone when the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone


async def _cut(drain: Drain) -> None:
    """Raise Draining when the gateway must end."""
    await drain.cut.wait()
    raise Draining("the gateway was shut down before the request ended; send it again")
