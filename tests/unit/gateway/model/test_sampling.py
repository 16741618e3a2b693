"""Request fields and model defaults become sampling parameters."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.request import PROMPT_LOGPROBS_MAX, LogprobOptions, Sampling
from services.gateway.api.chat import parse_chat
from services.gateway.api.completion import parse_completion
from services.gateway.api.fields import INT32_MAX
from services.gateway.api.generation import CHOICE_IDS_MAX
from services.gateway.model.sampling import (
    PLAIN_DEFAULTS,
    SamplingDefaults,
    bad_word_ids,
    check_choices,
    choice_seed,
    kept_output_tokens,
    logprob_options,
    sampling_of,
)
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.vocabulary.errors import BadRequest
from tests.support.bad_inputs import CHAT, COMPLETION
from tests.support.byte_tokenizer import byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer())
ADVICE = SamplingDefaults(0.6, 0.95, 20, 0.01, 1.05)


def test_model_defaults_apply_to_absent_fields_only() -> None:
    plain = sampling_of(parse_chat(CHAT | {"seed": 3}), PLAIN_DEFAULTS, ())
    assert plain == Sampling(seed=3)
    advised = sampling_of(parse_chat(CHAT | {"seed": 3}), ADVICE, ())
    assert advised == Sampling(0.6, 0.95, 20, 3, 0.01, repetition_penalty=1.05)
    zeros = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    own = sampling_of(parse_chat(CHAT | zeros | {"seed": 3}), ADVICE, ())
    assert own == Sampling(temperature=0, seed=3)


@given(st.integers(0, 2**64 - 1))
def test_seeds_of_choices_derive_from_the_first_and_differ(seed: int) -> None:
    seeds = [choice_seed(seed, choice) for choice in range(16)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 16
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seeds == [choice_seed(seed, choice) for choice in range(16)]


def test_seeds_of_choices_are_the_same_in_every_release() -> None:
    assert choice_seed(7, 1) == int.from_bytes(bytes.fromhex("e0f322135f97a7cd"), "little")


def test_bad_words_are_encoded_with_and_without_a_leading_space() -> None:
    encode = byte_tokenizer().encode
    texts = ("no", " no", "a b", " a b", "\n", " \n", " ", "  ")
    wanted = tuple(tuple(encode(text).ids) for text in texts)
    assert bad_word_ids(["no", " no", "  a b", "\n", " "], TOKENIZER) == wanted


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (Sampling(), "prompt"),
        (Sampling(allowed_token_ids=tuple(range(60_000))), "allowed_token_ids"),
        (Sampling(logit_bias=tuple((token_id, 1.0) for token_id in range(30_000))), "logit_bias"),
        (Sampling(bad_words=((1, 2),) * 30_000), "bad_words"),
    ],
)
def test_total_token_names_of_all_choices_are_bounded(sampling: Sampling, param: str) -> None:
    given = sampling != Sampling()
    each = 60_000 * given
    prompt_tokens = CHOICE_IDS_MAX // 16 - each
    check_choices(prompt_tokens, 1, 16, sampling, "prompt")
    check_choices(2 * prompt_tokens, 2, 8, sampling, "prompt")
    for prompts, n in ((1, 17), (2, 16), (34, 1)):
        with pytest.raises(BadRequest, match=f"{prompts * n} choices name") as caught:
            check_choices(prompts * (prompt_tokens + 1), prompts, n, sampling, "prompt")
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"n": 128, "max_tokens": 8192}, 8192),
        ({"n": 128}, 8192),
        ({"prompt": ["a"] * 64, "n": 2}, 8192),
        ({"n": 128, "max_tokens": 8193}, None),
        ({"prompt": ["a"] * 64, "n": 2, "max_tokens": 8193}, None),
        ({"n": 128, "max_tokens": 8193, "stream": True}, INT32_MAX),
        ({"max_tokens": 2**21}, INT32_MAX),
    ],
)
def test_max_tokens_of_several_choices_are_summed(fields: dict[str, Any], kept: int | None) -> None:
    body = parse_completion({"model": "m", "prompt": "a"} | fields)
    if kept is not None:
        assert kept_output_tokens(body) == kept
        return
    with pytest.raises(BadRequest, match="128 choices of up to 8193 tokens") as caught:
        kept_output_tokens(body)
    assert caught.value.param == "max_tokens"


def test_too_many_bad_words_are_refused() -> None:
    bad_word_ids([f"w{number}" for number in range(64)], TOKENIZER)
    for bad_words in (
        [f"w{number}" for number in range(65)],
        ["x" * 200 + str(n) for n in range(12)],
    ):
        with pytest.raises(BadRequest, match="bad_words"):
            bad_word_ids(bad_words, TOKENIZER)


@pytest.mark.parametrize(
    ("fields", "echo", "options"),
    [
        ({}, True, LogprobOptions()),
        ({"logprobs": 3}, False, LogprobOptions(3)),
        ({"logprobs": 3}, True, LogprobOptions(3, 3)),
        ({"prompt_logprobs": 2}, False, LogprobOptions(None, 2)),
        ({"prompt_logprobs": 2, "logprobs": 0}, True, LogprobOptions(0, 2)),
    ],
)
def test_log_probabilities_requested_from_the_worker(
    fields: dict[str, int], echo: bool, options: LogprobOptions
) -> None:
    assert logprob_options(parse_completion(COMPLETION | fields), echo, 100) == options


def test_too_many_log_probabilities_are_refused() -> None:
    body = parse_completion(COMPLETION | {"prompt_logprobs": 20})
    most = PROMPT_LOGPROBS_MAX // 21
    logprob_options(body, False, most)
    with pytest.raises(BadRequest) as caught:
        logprob_options(body, False, most + 1)
    assert caught.value.param == "prompt_logprobs"
    with pytest.raises(BadRequest) as caught:
        logprob_options(parse_completion(COMPLETION | {"logprobs": 20}), True, most + 1)
    assert caught.value.param == "logprobs"
