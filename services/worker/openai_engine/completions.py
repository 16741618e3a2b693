"""Requests and events of `/v1/completions` with token ids, as vLLM and tideserve serve it. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from services.core.service import ServiceClass
from services.worker.openai_engine.errors import UpstreamFailed, UpstreamLost, UpstreamRefused
from services.worker.openai_engine.output import (
    LogprobMap,
    StreamedLogprob,
    StreamPiece,
    StreamReader,
)
from services.worker.vllm_engine.arguments import class_of

PATH = "/v1/completions"
_TOKEN_ID = "token_id:"
"""Prefix of tokens in log probabilities with `return_tokens_as_token_ids`."""
_TIERS = {
    ServiceClass.INTERACTIVE: "priority",
    ServiceClass.STANDARD: "default",
    ServiceClass.BATCH: "flex",
}
BUSY = (429, 503, 529)
"""Statuses of a server without room."""
CHANGED = (401, 403, 404)
"""Statuses of a server that accepted the key and had the model when the worker started."""
_SERVER_ERRORS = 500
MESSAGE_CHARS_MAX = 500
"""Longest part of a server's message that is passed on."""
WITH_USAGE = {"include_usage": True}
"""Stream options with which the last event has the usage of tokens."""


class UpstreamDialect(Protocol):
    """How a kind of server takes requests and streams their output."""

    path: str
    ends_with_usage: bool
    """The last event of a stream has the number of cached prompt tokens."""

    def body(
        self, token_ids: Sequence[int], arguments: Mapping[str, Any], cache_salt: str
    ) -> dict[str, Any]: ...

    def reader(self) -> StreamReader: ...


class Completions:
    """`/v1/completions` of a server that returns token ids."""

    path = PATH
    ends_with_usage = True

    def __init__(self, model: str) -> None:
        self._model = model

    def body(
        self, token_ids: Sequence[int], arguments: Mapping[str, Any], cache_salt: str
    ) -> dict[str, Any]:
        """The body of a streamed request; `arguments` are those of vLLM's `SamplingParams`."""
        given = {
            name: value
            for name, value in arguments.items()
            if value is not None and name != "detokenize"
        }
        if "logit_bias" in given:
            bias = given["logit_bias"]
            given["logit_bias"] = {str(token_id): value for token_id, value in bias.items()}
        if cache_salt:
            given["cache_salt"] = cache_salt
        return {
            "model": self._model,
            "prompt": list(token_ids),
            "stream": True,
            "stream_options": WITH_USAGE,
            "return_token_ids": True,
            **({"return_tokens_as_token_ids": True} if "logprobs" in given else {}),
            **given,
        }

    def reader(self) -> StreamReader:
        """Reads the events of a stream."""
        return self._read

    def _read(self, event: Mapping[str, Any]) -> StreamPiece:
        """What an event adds to the output.

        Raises:
            UpstreamLost: for an error of the server.
            UpstreamRefused: for an error of the request.
            UpstreamFailed: if the event has text without token ids.
        """
        raise_error(event)
        choices = event.get("choices")
        if not choices:
            return StreamPiece(cached_tokens=cached_tokens(event))
        choice = choices[0]
        token_ids = choice.get("token_ids") or ()
        if choice.get("text") and not token_ids:
            raise UpstreamFailed("the upstream server returned text without token ids")
        stop_reason = choice.get("stop_reason")
        return StreamPiece(
            tuple(token_ids),
            choice.get("finish_reason"),
            stop_reason if isinstance(stop_reason, int) else None,
            _logprobs(choice.get("logprobs")),
            cached_tokens=cached_tokens(event),
        )


def cached_tokens(event: Mapping[str, Any]) -> int | None:
    """The number of cached prompt tokens in an event's usage, if the server reports it."""
    usage = event.get("usage") or {}
    return valid_count((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))


def valid_count(value: object) -> int | None:
    """A number of tokens; None if it is missing or malformed."""
    return value if type(value) is int and value >= 0 else None


def raise_error(event: Mapping[str, Any]) -> None:
    """Raise the error in an event of a stream, if it is one."""
    error = event.get("error")
    if not error:
        return
    fields = error if isinstance(error, Mapping) else {"message": str(error)}
    code = fields.get("code")
    refused = isinstance(code, int) and 400 <= code < _SERVER_ERRORS
    refused = refused and code not in (*BUSY, *CHANGED)
    if refused or fields.get("type") == "invalid_request_error":
        message = str(fields.get("message", ""))[:MESSAGE_CHARS_MAX]
        raise UpstreamRefused(f"the upstream server refused the request: {message}")
    # Without its message, which may quote the prompt: losses are logged.
    raise UpstreamLost("the upstream server reported an error in a stream")


def priority_fields(kind: str, priority: int) -> dict[str, Any]:
    """Fields that carry a request's class to a server of `kind`; `priority` is vLLM's."""
    if kind == "vllm":
        return {"priority": priority}
    if kind == "tideserve":
        return {"service_tier": _TIERS[class_of(priority)]}
    return {}


def _logprobs(rows: Mapping[str, Any] | None) -> tuple[LogprobMap, ...] | None:
    if not rows or not rows.get("tokens"):
        return None
    tops = rows.get("top_logprobs") or [None] * len(rows["tokens"])
    return tuple(
        _row(token, logprob, top or {})
        for token, logprob, top in zip(rows["tokens"], rows["token_logprobs"], tops, strict=True)
    )


def _row(token: str, logprob: float, top: Mapping[str, float]) -> LogprobMap:
    """The alternatives of a token and the token itself, by token id."""
    row = {
        _token_id(name): StreamedLogprob(value) for name, value in top.items() if value is not None
    }
    rank = 1 + sum(entry.logprob > logprob for entry in row.values())
    return row | {_token_id(token): StreamedLogprob(logprob, rank)}


def _token_id(token: str) -> int:
    if not token.startswith(_TOKEN_ID):
        raise UpstreamFailed("the upstream server returned log probabilities without token ids")
    return int(token.removeprefix(_TOKEN_ID))


def prompt_rows(answer: Mapping[str, Any]) -> list[LogprobMap | None]:
    """The log probabilities of a prompt in the answer to a request that is not streamed.

    Raises:
        UpstreamFailed: if it has none.
    """
    rows = answer["choices"][0].get("prompt_logprobs") if answer.get("choices") else None
    if rows is None:
        raise UpstreamFailed("the upstream server returned no log probabilities of the prompt")
    return [
        row
        and {
            int(token_id): StreamedLogprob(entry["logprob"], entry.get("rank"))
            for token_id, entry in row.items()
        }
        for row in rows
    ]
