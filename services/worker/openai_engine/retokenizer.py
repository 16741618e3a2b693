"""Converts the text that a server returns to token ids whose text is the same."""

from pathlib import Path

from tokenizers import Tokenizer

from services.worker.errors import ModelError
from services.worker.openai_engine.errors import UpstreamFailed

_BEFORE = "\n"
"""Text before the part that is encoded: tokenizers mark the beginning of a text, and a line break
rarely merges with what follows."""


class Retokenizer:
    """The tokenizer of a model folder; without special tokens at the beginning and the end."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError if the folder has no readable tokenizer.json."""
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower type
            raise ModelError(
                f"{path} cannot be read ({error}); choose the folder of the model that the"
                " upstream server serves"
            ) from error
        self._before = self._encoded(_BEFORE)

    def ids(self, text: str) -> tuple[int, ...]:
        """Token ids that continue an output by `text`; text of special tokens becomes these.

        Raises:
            UpstreamFailed: if no tokens have this text.
        """
        whole = self._encoded(_BEFORE + text)
        before = len(self._before)
        for ids in (whole[before:], self._encoded(text)):
            if self._text(self._before + ids) == self._text(self._before) + text:
                return tuple(ids)
        raise UpstreamFailed("the text of the upstream server has no tokens in this tokenizer")

    def text(self, token_ids: list[int]) -> str:
        """The text of a prompt, with that of special tokens."""
        return self._text(token_ids)

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
