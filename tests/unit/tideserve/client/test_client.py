"""Both clients against a fake gateway: metadata, deadlines, retries, errors, streams."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest
from opentelemetry import trace

from services.gateway.grpc.errors import abort, status_of
from services.gateway.vocabulary import errors
from services.gateway.vocabulary.errors import GatewayError
from tests.support.waiting import eventually
from tideserve import client as tide
from tideserve.gateway.v1 import gateway_pb2 as pb
from tideserve.gateway.v1 import gateway_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class FakeGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Responds at once, or fails a configured number of times."""

    target: str = ""
    fails: list[GatewayError] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    remaining_s: float | None = None
    requests: list[Any] = field(default_factory=list)
    # Streams wait before their last piece.
    holding: asyncio.Event | None = None
    cancelled: bool = False

    async def _begin(self, request: Any, context: Context) -> None:
        self.calls += 1
        self.requests.append(request)
        self.metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
        self.remaining_s = context.time_remaining()
        if self.fails:
            await self._fail(context)

    async def _fail(self, context: Context, next_index: int | None = None) -> None:
        error = self.fails.pop(0)
        await abort(context, status_of(error, "log-id", next_index), error)

    async def Chat(self, request: pb.ChatRequest, context: Context) -> pb.ChatResponse:
        await self._begin(request, context)
        return pb.ChatResponse(id="r1")

    async def Complete(self, request: pb.CompleteRequest, context: Context) -> pb.CompleteResponse:
        await self._begin(request, context)
        return pb.CompleteResponse(id="r2")

    async def StreamChat(
        self, request: pb.StreamChatRequest, context: Context
    ) -> AsyncIterator[pb.StreamChatResponse]:
        await self._begin(request, context)
        try:
            yield pb.StreamChatResponse(id="r3", text="a")
            if self.holding is not None:
                await self.holding.wait()
        except (asyncio.CancelledError, GeneratorExit):
            # GeneratorExit: the client left while this was still sending the first piece.
            self.cancelled = True
            raise
        if self.fails:
            await self._fail(context, next_index=1)
        yield pb.StreamChatResponse(text="b", finish_reason=pb.FINISH_REASON_STOP)

    async def StreamComplete(
        self, request: pb.StreamCompleteRequest, context: Context
    ) -> AsyncIterator[pb.StreamCompleteResponse]:
        await self._begin(request, context)
        yield pb.StreamCompleteResponse(id="r4", text="a")

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        await self._begin(request, context)
        return pb.TokenizeResponse(token_ids=[1, 2])

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        await self._begin(request, context)
        return pb.DetokenizeResponse(text="ab")

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        await self._begin(request, context)
        return pb.ListModelsResponse(models=[pb.Model(id="m")])

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        await self._begin(request, context)
        return pb.CancelResponse(found=request.request_id == "r1")


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    server = grpc.aio.server()
    fake = FakeGateway()
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(fake, server)
    fake.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield fake
    await server.stop(0)


async def test_sync_and_async_clients_send_the_same_requests(gateway: FakeGateway) -> None:
    def in_a_thread() -> list[Any]:
        with tide.Client(gateway.target, api_key="k") as client:
            with client.stream_chat("hi", model="m") as chat:
                texts = [piece.text for piece in chat]
            with client.stream_complete("hi", model="m") as completion:
                texts += [piece.text for piece in completion]
            return [
                (texts, chat.id, completion.id),
                client.chat("hi", model="m", temperature=0).id,
                client.complete("hi", model="m", max_tokens=3).id,
                client.tokenize("hi", model="m"),
                client.detokenize([1], model="m"),
                client.models(),
                client.cancel("r1"),
            ]

    sent = await asyncio.to_thread(in_a_thread)
    asked, gateway.requests = gateway.requests, []
    async with tide.AsyncClient(gateway.target, api_key="k") as client:
        async with client.stream_chat("hi", model="m") as chat:
            texts = [piece.text async for piece in chat]
        async with client.stream_complete("hi", model="m") as completion:
            texts += [piece.text async for piece in completion]
        assert sent == [
            (texts, chat.id, completion.id),
            (await client.chat("hi", model="m", temperature=0)).id,
            (await client.complete("hi", model="m", max_tokens=3)).id,
            await client.tokenize("hi", model="m"),
            await client.detokenize([1], model="m"),
            await client.models(),
            await client.cancel("r1"),
        ]
    assert sent[-1] is True, "the outcome of Cancel"
    assert (texts, chat.id, completion.id) == (["a", "b", "a"], "r3", "r4")
    assert asked == gateway.requests
    assert gateway.metadata["authorization"] == "Bearer k"


async def test_calls_have_a_deadline_an_id_and_a_trace(gateway: FakeGateway) -> None:
    context = trace.SpanContext(
        int(TRACEPARENT[3:35], 16), int(TRACEPARENT[36:52], 16), False, trace.TraceFlags(1)
    )
    async with tide.AsyncClient(gateway.target, timeout_s=50) as client:
        await client.chat("hi", model="m")
        assert gateway.remaining_s is not None and 20 < gateway.remaining_s < 51
        assert not gateway.metadata.keys() & {"authorization", "x-request-id", "traceparent"}
        with trace.use_span(trace.NonRecordingSpan(context)):
            await client.chat("hi", model="m", timeout_s=20, request_id="mine")
        assert 0 < gateway.remaining_s < 21
        assert gateway.metadata["x-request-id"] == "mine"
        assert gateway.metadata["traceparent"] == TRACEPARENT


@contextmanager
def fails_with(kind: type[tide.TideserveError]) -> Iterator["pytest.ExceptionInfo[Any]"]:
    with pytest.raises(kind) as caught:
        yield caught
    assert type(caught.value) is kind


async def test_an_unavailable_call_is_retried(gateway: FakeGateway) -> None:
    soon = errors.QueueFull("full", retry_after_s=0.001)
    async with tide.AsyncClient(gateway.target) as client:
        gateway.fails = [soon] * 3
        await client.chat("hi", model="m")
        assert gateway.calls == 4
        gateway.fails = [soon] * 5
        with fails_with(tide.Unavailable) as caught:
            await client.chat("hi", model="m")
        assert len(gateway.fails) == 1, "four attempts in all"
        assert caught.value.reason == "QUEUE_FULL"
        assert caught.value.retry_after_s == pytest.approx(0.002, abs=0.001)
        assert caught.value.request_id == "log-id"


async def test_errors_have_the_message_of_the_gateway(gateway: FakeGateway) -> None:
    cases: list[tuple[GatewayError, type[tide.TideserveError]]] = [
        (errors.BadRequest("no", param="n"), tide.InvalidRequest),
        (errors.ContextExceeded("no", param="messages"), tide.ContextLengthExceeded),
        (errors.NotSupported("no", param="audio"), tide.Unsupported),
        (errors.Unauthorized("no"), tide.Unauthenticated),
        (errors.Forbidden("no"), tide.PermissionDenied),
        (errors.NoSuchModel("no", param="model"), tide.ModelNotFound),
        (errors.DuplicateRequest("no"), tide.AlreadyExists),
        (errors.BodyTooLarge("no"), tide.ResourceExhausted),
        (errors.Expired("no", retry_after_s=2.0), tide.DeadlineExceeded),
        (errors.EngineFailed("no"), tide.ServerFailed),
    ]
    async with tide.AsyncClient(gateway.target) as client:
        for error, kind in cases:
            gateway.fails, gateway.calls = [error], 0
            with fails_with(kind) as caught:
                await client.complete("hi", model="m")
            assert gateway.calls == 1, "only what may be tried again is"
            assert (caught.value.message, caught.value.request_id) == ("no", "log-id")
            if kind in (tide.InvalidRequest, tide.ContextLengthExceeded):
                assert caught.value.field == error.param
        assert str(caught.value) == "no"


async def test_other_grpc_errors_are_translated(gateway: FakeGateway) -> None:
    async with tide.AsyncClient("127.0.0.1:1", timeout_s=5) as client:
        with fails_with(tide.Unavailable) as caught:
            await client.models()
        assert (caught.value.reason, caught.value.retry_after_s) == ("", None)
    gateway.holding = asyncio.Event()
    async with tide.AsyncClient(gateway.target) as client:
        with fails_with(tide.DeadlineExceeded):
            async with client.stream_chat("hi", model="m", timeout_s=0.05) as stream:
                async for _ in stream:
                    pass


async def test_a_broken_stream_is_not_retried(gateway: FakeGateway) -> None:
    gateway.holding = asyncio.Event()
    async with tide.AsyncClient(gateway.target) as client:
        stream = client.stream_chat("hi", model="m")
        assert (await anext(stream)).text == "a"
        gateway.fails = [errors.WorkerLost("it is gone", retry_after_s=0.001)]
        gateway.holding.set()
        with fails_with(tide.StreamLost) as caught:
            await anext(stream)
        assert caught.value.next_index == 1
        assert caught.value.metadata["cause"] == "WORKER_LOST"
        assert gateway.calls == 1


async def test_closing_a_stream_cancels_the_request(gateway: FakeGateway) -> None:
    gateway.holding = asyncio.Event()
    async with tide.AsyncClient(gateway.target) as client:
        async with client.stream_chat("hi", model="m") as stream:
            await anext(stream)
        await eventually(lambda: gateway.cancelled)

    def in_a_thread() -> None:
        with tide.Client(gateway.target) as client, client.stream_chat("hi", model="m") as stream:
            next(stream)

    gateway.cancelled = False
    await asyncio.to_thread(in_a_thread)
    await eventually(lambda: gateway.cancelled)
