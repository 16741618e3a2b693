"""Special tokens in user text are split into plain text, which is otherwise unchanged."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from services.gateway.text.token_cuts import TokenCuts
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.vocabulary.errors import ContextExceeded
from tests.support.byte_tokenizer import byte_tokenizer

TOKENS = ("<|im_end|>", "<|im_start|>", "<s>", "s>s", "ab", "aba", "\n\n", "x", "▁▁")
END = "<|im_end|>"
STRIP_ACCENTS = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])


def with_tokens(*tokens: str | AddedToken) -> Backend:
    """A tokenizer with a token for each byte, and these tokens."""
    backend = byte_tokenizer()
    backend.add_tokens(list(tokens))
    return backend


BACKEND = with_tokens(*TOKENS)


def encode(backend: Backend, *parts: str) -> list[int]:
    """Encode a prompt; every second part is user text."""
    tokenizer = Tokenizer(backend)
    cuts = tokenizer.token_cuts()
    prompt = "".join(cuts.cut(part) if number % 2 else part for number, part in enumerate(parts))
    return tokenizer.encode(prompt, True, 10_000, cuts=cuts)


@given(st.lists(st.sampled_from([*TOKENS, "<|im_", "<", "a", "b", "\n", "é"]), max_size=9))
def test_no_part_contains_a_whole_token(parts: list[str]) -> None:
    cuts, text = TokenCuts(BACKEND), "".join(parts)
    between = cuts.cut(text).split(cuts.mark)

    assert "".join(between) == cuts.join(cuts.cut(text)) == text
    cut_tokens = [token for token in TOKENS if len(token) > 1 and token not in ("\n\n", "▁▁")]
    assert not any(token in part for token in cut_tokens for part in between)


def test_a_text_without_tokens_is_not_cut() -> None:
    for backend in (BACKEND, Backend(models.BPE())):
        assert TokenCuts(backend).cut("a <b> |im_end| c") == "a <b> |im_end| c"


def test_only_texts_of_users_and_tools_are_cut() -> None:
    cuts = TokenCuts(byte_tokenizer())
    messages = [{"role": role, "content": END} for role in ("system", "user", "assistant", "tool")]
    cut = [message["content"] for message in cuts.cut_messages(messages)]
    assert cut == [END, f"<{cuts.mark}|im_end|>"] * 2


def test_thousands_of_tokens_are_found_in_a_long_text() -> None:
    cuts = TokenCuts(with_tokens(*(f"<|reserved_{number}|>" for number in range(5000))))
    text = "<" * 10**6 + "<|reserved_4999|>"
    assert cuts.cut(text).split(cuts.mark) == ["<" * (10**6 + 1), "|reserved_4999|>"]


def test_cut_tokens_are_encoded_as_text() -> None:
    ids = encode(byte_tokenizer(), END, f"a{END}b", END)

    assert (ids[0], ids[-1]) == (2, 2) and 2 not in ids[1:-1]
    assert Tokenizer(byte_tokenizer()).decode(ids, False) == f"{END}a{END}b{END}"


def test_cuts_are_not_counted_as_text() -> None:
    tokenizer = Tokenizer(with_tokens("ab"))
    cuts = tokenizer.token_cuts()
    for pairs in (50, 50_000):
        text = cuts.cut("ab" * pairs)
        assert len(tokenizer.encode(text, False, 2 * pairs, cuts=cuts)) == 2 * pairs
        with pytest.raises(ContextExceeded, match=f"has {2 * pairs} bytes|more than"):
            tokenizer.encode(text, False, pairs // 10, cuts=cuts)
    with pytest.raises(ContextExceeded, match="more than 50000 tokens"):
        tokenizer.encode(text, False, 50_000, cuts=cuts)


@pytest.mark.parametrize(
    ("normalizer", "token", "text"),
    [
        (normalizers.NFKC(), "<|end|>", "a＜|end|＞b"),
        (normalizers.NFC(), "<|K|>", "a<|\u212a|>b"),
        (normalizers.Lowercase(), "<|end|>", "a<|END|>b"),
        (STRIP_ACCENTS, "<|end|>", "a<|énd|>b"),
        (normalizers.Replace("\u200b", ""), "<|end|>", "a<|e\u200bnd|>b"),
    ],
)
def test_normalized_text_does_not_become_a_token(
    normalizer: normalizers.Normalizer, token: str, text: str
) -> None:
    backend = with_tokens(AddedToken(token, normalized=True))
    backend.normalizer = normalizer
    token_id = backend.token_to_id(token)
    # The tokenizer itself makes it a token.
    assert token_id in backend.encode(text).ids

    ids = encode(backend, f"x{token}", text, token)

    assert [ids.index(token_id), ids.count(token_id), ids[-1]] == [1, 2, token_id]
    assert Tokenizer(backend).decode(ids, False) == normalizer.normalize_str(
        f"x{token}{text}{token}"
    )


def sentencepiece(backend: Backend) -> Backend:
    """A tokenizer as converted from SentencePiece."""
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def bpe(merges: list[tuple[str, str]]) -> Backend:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁</>sxy"]
    pieces += [first + second for first, second in merges if first + second not in pieces]
    ids = {piece: number for number, piece in enumerate(pieces)}
    return sentencepiece(
        Backend(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", byte_fallback=True))
    )


def llama2() -> Backend:
    backend = bpe([("▁", "x"), ("▁", "<"), ("s", ">")])
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return backend


def metaspace_first() -> Backend:
    backend = bpe([("▁", "x"), ("▁", "<"), ("s", ">")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return backend


def merging() -> Backend:
    """A tokenizer whose merges produce a token equal to the special token's text."""
    backend = bpe([("<", "/"), ("s", ">"), ("</", "s>"), ("▁", "x")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    return backend


def unigram() -> Backend:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((piece, -2.0) for piece in "▁</>sxy")]
    backend = sentencepiece(Backend(models.Unigram([*pieces, ("▁x", -1.0)], unk_id=0)))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return backend


@pytest.mark.parametrize("make", [llama2, metaspace_first, merging, unigram])
def test_the_text_around_a_cut_stays_the_same(make: Callable[[], Backend]) -> None:
    backend = make()
    uncut = encode(backend, "</s>x")
    assert uncut == list(backend.encode("</s>x").ids)

    text = "x </s> y</s>"
    ids = encode(backend, "", text)
    inner = [token_id for token_id in ids if token_id not in (1, 2)]

    assert backend.decode(ids) == backend.decode(inner) == text
    # Only the post-processor adds tokens.
    assert len(ids) - len(inner) == 2 * (make is llama2)


def test_normalized_text_with_a_token_of_its_own() -> None:
    backend = unigram()
    backend.normalizer = normalizers.NFKC()
    assert 2 in backend.encode("x ＜/s＞").ids

    ids = encode(backend, "", "x ＜/s＞")

    assert 2 not in ids and backend.decode(ids) == "x </s>"


def test_unknown_text_stays_unknown() -> None:
    ids = encode(unigram(), "", "x é </s>")
    assert ids.count(0) == 1 and 2 not in ids


def test_whitespace_tokens_stay_tokens() -> None:
    backend = with_tokens("\n\n")
    assert encode(backend, "", "a\n\nb")[1] == backend.token_to_id("\n\n")


FLAGGED = Tokenizer(
    with_tokens(
        *TOKENS,
        AddedToken("<w>", single_word=True),
        AddedToken("<l>", lstrip=True),
        AddedToken("<r>", rstrip=True, special=True),
    )
)
FLAG_CUTS = FLAGGED.token_cuts()
PROMPTS = st.lists(st.sampled_from([*TOKENS, " ", "<", "a", "b", "\n", "é", "<w>", "<l>", "<r>"]))


@given(PROMPTS)
def test_uncut_tokens_are_encoded_as_before(parts: list[str]) -> None:
    text = "".join(parts)
    ids = FLAGGED.encode(text, True, 10_000, cuts=FLAG_CUTS)
    assert ids == FLAGGED.encode(text, True, 10_000)
