"""Determines the exact bytes of single tokens, for log probabilities."""

import json
import re
from collections.abc import Callable, Collection
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# SentencePiece's character for a space.
_BLANK = "\u2581"


def _byte_letters() -> dict[str, int]:
    """Return the byte for each letter of byte-level vocabularies (GPT-2's)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_LETTERS = _byte_letters()


class TokenTexts:
    """The bytes of single tokens of a vocabulary."""

    def __init__(
        self, token_of: Callable[[int], str | None], decoder: bytes, added: Collection[int]
    ) -> None:
        """`token_of`: the vocabulary's entry for an id; `decoder`: the tokenizer's decoder as JSON.

        `added`: ids of tokens that are spelled literally.
        """
        self._token_of = token_of
        self._added = frozenset(added)
        kinds = _kinds(json.loads(decoder))
        self._byte_level = "ByteLevel" in kinds
        self.byte_fallback = "ByteFallback" in kinds
        """Whether characters that are no token are encoded as byte tokens."""
        self.concatenates = kinds in (["ByteLevel"], ["Sequence", "ByteLevel"])
        """Whether an output is the concatenation of its tokens' bytes."""

    def data(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to an output; empty for an id without an entry."""
        token = self._token_of(token_id) or ""
        if token_id in self._added:
            return token.encode()
        if self._byte_level and all(letter in _LETTERS for letter in token):
            return bytes(_LETTERS[letter] for letter in token)
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes([int(byte[1], 16)])
        return token.replace(_BLANK, " ").encode(errors="replace")


def _kinds(decoder: Any) -> list[str]:
    """Return the types of a decoder and of the decoders nested in it."""
    if not isinstance(decoder, dict):
        return []
    inner = decoder.get("decoders") or ()
    return [str(decoder.get("type")), *(kind for part in inner for kind in _kinds(part))]
