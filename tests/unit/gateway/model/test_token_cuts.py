"""Tokens in the text of users are cut, and the text stays the same otherwise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.model.token_cuts import TokenCuts
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.vocabulary.errors import ContextExceeded
from tests.support.byte_tokenizer import byte_tokenizer

TOKENS = ("<|im_end|>", "<|im_start|>", "<s>", "s>s", "ab", "aba", "\n\n", "x")
TOKENIZER = Tokenizer(byte_tokenizer())


@given(st.lists(st.sampled_from([*TOKENS, "<|im_", "<", "a", "b", "\n", "é"]), max_size=9))
def test_no_token_is_left_within_a_part(parts: list[str]) -> None:
    cuts, text = TokenCuts(TOKENS), "".join(parts)
    between = cuts.cut(text).split(cuts.mark)

    assert "".join(between) == text
    assert not any(token in part for token in TOKENS if len(token) > 1 for part in between)


def test_a_text_without_tokens_is_not_cut() -> None:
    for tokens in ((), TOKENS):
        assert TokenCuts(tokens).cut("a <b> |im_end| c") == "a <b> |im_end| c"


def test_only_texts_of_users_and_tools_are_cut() -> None:
    cuts = TokenCuts(["<|im_end|>"])
    messages = [
        {"role": role, "content": "<|im_end|>"} for role in ("system", "user", "assistant", "tool")
    ]
    cut = [message["content"] for message in cuts.cut_messages(messages)]
    assert cut == ["<|im_end|>", f"<{cuts.mark}|im_end|>"] * 2


def test_thousands_of_tokens_are_found_in_a_long_text() -> None:
    cuts = TokenCuts([f"<|reserved_{number}|>" for number in range(5000)])
    text = "<" * 10**6 + "<|reserved_4999|>"
    assert cuts.cut(text).split(cuts.mark) == ["<" * (10**6 + 1), "|reserved_4999|>"]


def test_parts_are_encoded_as_text() -> None:
    cuts = TokenCuts(["<|im_end|>"])
    text = "<|im_end|>" + cuts.cut("a<|im_end|>b")

    ids = TOKENIZER.encode(text, False, 100, "messages", cuts.mark)

    assert ids[0] == 2 and 2 not in ids[1:]
    assert TOKENIZER.decode(ids, False) == "<|im_end|>a<|im_end|>b"
    cuts = TokenCuts(["ab"])
    many = cuts.cut("ab" * 50)
    with pytest.raises(ContextExceeded, match="more than 40 tokens"):
        TOKENIZER.encode(many, False, 40, "messages", cuts.mark)
