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
    """Iterator over the pieces of a streamed response; leaving the context cancels the request.

    `id` is the response's id, set when the first piece arrives.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Return the next piece. Raises TideserveError."""
        try:
            piece = next(self._call)
        except grpc.RpcError as error:
            raise error_of(error) from None
        self.id = self.id or piece.id
        return piece


class Client(GatewayConnection):
    """A connection to tideserve, safe for use by several threads.

    All calls raise TideserveError. A call that cannot be served now is retried up to three times,
    after the delay that the server asks for. A call's `timeout_s` defaults to the client's and
    includes queueing, generation and retries.
    """

    _channels = grpc
    _stub: gateway_pb2_grpc.GatewayServiceStub

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end running calls."""
        self._channel.close()

    def chat(
        self,
        messages: build.Messages,
        *,
        model: str,
        timeout_s: float | None = None,
        **fields: Unpack[build.ChatFields],
    ) -> pb.ChatResponse:
        """Generate the assistant's next message."""
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
        """Stream the assistant's next message; use the stream in a `with` statement."""
        request = pb.StreamChatRequest(chat=build.chat_request(messages, model, fields))
        keywords = self._keywords(timeout_s, request.chat.options.request_id)
        return Stream(self._stub.StreamChat(request, **keywords))

    def complete(
        self,
        prompts: build.Prompts,
        *,
        model: str,
        timeout_s: float | None = None,
        **fields: Unpack[build.CompletionFields],
    ) -> pb.CompleteResponse:
        """Generate the text that follows each prompt."""
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
        """Stream the text that follows each prompt; use the stream in a `with` statement."""
        completion = build.completion_request(prompts, model, fields)
        request = pb.StreamCompleteRequest(completion=completion)
        keywords = self._keywords(timeout_s, completion.options.request_id)
        return Stream(self._stub.StreamComplete(request, **keywords))

    def tokenize(
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
        return list(self._call(self._stub.Tokenize, request, timeout_s).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, model: str, timeout_s: float | None = None
    ) -> str:
        """Return the text of token ids."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids)
        return str(self._call(self._stub.Detokenize, request, timeout_s).text)

    def models(self, *, timeout_s: float | None = None) -> list[pb.Model]:
        """List the models that requests can name."""
        request = pb.ListModelsRequest()
        return list(self._call(self._stub.ListModels, request, timeout_s).models)

    def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Cancel requests by the response's id, the client's `request_id` or an `x-request-id`.

        Returns whether a request was running.
        """
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
