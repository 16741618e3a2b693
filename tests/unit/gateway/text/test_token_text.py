"""The bytes of single tokens, for all kinds of vocabularies."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.token_text import TokenTexts
from services.gateway.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer())
SENTENCE_PIECES = json.dumps(
    {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}]}
).encode()
BYTES = json.dumps({"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}).encode()


@given(st.text())
def test_byte_level_tokens_concatenate_to_the_text(text: str) -> None:
    ids = TOKENIZER.encode(text, False, 10_000)
    assert b"".join(map(TOKENIZER.texts.data, ids)) == text.encode()


@pytest.mark.parametrize(
    ("token", "decoder", "data"),
    [
        ("\u0120the", BYTES, b" the"),
        ("\u00c3\u00a9", BYTES, "\u00e9".encode()),
        ("\u00e2", BYTES, b"\xe2"),
        ("\u2581the", SENTENCE_PIECES, b" the"),
        ("<0xE2>", SENTENCE_PIECES, b"\xe2"),
        ("\u0120the", SENTENCE_PIECES, "\u0120the".encode()),
        ("plain", b"{}", b"plain"),
        ("plain", b"null", b"plain"),
        (None, BYTES, b""),
    ],
)
def test_bytes_of_a_single_token(token: str | None, decoder: bytes, data: bytes) -> None:
    assert TokenTexts(lambda _: token, decoder, ()).data(7) == data


def test_an_added_token_has_its_own_text() -> None:
    texts = TokenTexts(lambda _: "<\u0120\u2581>", BYTES, {7})
    assert texts.data(7) == "<\u0120\u2581>".encode()
    assert texts.data(8) != texts.data(7)
    assert TOKENIZER.texts.data(2) == b"<|im_end|>"
