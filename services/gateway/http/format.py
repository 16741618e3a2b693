"""The JSON of the two generation endpoints, streamed and whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.core.request import FinishReason
from services.gateway.output import Usage


@dataclass(frozen=True, slots=True)
class Output:
    """A finished choice."""

    text: str
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all objects of one response share."""

    response_id: str
    created: int
    model: str

    def wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An object of the given kind."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }


class Format(Protocol):
    """How an endpoint writes its choices."""

    chunk_kind: str
    whole_kind: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of the first event, if the endpoint begins with one of its own."""

    def delta(self, index: int, text: str, finish: FinishReason | None) -> dict[str, Any]:
        """The choice of an event with new text, an ending or both."""

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        """The choice of a response that is not streamed."""


class ChatFormat:
    """/v1/chat/completions."""

    chunk_kind = "chat.completion.chunk"
    whole_kind = "chat.completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        """The event that names the role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, text: str, finish: FinishReason | None) -> dict[str, Any]:
        """See Format."""
        delta = {} if finish is not None and not text else {"content": text}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        """See Format."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": None,
            "finish_reason": output.finish_reason,
        }


class CompletionFormat:
    """/v1/completions."""

    chunk_kind = "text_completion"
    whole_kind = "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        """Nothing: completions begin with their text."""
        return None

    def delta(self, index: int, text: str, finish: FinishReason | None) -> dict[str, Any]:
        """See Format."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        """See Format."""
        return self.delta(index, output.text, output.finish_reason)


def usage_body(usage: Usage) -> dict[str, int]:
    """The usage object of the OpenAI API."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def whole_body(
    envelope: Envelope, layout: Format, outputs: Sequence[Output], usage: Usage
) -> dict[str, Any]:
    """A response that is not streamed."""
    choices = [layout.whole(index, output) for index, output in enumerate(outputs)]
    return envelope.wrap(layout.whole_kind, choices) | {"usage": usage_body(usage)}
