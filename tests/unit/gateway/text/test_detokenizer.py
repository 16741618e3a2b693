"""Incremental detokenization equals decoding at once."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from services.gateway.text.detokenizer import WINDOW_TOKENS, Detokenizer
from services.gateway.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import SPECIAL_TOKENS, byte_tokenizer

TOKENIZER = byte_tokenizer()


def ids_of(data: bytes) -> list[int]:
    """One token for each byte."""
    # Characters of the byte-level alphabet: printable Latin-1 stands for itself.
    table = {}
    extra = 0
    for byte in range(256):
        printable = 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255
        table[byte] = chr(byte) if printable else chr(256 + extra)
        extra += not printable
    return [TOKENIZER.token_to_id(table[byte]) for byte in data]


def decode(ids: Sequence[int]) -> str:
    """Decode all tokens at once."""
    return TOKENIZER.decode(list(ids), skip_special_tokens=True)


def pieces_of(ids: Sequence[int]) -> list[str]:
    """Decode one token at a time; the last piece is the rest. `decode_single` changes nothing."""
    by_all, by_each = (
        Detokenizer(decode),
        Detokenizer(decode, decode_single=lambda single_id: decode([single_id])),
    )
    pieces = [*(by_all.push(token_id) for token_id in ids), by_all.flush()]
    assert pieces == [*(by_each.push(token_id) for token_id in ids), by_each.flush()]
    return pieces


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語", "👩‍👩‍👧 families", "\ufffd", ""])
def test_partial_characters_are_never_emitted(text: str) -> None:
    pieces = pieces_of(ids_of(text.encode()))
    assert "".join(pieces) == text
    assert text == "\ufffd" or not any("\ufffd" in piece for piece in pieces)


@given(st.binary(max_size=120))
def test_incremental_decoding_equals_decoding_at_once(data: bytes) -> None:
    ids = ids_of(data)
    assert "".join(pieces_of(ids)) == decode(ids)


@given(st.text(max_size=40), st.binary(max_size=3), st.text(max_size=40))
def test_characters_between_invalid_bytes_are_kept(before: str, data: bytes, after: str) -> None:
    ids = ids_of(before.encode(errors="replace") + data + after.encode(errors="replace"))
    assert "".join(pieces_of(ids)) == decode(ids)


def test_complete_characters_are_decoded_once() -> None:
    calls = 0

    def counted(ids: Sequence[int]) -> str:
        nonlocal calls
        calls += 1
        return decode(ids)

    known = {token_id: decode([token_id]) for token_id in ids_of(b"abc")}
    detokenizer = Detokenizer(counted, decode_single=known.__getitem__)
    assert "".join(detokenizer.push(token_id) for token_id in ids_of(b"abc" * 100)) == "abc" * 100
    assert calls == 0


@given(st.lists(st.integers(0, 258), max_size=80))
def test_special_tokens_are_left_out(ids: list[int]) -> None:
    text = "".join(pieces_of(ids))
    assert text == decode(ids)
    assert not any(token in text for token in SPECIAL_TOKENS)


@pytest.mark.parametrize("byte", [b"\xff", b"\xe2", b" "])
def test_endless_repetition_keeps_the_window_small(byte: bytes) -> None:
    longest = 0

    def counted(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    detokenizer = Detokenizer(counted)
    ids = ids_of(byte * 500)
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    assert text == decode(ids)
    assert longest <= 2 * WINDOW_TOKENS


def test_a_decoder_that_strips_the_first_space() -> None:
    # As SentencePiece decoders do: the blank belongs to the word, and the first one is dropped.
    pieces = ["▁one", "▁two", "▁", "▁three"]

    def strip_first(ids: Sequence[int]) -> str:
        return "".join(pieces[i] for i in ids).replace("▁", " ").removeprefix(" ")

    detokenizer = Detokenizer(strip_first)
    ids = [0, 1, 2, 3] + [2] * 100 + [0]
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    assert text == strip_first(ids)


def test_tokens_that_split_characters_keep_the_window_small() -> None:
    # Each ends with the beginning of a character that the next one completes.
    pieces = [b"\xe1", b"\x80\x80\xe1", b"\x80\x80"]
    longest = 0

    def join(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    ids = [0] + [1] * 500 + [2]
    detokenizer = Detokenizer(join)
    shown = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(shown) + detokenizer.flush() == "\u1000" * 501
    assert shown[1:] == ["\u1000"] * 501
    assert longest <= 2 * WINDOW_TOKENS


def fallback_tokenizer() -> Tokenizer:
    """A converted SentencePiece model: a few pieces, and bytes for other text."""
    vocabulary = ["<unk>", "▁a", "b", "▁", "\ufffd"]
    names = [*vocabulary, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {name: place for place, name in enumerate(names)}
    made = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(made)


FALLBACK = fallback_tokenizer()
FIRST_BYTE = 5


def fallback_pieces(ids: Sequence[int]) -> list[str]:
    detokenizer = FALLBACK.detokenizer()
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def byte_tokens(text: str) -> list[int]:
    """Byte tokens of the text."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def test_byte_tokens_emit_characters_one_at_a_time() -> None:
    assert fallback_pieces([1, *byte_tokens("日本"), 2, *byte_tokens("é"), 1]) == [
        *("a", "", "", "日", "", "", "本", "b", "", "é", " a", ""),
    ]


@given(st.lists(st.one_of(st.integers(1, 4), st.sampled_from("éß日€👩a \ufffd")), max_size=40))
def test_byte_tokens_decode_the_same_one_at_a_time(parts: list[int | str]) -> None:
    # A blank at the very beginning is dropped by the decoder only if it is a word's.
    ids = [
        2,
        *(i for part in parts for i in (byte_tokens(part) if isinstance(part, str) else [part])),
    ]
    assert "".join(fallback_pieces(ids)) == FALLBACK.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(1, FIRST_BYTE + 255), max_size=40))
def test_invalid_bytes_do_not_damage_valid_characters(ids: list[int]) -> None:
    data = b"".join(
        bytes([token_id - FIRST_BYTE]) if token_id >= FIRST_BYTE else FALLBACK.texts.data(token_id)
        for token_id in [2, *ids]
    )
    assert "".join(fallback_pieces([2, *ids])) == data.decode(errors="replace")
