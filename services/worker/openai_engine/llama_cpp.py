"""Requests and events of `/completion` of llama.cpp's server, which has token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from services.worker.openai_engine.completions import raise_error, valid_count
from services.worker.openai_engine.errors import UpstreamRefused
from services.worker.openai_engine.output import LogprobMap, StreamedLogprob, StreamPiece
from services.worker.openai_engine.retokenizer import Retokenizer

PATH = "/completion"
MARGIN = 3
"""Most tokens that complete a character: each has a byte of it."""
_SEEDS = 2**32 - 1
"""The largest 32-bit seed means a random seed."""
_FINISHES = {"eos": "stop", "word": "stop", "limit": "length"}
_REFUSED = {
    "prompt_logprobs": "log probabilities of the prompt",
    "allowed_token_ids": "allowed_token_ids",
}
_SAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")


class LlamaCpp:
    """`/completion` of llama.cpp's server; `eos_ids` are the model's.

    Its stream leaves out the ids of tokens that end in the middle of a character, so they are
    derived from the text. The server is asked for `MARGIN` tokens more, because it would also leave
    out the text of a character that is cut off by `max_tokens`.
    """

    path = PATH
    ends_with_usage = False

    def __init__(self, retokenizer: Retokenizer, eos_ids: Sequence[int]) -> None:
        self._retokenizer = retokenizer
        self._eos_ids = frozenset(eos_ids)

    def body(
        self, token_ids: Sequence[int], arguments: Mapping[str, Any], cache_salt: str
    ) -> dict[str, Any]:
        """The body of a streamed request; `arguments` are those of vLLM's `SamplingParams`.

        Raises:
            UpstreamRefused: if llama.cpp cannot serve the request.
        """
        for name, called in _REFUSED.items():
            if arguments.get(name) is not None:
                raise UpstreamRefused(f"llama.cpp does not support {called}; leave them out")
        if arguments.get("min_tokens"):
            raise UpstreamRefused("llama.cpp does not support min_tokens; leave it out")
        body: dict[str, Any] = {name: arguments[name] for name in _SAME if name in arguments}
        if "structured_outputs" in arguments:
            body["json_schema"] = _json_schema(arguments["structured_outputs"])
        if arguments.get("logprobs") is not None:
            body["n_probs"] = max(1, arguments["logprobs"])
        if "logit_bias" in arguments:
            body["logit_bias"] = [list(entry) for entry in arguments["logit_bias"].items()]
        if "seed" in arguments:
            body["seed"] = arguments["seed"] % _SEEDS
        return {
            "prompt": list(token_ids),
            "n_predict": arguments["max_tokens"] + MARGIN,
            "stream": True,
            "return_tokens": True,
            # The first event has the number of cached tokens.
            "return_progress": True,
            # All its penalties are over prompt and output.
            "repeat_penalty": arguments.get("repetition_penalty", 1.0),
            "repeat_last_n": len(token_ids) + arguments["max_tokens"],
            # It has no salts: share no cached prefix with other owners of keys.
            "cache_prompt": not cache_salt,
            # It would bar the token, which may still be a stop token here.
            "ignore_eos": not self._eos_ids & set(arguments["stop_token_ids"]),
            **body,
        }

    def reader(self) -> "LlamaCppReader":
        """Reads the events of a stream."""
        return LlamaCppReader(self._retokenizer)


class LlamaCppReader:
    """Reads the events of a stream, in order."""

    def __init__(self, retokenizer: Retokenizer) -> None:
        self._retokenizer = retokenizer
        self._count = 0  # tokens so far

    def __call__(self, event: Mapping[str, Any]) -> StreamPiece:
        """What an event adds to the output.

        Raises:
            UpstreamLost: for an error of the server.
            UpstreamRefused: for an error of the request.
            UpstreamFailed: if text has no tokens.
        """
        raise_error(event)
        if progress := event.get("prompt_progress"):
            return StreamPiece(cached_tokens=valid_count(progress.get("cache")))
        finish = _FINISHES.get(event.get("stop_type") or "") if event.get("stop") else None
        token_ids = tuple(event.get("tokens") or ())
        added = event.get("tokens_predicted", 0) - self._count
        self._count += max(added, len(token_ids))
        if added > len(token_ids) and (text := event.get("content")):
            return StreamPiece(self._retokenizer.ids(text), finish)
        return StreamPiece(token_ids, finish, logprobs=_logprobs(event))


def _json_schema(grammar: Mapping[str, str]) -> Any:
    if "json" not in grammar:
        raise UpstreamRefused(
            "llama.cpp supports JSON schemas, but no regular expressions and Lark grammars; use a"
            " JSON schema"
        )
    return msgspec.json.decode(grammar["json"])


def _logprobs(event: Mapping[str, Any]) -> tuple[LogprobMap, ...] | None:
    rows = event.get("completion_probabilities")
    return None if not rows else tuple(map(_row, rows))


def _row(row: Mapping[str, Any]) -> LogprobMap:
    tops = {top["id"]: StreamedLogprob(top["logprob"]) for top in row["top_logprobs"]}
    rank = 1 + sum(top.logprob > row["logprob"] for top in tops.values())
    return tops | {row["id"]: StreamedLogprob(row["logprob"], rank)}
