"""Writes the responses of the typed gRPC API, complete and streamed."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from google.protobuf.message import Message

from services.gateway.grpc import translate
from services.gateway.grpc.call import Call
from services.gateway.records.request_record import RequestRecord
from services.gateway.serving.output import (
    Output,
    OutputPiece,
    Outputs,
    Usage,
    count_logprobs,
    with_top,
)
from services.gateway.serving.prepared import PreparedChoice, PreparedRequest
from services.gateway.text.tokenizer import TextPool
from tideserve.gateway.v1 import gateway_pb2 as pb


class _WholeWriter:
    """A Writer that sends the response once all choices are complete."""

    def __init__(self, call: Call, pool: TextPool) -> None:
        """`pool` builds long responses."""
        self._call = call
        self._pool = pool
        self._choices: Sequence[PreparedChoice] = ()

    def begin(self, prepared: PreparedRequest) -> None:
        self._head, self._texts = _head(prepared), prepared.texts
        self._choices = prepared.choices
        self._outputs = Outputs(len(prepared.choices))

    async def piece(self, index: int, piece: OutputPiece) -> None:
        self._outputs.add(index, piece)

    async def finish(self, usage: Usage) -> None:
        size = sum(
            count_logprobs(output.logprobs, output.prompt_logprobs) for output in self._outputs.all
        )
        response = await self._pool.run(partial(self._response, usage), size)
        await self._call.client.send(response)

    def _response(self, usage: Usage) -> Message:
        raise NotImplementedError

    def _choice_fields(self, output: Output) -> dict[str, Any]:
        """Fields that chat and completion choices share."""
        return {
            "token_ids": output.token_ids,
            "finish_reason": translate.finish_reason(output.parsed.finish_reason),
            "stop_reason": translate.stop_reason(output.stop_reason),
            "logprobs": translate.logprobs(output.logprobs, self._texts),
        }

    def _response_fields(self, usage: Usage) -> dict[str, Any]:
        return self._head | _end_fields(usage, self._call.record)


class ChatWriter(_WholeWriter):
    """Writes the response of Chat."""

    def _response(self, usage: Usage) -> Message:
        choices = [
            pb.ChatChoice(
                index=index,
                message=translate.assistant_message(output.parsed),
                **self._choice_fields(output),
            )
            for index, output in enumerate(self._outputs.all)
        ]
        # All choices have the same prompt.
        prompt = translate.logprobs(self._outputs.all[0].prompt_logprobs, self._texts)
        return pb.ChatResponse(
            choices=choices, prompt_logprobs=prompt, **self._response_fields(usage)
        )


class CompletionWriter(_WholeWriter):
    """Writes the response of Complete."""

    def _response(self, usage: Usage) -> Message:
        choices = [
            pb.CompletionChoice(
                index=index,
                text=output.text,
                prompt_logprobs=translate.logprobs(
                    with_top(output.prompt_logprobs, choice.prompt_top), self._texts
                ),
                **self._choice_fields(output),
            )
            for index, (choice, output) in enumerate(
                zip(self._choices, self._outputs.all, strict=True)
            )
        ]
        return pb.CompleteResponse(choices=choices, **self._response_fields(usage))


StreamResponse = type[pb.StreamChatResponse] | type[pb.StreamCompleteResponse]


class MessageStreamWriter:
    """A Writer that streams messages; the pieces of several choices may interleave.

    The last choice's final message waits for the usage, which `finish` merges into it.
    """

    def __init__(self, call: Call, kind: StreamResponse, pool: TextPool) -> None:
        """`pool` builds long messages."""
        self._call = call
        self._pool = pool
        self._kind = kind
        self._head: dict[str, Any] = {}
        self._sent: list[int] = []
        self._running = 0
        self._last: Any = None
        self._write_lock = asyncio.Lock()

    def begin(self, prepared: PreparedRequest) -> None:
        self._head, self._texts = _head(prepared), prepared.texts
        self._running = len(prepared.choices)
        self._sent = [0] * self._running

    async def piece(self, index: int, piece: OutputPiece) -> None:
        if piece.prompt_logprobs:
            size = count_logprobs(piece.prompt_logprobs)
            message = await self._pool.run(partial(self._message, index, piece), size)
        else:
            message = self._message(index, piece)
        self._sent[index] += len(piece.token_ids)
        self._running -= piece.finish_reason is not None
        # Hold back the final message of the last choice for the usage.
        if self._running == 0:
            self._last = message
        else:
            await self._send(message)

    def _message(self, index: int, piece: OutputPiece) -> Any:
        return self._kind(
            index=index,
            first_index=self._sent[index],
            token_ids=piece.token_ids,
            finish_reason=translate.finish_reason(piece.parsed.finish_reason),
            stop_reason=translate.stop_reason(piece.stop_reason),
            logprobs=translate.logprobs(piece.logprobs, self._texts),
            prompt_logprobs=translate.logprobs(piece.prompt_logprobs, self._texts),
            **translate.delta_fields(piece.parsed),
        )

    async def finish(self, usage: Usage) -> None:
        last_fields = self._kind(**_end_fields(usage, self._call.record))
        self._last.MergeFrom(last_fields)
        await self._send(self._last)

    async def _send(self, message: Any) -> None:
        async with self._write_lock:
            # Id, time and model go out with the first message only.
            if self._head:
                message.MergeFrom(self._kind(**self._head))
                self._head = {}
            await self._call.client.send(message)
            self._call.tokens_sent = self._sent[0]


def _head(prepared: PreparedRequest) -> dict[str, Any]:
    return {"id": prepared.response_id, "created": prepared.created, "model": prepared.model}


def _end_fields(usage: Usage, record: RequestRecord) -> dict[str, Any]:
    phases = record.phases
    return {
        "usage": pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        ),
        "timing": pb.Timing(
            queue_s=phases.queue_s, prefill_s=phases.prefill_s, decode_s=phases.decode_s
        ),
    }
