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
    """Iterator over the pieces of a streamed response; leaving the context cancels the request.

    `id` is the response's id, set when the first piece arrives.
    """

    def __init__(self, call: Any) -> None:
        """`call`: a running gRPC call that yields T."""
        super().__init__(call)
        self._pieces: AsyncIterator[T] = call.__aiter__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        """Return the next piece. Raises TideserveError."""
        try:
            piece = await self._pieces.__anext__()
        except grpc.RpcError as error:
            raise error_of(error) from None
        self.id = self.id or piece.id
        return piece


class AsyncClient(GatewayConnection):
    """A connection to tideserve for use within an event loop; see `Client`."""

    _channels = grpc.aio
    _stub: "gateway_pb2_grpc.GatewayServiceAsyncStub"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection and end running calls."""
        await self._channel.close()

    async def chat(
        self,
        messages: build.Messages,
        *,
        model: str,
        timeout_s: float | None = None,
        **fields: Unpack[build.ChatFields],
    ) -> pb.ChatResponse:
        """Generate the assistant's next message."""
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
        """Stream the assistant's next message; use the stream in an `async with` statement."""
        request = pb.StreamChatRequest(chat=build.chat_request(messages, model, fields))
        keywords = self._keywords(timeout_s, request.chat.options.request_id)
        return AsyncStream(self._stub.StreamChat(request, **keywords))

    async def complete(
        self,
        prompts: build.Prompts,
        *,
        model: str,
        timeout_s: float | None = None,
        **fields: Unpack[build.CompletionFields],
    ) -> pb.CompleteResponse:
        """Generate the text that follows each prompt."""
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
        """Stream the text that follows each prompt; use the stream in an `async with` statement."""
        completion = build.completion_request(prompts, model, fields)
        request = pb.StreamCompleteRequest(completion=completion)
        keywords = self._keywords(timeout_s, completion.options.request_id)
        return AsyncStream(self._stub.StreamComplete(request, **keywords))

    async def tokenize(
        self,
        text: str | build.Messages,
        *,
        model: str,
        chat: bool = False,
        timeout_s: float | None = None,
        **fields: Unpack[build.TemplateFields],
    ) -> list[int]:
        """Tokenise a text, or with `chat`, messages; return the token ids."""
        request = build.tokenize_request(text, model, chat, fields)
        return list((await self._call(self._stub.Tokenize, request, timeout_s)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str, timeout_s: float | None = None
    ) -> str:
        """Return the text of token ids."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids)
        return str((await self._call(self._stub.Detokenize, request, timeout_s)).text)

    async def models(self, *, timeout_s: float | None = None) -> list[pb.Model]:
        """List the models that requests can name."""
        request = pb.ListModelsRequest()
        return list((await self._call(self._stub.ListModels, request, timeout_s)).models)

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Cancel requests by the response's id, the client's `request_id` or an `x-request-id`.

        Returns whether a request was running.
        """
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
