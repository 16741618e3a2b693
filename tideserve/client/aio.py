"""The client for asyncio."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Generic, Self, TypeVar, Unpack

import grpc
import grpc.aio

from tideserve.client import request as build
from tideserve.client.connection import GatewayConnection, StreamedCall
from tideserve.client.errors import error_of
from tideserve.gateway.v1 import gateway_pb2 as pb
from tideserve.gateway.v1 import gateway_pb2_grpc

T = TypeVar("T", pb.StreamChatResponse, pb.StreamCompleteResponse)


class AsyncStream(StreamedCall, Generic[T]):
    """A streamed answer, piece by piece; leaving it early ends the request.

    `id` is the response's, known once the first piece has come.
    """

    def __init__(self, call: Any) -> None:
        """`call`: a running call of gRPC's that yields T."""
        super().__init__(call)
        self._pieces: AsyncIterator[T] = call.__aiter__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        """The next piece. Raises TideserveError."""
        try:
            piece = await self._pieces.__anext__()
        except grpc.RpcError as error:
            raise error_of(error) from None
        self.id = self.id or piece.id
        return piece


class AsyncClient(GatewayConnection):
    """A connection to tideserve, to be made and used in one event loop. See Client."""

    _channels = grpc.aio
    _stub: "gateway_pb2_grpc.GatewayServiceAsyncStub"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls that still run end."""
        await self._channel.close()

    async def chat(
        self,
        messages: build.Messages,
        *,
        model: str,
        timeout_s: float | None = None,
        **fields: Unpack[build.ChatFields],
    ) -> pb.ChatResponse:
        """The assistant's next message."""
        request = build.chat_request(messages, model, fields)
        return await self._call(self._stub.Chat, request, timeout_s, request.options.request_id)

    def stream_chat(
        self,
        messages: build.Messages,
        *,
        model: str,
        timeout_s: float | None = None,
        **fields: Unpack[build.ChatFields],
    ) -> AsyncStream[pb.StreamChatResponse]:
        """The assistant's next message as it is made; use it in an `async with` statement."""
        request = pb.StreamChatRequest(chat=build.chat_request(messages, model, fields))
        made = self._keywords(timeout_s, request.chat.options.request_id)
        return AsyncStream(self._stub.StreamChat(request, **made))

    async def complete(
        self,
        prompts: build.Prompts,
        *,
        model: str,
        timeout_s: float | None = None,
        **fields: Unpack[build.CompletionFields],
    ) -> pb.CompleteResponse:
        """The text that follows prompts."""
        request = build.completion_request(prompts, model, fields)
        return await self._call(self._stub.Complete, request, timeout_s, request.options.request_id)

    def stream_complete(
        self,
        prompts: build.Prompts,
        *,
        model: str,
        timeout_s: float | None = None,
        **fields: Unpack[build.CompletionFields],
    ) -> AsyncStream[pb.StreamCompleteResponse]:
        """The text that follows prompts as it is made; use it in an `async with` statement."""
        completion = build.completion_request(prompts, model, fields)
        request = pb.StreamCompleteRequest(completion=completion)
        made = self._keywords(timeout_s, completion.options.request_id)
        return AsyncStream(self._stub.StreamComplete(request, **made))

    async def tokenize(
        self,
        text: str | build.Messages,
        *,
        model: str,
        chat: bool = False,
        timeout_s: float | None = None,
        **fields: Unpack[build.TemplateFields],
    ) -> list[int]:
        """Token ids of a text, or with `chat` of messages."""
        request = build.tokenize_request(text, model, chat, fields)
        return list((await self._call(self._stub.Tokenize, request, timeout_s)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str, timeout_s: float | None = None
    ) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids)
        return str((await self._call(self._stub.Detokenize, request, timeout_s)).text)

    async def models(self, *, timeout_s: float | None = None) -> list[pb.Model]:
        """The models that requests can name."""
        request = pb.ListModelsRequest()
        return list((await self._call(self._stub.ListModels, request, timeout_s)).models)

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """End requests by an id: of a response, a chosen one or a header's; whether one ran."""
        request = pb.CancelRequest(request_id=request_id)
        return bool((await self._call(self._stub.Cancel, request, timeout_s)).found)

    async def _call(
        self,
        method: Callable[..., Any],
        request: Any,
        timeout_s: float | None,
        request_id: str = "",
    ) -> Any:
        try:
            return await method(request, **self._keywords(timeout_s, request_id))
        except grpc.RpcError as error:
            raise error_of(error) from None
