"""Encoding: refused input, and long texts that do not block the event loop."""

import asyncio
import threading

import pytest

from services.gateway.text.tokenizer import INLINE_SIZE, TextPool, Tokenizer
from services.gateway.vocabulary.errors import BadRequest, ContextExceeded
from tests.support.byte_tokenizer import VOCAB_SIZE, byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer())


def test_each_special_token_in_a_text_is_a_single_token() -> None:
    assert TOKENIZER.encode("<|im_start|>a<|im_end|>", False, 10)[::2] == [1, 2]
    assert TOKENIZER.size == VOCAB_SIZE
    assert TOKENIZER.token_id("<|im_end|>") == 2
    assert TOKENIZER.token_id("<|nothing|>") is None


def test_invalid_unicode_is_refused() -> None:
    with pytest.raises(BadRequest) as caught:
        TOKENIZER.encode("lone \ud800", True, 100, param="bad_words")
    assert caught.value.param == "bad_words"


def test_a_token_that_the_model_lacks_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    backend = byte_tokenizer()
    backend.add_special_tokens(["<|image|>"])
    tokenizer = Tokenizer(backend)
    tokenizer.limit_ids(VOCAB_SIZE + 1)
    assert tokenizer.encode("<|image|>", False, 10) == [VOCAB_SIZE]
    tokenizer.limit_ids(VOCAB_SIZE)
    assert f"token ids up to {VOCAB_SIZE}, but" in caplog.text
    assert tokenizer.encode("a<|im_end|>", False, 10)[-1] == 2
    with pytest.raises(BadRequest, match=r"token '<\|image\|>', which the model lacks") as caught:
        tokenizer.encode("a<|image|>b", False, 10, param="messages")
    assert caught.value.param == "messages"


def test_nul_is_text() -> None:
    ids = TOKENIZER.encode("nul \0", True, 100)
    assert len(ids) == 5
    assert TOKENIZER.decode(ids, True) == "nul \0"


def test_special_tokens_are_shown_on_request() -> None:
    ids = TOKENIZER.encode("a<|im_end|>", False, 10)
    assert (TOKENIZER.decode(ids, True), TOKENIZER.decode(ids, False)) == ("a", "a<|im_end|>")
    for skip, text in ((True, "a"), (False, "a<|im_end|>")):
        detokenizer = TOKENIZER.detokenizer(skip)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == text


def test_a_text_that_cannot_fit_is_refused_before_tokenization() -> None:
    with pytest.raises(ContextExceeded, match="100000 bytes"):
        TOKENIZER.encode("x" * 100_000, True, 100)
    with pytest.raises(ContextExceeded, match="more than 40000 tokens"):
        TOKENIZER.encode("x" * 100_000, True, 40_000)
    # The caller counts a text exactly that is, or may be, only a little too long.
    assert len(TOKENIZER.encode("x" * 101, True, 100)) == 101
    assert len(TOKENIZER.encode("x" * 41_000, True, 40_000)) == 41_000


async def test_short_texts_run_inline_and_long_texts_in_a_thread() -> None:
    pool = TextPool(1)
    here = threading.get_ident()
    assert await pool.run(threading.get_ident, INLINE_SIZE) == here
    assert await pool.run(threading.get_ident, INLINE_SIZE + 1) != here
    pool.close()


async def test_a_caller_cancelled_in_the_queue_leaks_nothing() -> None:
    pool = TextPool(1)
    gate = threading.Event()
    ran = []
    large = INLINE_SIZE + 1
    first = asyncio.create_task(pool.run(gate.wait, large))
    second = asyncio.create_task(pool.run(lambda: ran.append(1), large))
    for _ in range(3):
        await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.set()
    assert await first
    await pool.run(lambda: ran.append(2), large)
    assert ran == [2]
    pool.close()


async def test_an_error_reaches_the_caller() -> None:
    pool = TextPool(1)
    with pytest.raises(BadRequest):
        await pool.run(lambda: TOKENIZER.encode("\ud800" * 2000, True, 9999), 2000)
    assert await pool.run(lambda: 7, 2000) == 7
    pool.close()
