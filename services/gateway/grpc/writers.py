"""Answers of the typed API, whole and streamed."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from services.core.request import FinishReason
from services.gateway.grpc import translate
from services.gateway.grpc.call import Call
from services.gateway.output import Piece, Usage
from services.gateway.prepared import PreparedRequest
from services.gateway.request_record import RequestRecord
from tideserve.gateway.v1 import gateway_pb2 as pb


@dataclass(slots=True)
class _Choice:
    """What has come of one choice."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def take(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason

    def ending(self) -> dict[str, Any]:
        """Fields that the choices of both APIs have."""
        return {
            "token_ids": self.token_ids,
            "finish_reason": translate.finish_reason(self.finish_reason),
            "stop_reason": translate.stop_reason(self.stop_reason),
        }


class _WholeWriter:
    """An answer that is sent when all choices have ended."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._choices: list[_Choice] = []

    def begin(self, prepared: PreparedRequest) -> None:
        """See Writer."""
        self._head = _head(prepared)
        self._choices = [_Choice() for _ in prepared.choices]

    async def piece(self, index: int, piece: Piece) -> None:
        """See Writer."""
        self._choices[index].take(piece)

    def _tail(self, usage: Usage) -> dict[str, Any]:
        return self._head | _end(usage, self._call.record)


class ChatWriter(_WholeWriter):
    """The answer of Chat."""

    async def finish(self, usage: Usage) -> None:
        """See Writer."""
        choices = [
            pb.ChatChoice(
                index=index,
                message=pb.Message(role=pb.ROLE_ASSISTANT, text="".join(choice.texts)),
                **choice.ending(),
            )
            for index, choice in enumerate(self._choices)
        ]
        await self._call.client.send(pb.ChatResponse(choices=choices, **self._tail(usage)))


class CompletionWriter(_WholeWriter):
    """The answer of Complete."""

    async def finish(self, usage: Usage) -> None:
        """See Writer."""
        choices = [
            pb.CompletionChoice(index=index, text="".join(choice.texts), **choice.ending())
            for index, choice in enumerate(self._choices)
        ]
        await self._call.client.send(pb.CompleteResponse(choices=choices, **self._tail(usage)))


StreamResponse = type[pb.StreamChatResponse] | type[pb.StreamCompleteResponse]


class StreamWriter:
    """The messages of a stream; choices may take turns.

    The ending of the choice that ends last waits for the counts, which follow at once.
    """

    def __init__(self, call: Call, kind: StreamResponse) -> None:
        self._call = call
        self._kind = kind
        self._head: dict[str, Any] = {}
        self._sent: list[int] = []
        self._running = 0
        self._last: Any = None
        self._turn = asyncio.Lock()

    def begin(self, prepared: PreparedRequest) -> None:
        """See Writer."""
        self._head = _head(prepared)
        self._running = len(prepared.choices)
        self._sent = [0] * self._running

    async def piece(self, index: int, piece: Piece) -> None:
        """See Writer."""
        message = self._kind(
            index=index,
            first_index=self._sent[index],
            token_ids=piece.token_ids,
            text=piece.text,
            finish_reason=translate.finish_reason(piece.finish_reason),
            stop_reason=translate.stop_reason(piece.stop_reason),
        )
        self._sent[index] += len(piece.token_ids)
        self._running -= piece.finish_reason is not None
        if self._running == 0:
            self._last = message
        else:
            await self._send(message)

    async def finish(self, usage: Usage) -> None:
        """See Writer."""
        ending = self._kind(**_end(usage, self._call.record))
        self._last.MergeFrom(ending)
        await self._send(self._last)

    async def _send(self, message: Any) -> None:
        async with self._turn:
            if self._head:
                message.MergeFrom(self._kind(**self._head))
                self._head = {}
            await self._call.client.send(message)
            self._call.tokens_sent = self._sent[0]


def _head(prepared: PreparedRequest) -> dict[str, Any]:
    return {"id": prepared.response_id, "created": prepared.created, "model": prepared.model}


def _end(usage: Usage, record: RequestRecord) -> dict[str, Any]:
    phases = record.phases
    return {
        "usage": pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        ),
        "timing": pb.Timing(
            queue_s=phases.queue_s, prefill_s=phases.prefill_s, decode_s=phases.decode_s
        ),
    }
