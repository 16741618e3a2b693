"""Requests and events of `/v1/completions` of a server that returns text only."""

from collections.abc import Mapping, Sequence
from typing import Any

from services.worker.openai_engine.completions import PATH, WITH_USAGE, cached_tokens, raise_error
from services.worker.openai_engine.errors import UpstreamRefused
from services.worker.openai_engine.output import StreamPiece, StreamReader
from services.worker.openai_engine.retokenizer import Retokenizer

_NEEDS_IDS = {
    "logprobs": "log probabilities",
    "prompt_logprobs": "log probabilities of the prompt",
    "structured_outputs": "grammars",
    "allowed_token_ids": "allowed_token_ids",
}
"""Arguments that such a server cannot serve, with their names in messages."""
_ALWAYS = ("max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed")
"""Fields of OpenAI's API. Others are sent only if they differ from `_DEFAULTS`."""
_DEFAULTS = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}


class TextCompletions:
    """`/v1/completions` of a server that returns text; `takes_ids`: prompts may be token ids.

    `eos_ids` and `bos_id` are the model's: the server ends the output at its end of sequence, and
    adds the beginning of sequence to a prompt that is text.
    """

    path = PATH
    ends_with_usage = True

    def __init__(
        self,
        model: str,
        retokenizer: Retokenizer,
        takes_ids: bool,
        eos_ids: Sequence[int],
        bos_id: int | None,
    ) -> None:
        self._model = model
        self._retokenizer = retokenizer
        self._takes_ids = takes_ids
        self._eos_ids = frozenset(eos_ids)
        self._bos_id = bos_id

    def body(
        self, token_ids: Sequence[int], arguments: Mapping[str, Any], cache_salt: str
    ) -> dict[str, Any]:
        """The body of a streamed request; `arguments` are those of vLLM's `SamplingParams`.

        Raises:
            UpstreamRefused: if the request needs token ids.
        """
        for name, called in _NEEDS_IDS.items():
            if arguments.get(name) is not None:
                raise UpstreamRefused(
                    f"{called} are not supported with an upstream server that returns text only;"
                    " leave them out"
                )
        body = {name: arguments[name] for name in _ALWAYS if name in arguments}
        body |= {
            name: arguments[name]
            for name, default in _DEFAULTS.items()
            if arguments.get(name, default) != default
        }
        stops = [
            token_id for token_id in arguments["stop_token_ids"] if token_id not in self._eos_ids
        ]
        if stops:
            body["stop_token_ids"] = arguments["stop_token_ids"]
        if not self._eos_ids & set(arguments["stop_token_ids"]):
            body["ignore_eos"] = True
        if bias := arguments.get("logit_bias"):
            body["logit_bias"] = {str(token_id): value for token_id, value in bias.items()}
        prompt = list(token_ids) if self._takes_ids else self._prompt(list(token_ids))
        fixed = {"model": self._model, "prompt": prompt, "stream": True}
        return {**fixed, "stream_options": WITH_USAGE, **body}

    def reader(self) -> StreamReader:
        """Reads the events of a stream."""
        return self._read

    def _read(self, event: Mapping[str, Any]) -> StreamPiece:
        """What an event adds to the output.

        Raises:
            UpstreamLost: for an error of the server.
            UpstreamRefused: for an error of the request.
        """
        raise_error(event)
        choices = event.get("choices")
        if not choices:
            return StreamPiece(cached_tokens=cached_tokens(event))
        text = choices[0].get("text")
        token_ids = self._retokenizer.ids(text) if text else ()
        finish, cached = choices[0].get("finish_reason"), cached_tokens(event)
        return StreamPiece(token_ids, finish, counted=False, cached_tokens=cached)

    def _prompt(self, token_ids: list[int]) -> str:
        begins = token_ids[:1] == [self._bos_id]
        return self._retokenizer.text(token_ids[1:] if begins else token_ids)
