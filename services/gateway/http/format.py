"""Builds the JSON of /v1/chat/completions and /v1/completions, streamed and complete."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.core.service import ServiceClass
from services.gateway.api.chat import ChatRequest
from services.gateway.api.completion import CompletionRequest
from services.gateway.http.logprobs import LogprobFormat
from services.gateway.serving.output import Output, OutputPiece, Usage, with_top
from services.gateway.serving.prepared import PreparedChoice, PreparedRequest
from services.gateway.vocabulary.delta import AnswerAccumulator, Delta, ToolCallDelta

TIERS = {
    ServiceClass.INTERACTIVE: "priority",
    ServiceClass.STANDARD: "default",
    ServiceClass.BATCH: "flex",
}
"""The OpenAI API's service tier of each class, reported in responses."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """Fields that all objects of a response share."""

    response_id: str
    created: int
    model: str
    service_tier: str | None = None

    def wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A response object of type `kind` around the choices."""
        wrapped = {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }
        if self.service_tier is not None:
            wrapped["service_tier"] = self.service_tier
        return wrapped


def envelope_of(prepared: PreparedRequest, body_tier: str | None) -> Envelope:
    """The envelope of a response; `body_tier`: the request's `service_tier`.

    Reports the tier if the request selects a tier or its class is not `standard`.
    """
    tier = TIERS[prepared.service_class]
    reported = body_tier is not None or prepared.service_class is not ServiceClass.STANDARD
    return Envelope(
        prepared.response_id, prepared.created, prepared.model, tier if reported else None
    )


class Format(Protocol):
    """The JSON form of an endpoint's choices."""

    chunk_kind: str
    whole_kind: str

    def begin(self, prepared: PreparedRequest) -> None:
        """Set the prepared request, before all other calls."""

    def opening(self, index: int, choice: PreparedChoice) -> dict[str, Any] | None:
        """The choice object of the first event; None if the stream starts with the output."""

    def has_event(self, piece: OutputPiece) -> bool:
        """Whether a piece without a finish reason is sent as an event."""

    def chunk(self, index: int, piece: OutputPiece) -> dict[str, Any]:
        """The choice object of an event with new output, a finish reason or both."""

    def whole(self, index: int, choice: PreparedChoice, output: Output) -> dict[str, Any]:
        """The choice object of a response that is not streamed."""

    def extra_fields(self, prepared: PreparedRequest, outputs: Sequence[Output]) -> dict[str, Any]:
        """Further top-level fields of a response, or of a stream's first event.

        `outputs`: of all choices; empty for a stream.
        """


class ChatFormat:
    """The Format of /v1/chat/completions."""

    chunk_kind = "chat.completion.chunk"
    whole_kind = "chat.completion"

    def __init__(self, body: ChatRequest) -> None:
        """`body` has the options of the response."""
        self._by_id = bool(body.return_tokens_as_token_ids)
        self._wants_logprobs = body.output_logprobs is not None
        self._wants_ids = bool(body.return_token_ids)
        self._hides_reasoning = body.include_reasoning is False

    def begin(self, prepared: PreparedRequest) -> None:
        self._logprobs = LogprobFormat(prepared.texts, self._by_id)

    def opening(self, index: int, choice: PreparedChoice) -> dict[str, Any] | None:
        """The event with the role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def has_event(self, piece: OutputPiece) -> bool:
        """False for pieces without content: markers of tool calls, tokens of incomplete text."""
        delta = piece.delta
        if delta is None:
            return bool(piece.text or piece.token_ids)
        if delta.content or delta.reasoning or _calls_in(delta):
            return True
        # Hidden reasoning may take minutes: its empty events show that the generation continues.
        wanted = self._wants_logprobs or self._wants_ids or self._hides_reasoning
        return wanted and bool(piece.token_ids)

    def chunk(self, index: int, piece: OutputPiece) -> dict[str, Any]:
        # Hot path, run for every token: most pieces are plain content without a Delta.
        finish = piece.finish_reason if piece.delta is None else piece.delta.finish_reason
        choice: dict[str, Any] = {
            "index": index,
            "delta": _plain_delta(piece) if piece.delta is None else _chat_delta(piece.delta),
            "logprobs": None,
            "finish_reason": finish,
        }
        if finish is not None:
            choice["stop_reason"] = piece.stop_reason
        if self._wants_logprobs:
            choice["logprobs"] = self._logprobs.chat(piece.logprobs)
        if self._wants_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def whole(self, index: int, choice: PreparedChoice, output: Output) -> dict[str, Any]:
        logprobs = self._logprobs.chat(output.logprobs) if self._wants_logprobs else None
        written = {
            "index": index,
            "message": _chat_message(output.parsed),
            "logprobs": logprobs,
            "finish_reason": output.parsed.finish_reason,
            "stop_reason": output.stop_reason,
        }
        return written | ({"token_ids": output.token_ids} if self._wants_ids else {})

    def extra_fields(self, prepared: PreparedRequest, outputs: Sequence[Output]) -> dict[str, Any]:
        """The prompt's log probabilities and token ids; all choices share the prompt."""
        request = prepared.choices[0].request
        fields: dict[str, Any] = {}
        if outputs and request.logprobs.prompt is not None:
            fields["prompt_logprobs"] = self._logprobs.prompt(outputs[0].prompt_logprobs)
        if self._wants_ids:
            fields["prompt_token_ids"] = request.prompt_ids
        return fields


def _plain_delta(piece: OutputPiece) -> dict[str, Any]:
    """The message delta of a piece that is plain content."""
    return {} if piece.finish_reason is not None and not piece.text else {"content": piece.text}


def _chat_delta(delta: Delta) -> dict[str, Any]:
    """The message delta of a piece; an empty piece has empty content."""
    fields: dict[str, Any] = _reasoning_fields(delta.reasoning)
    if calls := _calls_in(delta):
        fields["tool_calls"] = [_call_delta(call) for call in calls]
    if delta.content or (not fields and delta.finish_reason is None):
        fields["content"] = delta.content
    return fields


def _calls_in(delta: Delta) -> list[ToolCallDelta]:
    """The deltas of tool calls, without those that only mark an end."""
    return [call for call in delta.tool_calls if call.id or call.arguments]


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _chat_message(output: AnswerAccumulator) -> dict[str, Any]:
    calls = output.calls
    message: dict[str, Any] = {
        "role": "assistant",
        "content": output.content or (None if calls else ""),
        "refusal": None,
    }
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    return message | _reasoning_fields(output.reasoning)


def _reasoning_fields(reasoning: str) -> dict[str, Any]:
    """Reasoning under its current and its older field name."""
    return {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}


class CompletionFormat:
    """The Format of /v1/completions."""

    chunk_kind = "text_completion"
    whole_kind = "text_completion"

    def __init__(self, body: CompletionRequest) -> None:
        """`body` has the options of the response."""
        self._by_id = bool(body.return_tokens_as_token_ids)
        self._wants_logprobs = body.output_logprobs is not None
        self._top = body.output_logprobs
        self._prompt_top = body.prompt_logprobs
        self._wants_ids = bool(body.return_token_ids)
        self._echo = bool(body.echo)

    def begin(self, prepared: PreparedRequest) -> None:
        self._logprobs = LogprobFormat(prepared.texts, self._by_id)

    def opening(self, index: int, choice: PreparedChoice) -> dict[str, Any] | None:
        """None, or the prompt's token ids if requested: completions start with their text."""
        if not self._wants_ids:
            return None
        ids = choice.request.prompt_ids
        return self._choice(index, OutputPiece("")) | {"prompt_token_ids": ids, "token_ids": []}

    def has_event(self, piece: OutputPiece) -> bool:
        """True also for tokens of incomplete text: they show that the generation continues."""
        return bool(piece.text or piece.token_ids)

    def chunk(self, index: int, piece: OutputPiece) -> dict[str, Any]:
        choice = self._choice(index, piece)
        if self._wants_logprobs:
            choice["logprobs"] = self._logprob_fields(piece)
        if self._wants_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def _choice(self, index: int, piece: OutputPiece) -> dict[str, Any]:
        finish = piece.finish_reason
        choice: dict[str, Any] = {
            "index": index,
            "text": piece.text,
            "logprobs": None,
            "finish_reason": finish,
        }
        if finish is not None:
            choice["stop_reason"] = piece.stop_reason
        return choice

    def whole(self, index: int, choice: PreparedChoice, output: Output) -> dict[str, Any]:
        written = {
            "index": index,
            "text": output.text,
            "logprobs": self._logprob_fields(output) if self._wants_logprobs else None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        # `logprobs` with `echo` and `prompt_logprobs` may request different numbers of top tokens.
        if self._prompt_top is not None:
            tokens = with_top(output.prompt_logprobs, self._prompt_top)
            written["prompt_logprobs"] = self._logprobs.prompt(tokens)
        if self._wants_ids:
            written["prompt_token_ids"] = choice.request.prompt_ids
            written["token_ids"] = output.token_ids
        return written

    def extra_fields(self, prepared: PreparedRequest, outputs: Sequence[Output]) -> dict[str, Any]:
        """None: each choice has its own prompt."""
        return {}

    def _logprob_fields(self, output: OutputPiece | Output) -> dict[str, Any]:
        prompt = with_top(output.prompt_logprobs, self._top) if self._echo else ()
        return self._logprobs.completion((*prompt, *output.logprobs))


def usage_body(usage: Usage) -> dict[str, Any]:
    """The usage object of the OpenAI API."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def whole_body(
    envelope: Envelope,
    layout: Format,
    prepared: PreparedRequest,
    outputs: Sequence[Output],
    usage: Usage,
) -> dict[str, Any]:
    """A response that is not streamed."""
    choices = [
        layout.whole(index, choice, output)
        for index, (choice, output) in enumerate(zip(prepared.choices, outputs, strict=True))
    ]
    body = envelope.wrap(layout.whole_kind, choices) | {"usage": usage_body(usage)}
    return body | layout.extra_fields(prepared, outputs)
