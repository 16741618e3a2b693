"""Log probabilities in the formats of the OpenAI API and of vLLM."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from services.core.request import TokenLogprobs
from services.gateway.serving.output import TokenWithLogprobs, finite
from services.gateway.text.token_text import TokenTexts


class LogprobFormat:
    """Formats log probabilities. `by_id`: write tokens as "token_id:42" instead of their text.

    Serialises each token's entry at once: 100,000 tokens would be millions of objects, and encoding
    them in a single call would hold the interpreter lock.
    """

    def __init__(self, texts: TokenTexts, by_id: bool) -> None:
        self._texts = texts
        self._by_id = by_id

    def chat(self, notes: Iterable[TokenWithLogprobs]) -> dict[str, Any]:
        """The format of /v1/chat/completions."""
        content = [
            _written(
                self._entry(note.token_id, note.logprobs.logprob)
                | {"top_logprobs": [self._entry(*other) for other in note.logprobs.top]}
            )
            for note in notes
            if note.logprobs is not None
        ]
        return {"content": content, "refusal": None}

    def completion(self, notes: Sequence[TokenWithLogprobs]) -> dict[str, Any]:
        """The format of /v1/completions; the first token of a prompt has null values."""
        return {
            "text_offset": [note.offset for note in notes],
            "token_logprobs": [note.logprobs and finite(note.logprobs.logprob) for note in notes],
            "tokens": [self._text(note.token_id) for note in notes],
            "top_logprobs": [
                note.logprobs and _written(self._top(note.token_id, note.logprobs))
                for note in notes
            ],
        }

    def prompt(self, notes: Iterable[TokenWithLogprobs]) -> list[msgspec.Raw | None]:
        """vLLM's `prompt_logprobs`: the top tokens and the prompt's token, by token id."""
        return [None if note.logprobs is None else _written(self._ranked(note)) for note in notes]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        if self._by_id:
            text = self._text(token_id)
            return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}
        data = self._texts.data(token_id)
        text = data.decode(errors="replace")
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}

    def _text(self, token_id: int) -> str:
        if self._by_id:
            return f"token_id:{token_id}"
        return self._texts.data(token_id).decode(errors="replace")

    def _top(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        """The top tokens and the token itself, by text; the first of equal texts counts."""
        top: dict[str, float] = {}
        for other, logprob in (*entry.top, (token_id, entry.logprob)):
            top.setdefault(self._text(other), finite(logprob))
        return top

    def _ranked(self, note: TokenWithLogprobs) -> dict[str, Any]:
        assert note.logprobs is not None
        rows = {
            token_id: (logprob, rank)
            for rank, (token_id, logprob) in enumerate(note.logprobs.top, 1)
        }
        rows[note.token_id] = (note.logprobs.logprob, note.logprobs.rank)
        return {
            str(token_id): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": self._texts.data(token_id).decode(errors="replace"),
            }
            for token_id, (logprob, rank) in rows.items()
        }


def _written(entry: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(entry))
