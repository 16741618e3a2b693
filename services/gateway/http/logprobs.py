"""Formats log probabilities as the OpenAI API and vLLM do."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from services.core.request import TokenLogprobs
from services.gateway.serving.output import TokenWithLogprobs, finite
from services.gateway.text.token_text import TokenTexts


class LogprobFormat:
    """Formats log probabilities. `by_id`: write tokens as "token_id:42" instead of their text.

    Encodes the JSON of each token separately: the entries of 100,000 tokens would be millions of
    objects, and encoding them in a single call would hold the interpreter lock for long.
    """

    def __init__(self, texts: TokenTexts, by_id: bool) -> None:
        self._texts = texts
        self._by_id = by_id

    def chat(self, tokens: Iterable[TokenWithLogprobs]) -> dict[str, Any]:
        """The format of /v1/chat/completions."""
        content = [
            _encoded(
                self._entry(token.token_id, token.logprobs.logprob)
                | {"top_logprobs": [self._entry(*other) for other in token.logprobs.top]}
            )
            for token in tokens
            if token.logprobs is not None
        ]
        return {"content": content, "refusal": None}

    def completion(self, tokens: Sequence[TokenWithLogprobs]) -> dict[str, Any]:
        """The format of /v1/completions; the first token of a prompt has null values."""
        return {
            "text_offset": [token.offset for token in tokens],
            "token_logprobs": [
                token.logprobs and finite(token.logprobs.logprob) for token in tokens
            ],
            "tokens": [self._text(token.token_id) for token in tokens],
            "top_logprobs": [
                token.logprobs and _encoded(self._top(token.token_id, token.logprobs))
                for token in tokens
            ],
        }

    def prompt(self, tokens: Iterable[TokenWithLogprobs]) -> list[msgspec.Raw | None]:
        """vLLM's `prompt_logprobs`: the top tokens and the prompt's token, by token id."""
        return [
            None if token.logprobs is None else _encoded(self._ranked(token)) for token in tokens
        ]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        if self._by_id:
            text = _id_text(token_id)
            return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}
        data = self._texts.data(token_id)
        text = data.decode(errors="replace")
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}

    def _text(self, token_id: int) -> str:
        """The token in completions; parts of characters as OpenAI's "bytes:\\xe2\\x80"."""
        if self._by_id:
            return _id_text(token_id)
        data = self._texts.data(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _top(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        """Log probabilities of the top tokens and the token itself, by text."""
        own, top = self._text(token_id), dict[str, float]()
        for other, logprob in (*entry.top, (token_id, entry.logprob)):
            text = own if other == token_id else self._text(other)
            # Some vocabularies have several tokens of the same text.
            if other != token_id and (text == own or text in top):
                text = _id_text(other)
            top[text] = finite(logprob)
        return top

    def _ranked(self, token: TokenWithLogprobs) -> dict[str, Any]:
        assert token.logprobs is not None
        rows = {
            token_id: (logprob, rank)
            for rank, (token_id, logprob) in enumerate(token.logprobs.top, 1)
        }
        rows[token.token_id] = (token.logprobs.logprob, token.logprobs.rank)
        return {
            str(token_id): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": self._texts.data(token_id).decode(errors="replace"),
            }
            for token_id, (logprob, rank) in rows.items()
        }


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def _encoded(entry: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(entry))
