"""What single tokens look like: their exact bytes, and text for people. Pure."""

import json
import re
from collections.abc import Callable, Collection
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# SentencePiece's character for a blank.
_BLANK = "\u2581"


def _byte_letters() -> dict[str, int]:
    """The byte that each letter of byte-level vocabularies (GPT-2's) stands for."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in shown}
    others = (byte for byte in range(256) if byte not in set(shown))
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_LETTERS = _byte_letters()


class TokenTexts:
    """Spells the tokens of one vocabulary, each by itself."""

    def __init__(
        self, token_of: Callable[[int], str | None], decoder: bytes, added: Collection[int]
    ) -> None:
        """`token_of`: the vocabulary's entry of an id; `decoder`: the tokenizer's, as JSON.

        `added` are the ids of tokens that stand for themselves.
        """
        self._token_of = token_of
        self._added = frozenset(added)
        kinds = _kinds(json.loads(decoder))
        self._byte_level = "ByteLevel" in kinds
        self.byte_fallback = "ByteFallback" in kinds
        """Whether what no token spells is spelt in tokens of single bytes."""
        self.concatenates = kinds in (["ByteLevel"], ["Sequence", "ByteLevel"])
        """Whether the bytes of an output are those of its tokens, one after the other."""

    def data(self, token_id: int) -> bytes:
        """The bytes that the token adds to the output; none for an id without an entry."""
        token = self._token_of(token_id) or ""
        if token_id in self._added:
            return token.encode()
        if self._byte_level and all(letter in _LETTERS for letter in token):
            return bytes(_LETTERS[letter] for letter in token)
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes([int(byte[1], 16)])
        return token.replace(_BLANK, " ").encode(errors="replace")


def _kinds(decoder: Any) -> list[str]:
    """Types of a decoder and of those in it."""
    if not isinstance(decoder, dict):
        return []
    inner = decoder.get("decoders") or ()
    return [str(decoder.get("type")), *(kind for one in inner for kind in _kinds(one))]
