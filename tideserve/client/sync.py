"""The client for threads."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Self, TypeVar, Unpack

import grpc

from tideserve.client import request as build
from tideserve.client.connection import GatewayConnection, StreamedCall
from tideserve.client.errors import error_of
from tideserve.gateway.v1 import gateway_pb2 as pb
from tideserve.gateway.v1 import gateway_pb2_grpc

T = TypeVar("T", pb.StreamChatResponse, pb.StreamCompleteResponse)


class Stream(StreamedCall, Generic[T]):
    """A streamed answer, piece by piece; leaving it early ends the request.

    `id` is the response's, known once the first piece has come.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """The next piece. Raises TideserveError."""
        try:
            piece = next(self._call)
        except grpc.RpcError as error:
            raise error_of(error) from None
        self.id = self.id or piece.id
        return piece


class Client(GatewayConnection):
    """A connection to tideserve; may be used by several threads.

    Every call raises TideserveError. One that nobody can serve now is made again up to three times,
    when the server says so. `timeout_s` of a call is that of the client by default; queueing,
    generating and retries all count.
    """

    _channels = grpc
    _stub: gateway_pb2_grpc.GatewayServiceStub

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls that still run end."""
        self._channel.close()

    def chat(
        self,
        messages: build.Messages,
        *,
        model: str,
        timeout_s: float | None = None,
        **fields: Unpack[build.ChatFields],
    ) -> pb.ChatResponse:
        """The assistant's next message."""
        request = build.chat_request(messages, model, fields)
        return self._call(self._stub.Chat, request, timeout_s, request.options.request_id)

    def stream_chat(
        self,
        messages: build.Messages,
        *,
        model: str,
        timeout_s: float | None = None,
        **fields: Unpack[build.ChatFields],
    ) -> Stream[pb.StreamChatResponse]:
        """The assistant's next message as it is made; use it in a `with` statement."""
        request = pb.StreamChatRequest(chat=build.chat_request(messages, model, fields))
        made = self._keywords(timeout_s, request.chat.options.request_id)
        return Stream(self._stub.StreamChat(request, **made))

    def complete(
        self,
        prompts: build.Prompts,
        *,
        model: str,
        timeout_s: float | None = None,
        **fields: Unpack[build.CompletionFields],
    ) -> pb.CompleteResponse:
        """The text that follows prompts."""
        request = build.completion_request(prompts, model, fields)
        return self._call(self._stub.Complete, request, timeout_s, request.options.request_id)

    def stream_complete(
        self,
        prompts: build.Prompts,
        *,
        model: str,
        timeout_s: float | None = None,
        **fields: Unpack[build.CompletionFields],
    ) -> Stream[pb.StreamCompleteResponse]:
        """The text that follows prompts as it is made; use it in a `with` statement."""
        completion = build.completion_request(prompts, model, fields)
        request = pb.StreamCompleteRequest(completion=completion)
        made = self._keywords(timeout_s, completion.options.request_id)
        return Stream(self._stub.StreamComplete(request, **made))

    def tokenize(
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
        return list(self._call(self._stub.Tokenize, request, timeout_s).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, model: str, timeout_s: float | None = None
    ) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids)
        return str(self._call(self._stub.Detokenize, request, timeout_s).text)

    def models(self, *, timeout_s: float | None = None) -> list[pb.Model]:
        """The models that requests can name."""
        request = pb.ListModelsRequest()
        return list(self._call(self._stub.ListModels, request, timeout_s).models)

    def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """End requests by an id: of a response, a chosen one or a header's; whether one ran."""
        request = pb.CancelRequest(request_id=request_id)
        return bool((self._call(self._stub.Cancel, request, timeout_s)).found)

    def _call(
        self,
        method: Callable[..., Any],
        request: Any,
        timeout_s: float | None,
        request_id: str = "",
    ) -> Any:
        try:
            return method(request, **self._keywords(timeout_s, request_id))
        except grpc.RpcError as error:
            raise error_of(error) from None
