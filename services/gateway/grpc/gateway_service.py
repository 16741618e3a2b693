"""Implements tideserve.gateway.v1.GatewayService, the typed gRPC API."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from services.common.clock import unix_s
from services.gateway.api.chat import chat_of
from services.gateway.api.completion import completion_of
from services.gateway.api.field_names import SAME_NAMES
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.parameters import UnknownFields
from services.gateway.api.tokens import Detokenize, ParsedBody
from services.gateway.bounds.body_budget import TakenOnce
from services.gateway.grpc import translate
from services.gateway.grpc.call import Call, parsed
from services.gateway.grpc.interceptors import Method
from services.gateway.grpc.unknown_fields import decoded_known
from services.gateway.grpc.writers import ChatWriter, CompletionWriter, MessageStreamWriter
from services.gateway.records.request_record import fingerprint_of
from services.gateway.serving.canceller import Canceller
from services.gateway.serving.serving import RequestServing, Writer
from services.gateway.text.tokenizer import TextPool
from services.gateway.vocabulary.errors import BadRequest
from tideserve.gateway.v1 import gateway_pb2 as pb

A = TypeVar("A", bound=ParsedBody)
Parse = Callable[[bytes, UnknownFields], A]
"""Parses a call's message into a request body; adds its unknown fields to the second argument."""
SERVICE = pb.DESCRIPTOR.services_by_name["GatewayService"]


class GatewayService:
    """The methods have the names and messages of the service definition in gateway.proto."""

    def __init__(self, serving: RequestServing, canceller: Canceller, pool: TextPool) -> None:
        self._serving = serving
        self._canceller = canceller
        self._pool = pool
        self._created = unix_s()

    def methods(self) -> dict[str, Method]:
        """All methods of the service definition, by full name."""
        return {
            f"/{SERVICE.full_name}/{method.name}": Method(
                getattr(self, method.name), names=translate.NAMES.get(method.name, SAME_NAMES)
            )
            for method in SERVICE.methods
        }

    async def Chat(self, call: Call) -> None:
        await self._generate(call, _chat_body, ChatWriter(call, self._pool))

    async def StreamChat(self, call: Call) -> None:
        await self._generate(
            call,
            _stream_chat_body,
            MessageStreamWriter(call, pb.StreamChatResponse, self._pool),
        )

    async def Complete(self, call: Call) -> None:
        await self._generate(call, _completion_body, CompletionWriter(call, self._pool))

    async def StreamComplete(self, call: Call) -> None:
        writer = MessageStreamWriter(call, pb.StreamCompleteResponse, self._pool)
        await self._generate(call, _stream_completion_body, writer)

    async def Tokenize(self, call: Call) -> None:
        async with self._request(call, _tokenize_body) as body:
            entry = self._serving.models.entry(body.model, call.record.principal)
            token_ids = await entry.preparer.token_ids(body, call.record)
            response = pb.TokenizeResponse(token_ids=token_ids, max_model_len=entry.max_model_len)
            await call.client.send(response)

    async def Detokenize(self, call: Call) -> None:
        async with self._request(call, _detokenize_body) as body:
            entry = self._serving.models.entry(body.model, call.record.principal)
            text = await entry.preparer.text_of(body.token_ids)
            await call.client.send(pb.DetokenizeResponse(text=text))

    async def ListModels(self, call: Call) -> None:
        await call.read_small(pb.ListModelsRequest)
        models = [
            pb.Model(
                id=name,
                created=self._created,
                owned_by="tideserve",
                max_model_len=entry.max_model_len,
                root=entry.root,
            )
            for name, entry in self._serving.models.allowed(call.record.principal)
        ]
        await call.client.send(pb.ListModelsResponse(models=models))

    async def Cancel(self, call: Call) -> None:
        request = await call.read_small(pb.CancelRequest)
        if not request.request_id:
            raise BadRequest(
                "'request_id' is missing; send the id of a request", param="request_id"
            )
        owner = call.record.principal.owner
        cancelled = await self._canceller.cancel(owner, request.request_id)
        await call.client.send(pb.CancelResponse(found=cancelled))

    @contextlib.asynccontextmanager
    async def _request(self, call: Call, parse: Parse[A]) -> AsyncIterator[A]:
        """Read and parse the call's message; it occupies a request slot while the block runs."""
        data = await call.message()
        with self._serving.entered(call.record) as lease:
            body = await parsed(data, self._with_unknown(parse), lease, self._pool)
            call.record.warnings += body.warnings
            yield body

    def _with_unknown(self, parse: Parse[A]) -> Callable[[bytes], A]:
        refuse = self._serving.refuse_unknown
        return lambda data: parse(data, UnknownFields(refuse))

    async def _generate(self, call: Call, parse: Parse[GenerationRequest], writer: Writer) -> None:
        serving = self._serving
        data = await call.message()
        with serving.entered(call.record) as lease:
            body = TakenOnce(await parsed(data, self._with_unknown(parse), lease, self._pool))
            call.record.fingerprint = fingerprint_of(data)
            # Free the message before the generation, which may last minutes.
            del data
            await serving.respond(
                body, call.record, lease, writer, call.client, timeout_s=call.remaining_s
            )


def _tokenize_body(data: bytes, unknown: UnknownFields) -> GenerationRequest:
    fields = translate.tokenize_fields(decoded_known(pb.TokenizeRequest, data, unknown))
    return chat_of(fields, unknown) if "messages" in fields else completion_of(fields, unknown)


def _detokenize_body(data: bytes, unknown: UnknownFields) -> Detokenize:
    request = decoded_known(pb.DetokenizeRequest, data, unknown)
    return Detokenize(request.model, request.token_ids, unknown.warnings)


def _chat_body(data: bytes, unknown: UnknownFields) -> GenerationRequest:
    request = decoded_known(pb.ChatRequest, data, unknown)
    return chat_of(translate.chat_fields(request), unknown)


def _stream_chat_body(data: bytes, unknown: UnknownFields) -> GenerationRequest:
    chat = decoded_known(pb.StreamChatRequest, data, unknown).chat
    return chat_of(translate.chat_fields(chat) | {"stream": True}, unknown)


def _completion_body(data: bytes, unknown: UnknownFields) -> GenerationRequest:
    request = decoded_known(pb.CompleteRequest, data, unknown)
    return completion_of(translate.completion_fields(request), unknown)


def _stream_completion_body(data: bytes, unknown: UnknownFields) -> GenerationRequest:
    completion = decoded_known(pb.StreamCompleteRequest, data, unknown).completion
    return completion_of(translate.completion_fields(completion) | {"stream": True}, unknown)
