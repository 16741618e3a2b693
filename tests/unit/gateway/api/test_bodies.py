"""Request bodies: accepted fields, and the error message for others."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from services.gateway.api.chat import ChatRequest, parse_chat
from services.gateway.api.completion import CompletionRequest, parse_completion
from services.gateway.api.conversation import template_messages
from services.gateway.api.json_object import parse_object
from services.gateway.api.messages import parse_messages
from services.gateway.api.parameters import LIMITS
from services.gateway.api.responses import parse_responses
from services.gateway.vocabulary.errors import BadRequest, GatewayError, NotSupported
from tests.support.bad_inputs import CHAT, COMPLETION, BadInput, bad_inputs


def chat_error(**fields: Any) -> GatewayError:
    """The error of a chat request with these fields."""
    with pytest.raises(GatewayError) as caught:
        parse_chat(parse_object(json.dumps(CHAT | fields).encode()))
    assert caught.value.status == 400
    return caught.value


PARSED = [bad_input for bad_input in bad_inputs() if not bad_input.needs_model]


@pytest.mark.parametrize("bad", PARSED, ids=[case.name for case in PARSED])
def test_bad_fields_are_refused_by_name(bad: BadInput) -> None:
    parse = parse_chat if bad.endpoint == "chat" else parse_completion
    with pytest.raises(BadRequest) as caught:
        parse(parse_object(json.dumps(bad.body).encode()))
    error = caught.value
    assert error.status == bad.status
    assert (error.param or "").split(".")[0] == bad.param
    assert (bad.param or "") in error.message or "message" in error.message
    json.dumps(error.body()).encode()


UNSUPPORTED = [
    ("tools", [[{"type": "custom"}], [{"type": "web_search"}]]),
    ("functions", [[{"name": "f"}]]),
    ("function_call", ["auto", {"name": "f"}]),
    ("response_format", [{"type": "structural_tag"}]),
    ("modalities", [["audio"], ["text", "audio"]]),
    ("audio", [{"voice": "x"}]),
    ("prediction", [{"type": "content"}]),
    ("chat_template", ["{{ messages }}"]),
    ("prompt_embeds", ["abc"]),
    ("echo", [True]),
    ("use_beam_search", [True, 1]),
    ("length_penalty", [0.9]),
    ("logprob_token_ids", [[1]]),
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in UNSUPPORTED for value in values]
)
def test_unsupported_fields_are_refused_as_unsupported(name: str, value: Any) -> None:
    error = chat_error(**{name: value})
    assert isinstance(error, NotSupported)
    assert error.param == name
    assert "not supported" in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
        {"kv_transfer_params": {"a": 1}, "vllm_xargs": {}, "nvext": {}, "session_id": "s"},
        {"use_beam_search": False, "length_penalty": 1.0, "priority": 0, "top_logprobs": 0},
        {"top_logprobs": 20, "logprobs": True, "prompt_logprobs": 0, "n": 128, "best_of": 128},
        {"logit_bias": {"0": -100, "42": 100}, "bad_words": "x", "allowed_token_ids": [0]},
        {"min_p": 1, "repetition_penalty": 2, "presence_penalty": -2, "frequency_penalty": 2},
        {"truncate_prompt_tokens": -1, "truncation_side": "right", "request_id": "a:b/c@1"},
        {"add_generation_prompt": False, "continue_final_message": True, "cache_salt": "x"},
        {"slo": {"ttft_ms": 1, "tpot_ms": 3_600_000}, "slo_class": "interactive", "priority": -3},
        {"parallel_tool_calls": True, "safety_identifier": "s", "prompt_cache_key": "k"},
        {"n": 1, "logprobs": False, "logit_bias": {}, "presence_penalty": 0, "tools": []},
        {"frequency_penalty": 0.0, "response_format": {"type": "text"}, "modalities": ["text"]},
        {"n": None, "temperature": None, "stop": None, "seed": None, "max_tokens": None},
        {"max_tokens": 5, "max_completion_tokens": 5, "min_tokens": 5},
        {"temperature": 2, "top_p": 1, "top_k": -1, "seed": 2**63 - 1, "stop": ["a"] * 16},
        {"temperature": 0, "top_p": 1e-9, "top_k": 0, "seed": -(2**63), "stop": "x" * 256},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"stop_token_ids": list(range(256)), "ignore_eos": True},
    ],
)
def test_harmless_and_neutral_fields_are_accepted(fields: dict[str, Any]) -> None:
    parse_chat(parse_object(json.dumps(CHAT | fields).encode()))


NAMES = ["top_kk", "tokenize", "", "x" * 500, "\ud800", 'a"b\r\nc']


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ({"ttft": 400}, "'slo.ttft' is not a field; the fields are ttft_ms, tpot_ms"),
        (400, "'slo' is not an object; send a JSON object"),
    ],
)
def test_invalid_targets_list_the_valid_names(slo: Any, message: str) -> None:
    assert chat_error(slo=slo).message == message


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_field_is_refused_with_its_path(name: str) -> None:
    for data, inside in (
        (CHAT | {name: 1}, ""),
        (CHAT | {"messages": [{"role": "user", "content": "x", name: 1}]}, "messages"),
        (CHAT | {"stream": True, "stream_options": {name: 1}}, "stream_options"),
    ):
        with pytest.raises(BadRequest) as caught:
            parse_chat(data, refuse_unknown=True)
        error = caught.value
        shown = name[:64].encode("ascii", "backslashreplace").decode()
        assert (error.code, error.param) == ("unknown_parameter", inside or shown)
        assert f"'{shown}'" in error.message
        error.message.encode("ascii")


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_field_is_ignored_with_a_warning_by_default(name: str) -> None:
    messages = [{"role": "user", "content": "x", name: 1}]
    body = parse_chat(CHAT | {name: 1, "messages": messages})
    (warning,) = body.warnings
    assert warning.isascii()
    assert warning.isprintable()
    assert '"' not in warning
    assert len(warning) < 200
    assert "messages." in warning
    assert parse_chat(CHAT).warnings == ()


def test_a_warning_is_short_however_many_fields_are_unknown() -> None:
    body = parse_completion(COMPLETION | {f"odd{number}": 1 for number in range(1000)})
    (warning,) = body.warnings
    assert "odd0, odd1" in warning
    assert warning.endswith("odd7 and 992 more")


def test_a_misspelt_field_gets_a_suggestion() -> None:
    (warning,) = parse_chat(CHAT | {"temprature": 0, "Top_P": 1, "odd": 1}).warnings
    assert warning == (
        "ignored unknown fields: temprature (did you mean 'temperature'?),"
        " Top_P (did you mean 'top_p'?), odd"
    )
    with pytest.raises(BadRequest, match=r"'max_token' \(did you mean 'max_tokens'\?\); "):
        parse_completion(COMPLETION | {"max_token": 5}, refuse_unknown=True)
    options = {"stream": True, "stream_options": {"includeUsage": True}}
    (warning,) = parse_chat(CHAT | options).warnings
    assert warning.endswith("stream_options.includeUsage (did you mean 'include_usage'?)")


PARSERS: list[tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = [
    (parse_chat, CHAT, ("max_completion_tokens", "max_tokens")),
    (parse_completion, COMPLETION, ("max_tokens",)),
    (parse_messages, CHAT, ("max_tokens",)),
    (parse_responses, {"model": "m", "input": "x"}, ("max_output_tokens",)),
]


@pytest.mark.parametrize(("parse", "data", "own"), PARSERS)
def test_the_limit_of_another_dialect_is_refused_with_the_right_name(
    parse: Callable[..., Any], data: dict[str, Any], own: tuple[str, ...]
) -> None:
    others = LIMITS.difference(own)
    assert others and len(LIMITS) == 3
    for name in others:
        with pytest.raises(BadRequest) as caught:
            parse(data | {name: 5})
        assert caught.value.message == f"'{name}' is called '{own[0]}' here; use that name"
        assert caught.value.param == name
        # Clients that send every name that there is, and those that leave out by null.
        for limit in own:
            parse(data | {name: 5, limit: 5})
            parse(data | {name: None, limit: 5})
    for limit in own:
        parse(data | {limit: 5})


def test_missing_or_too_long_values_are_refused_with_a_remedy() -> None:
    long: list[Any] = [CHAT["messages"][0]] * 10
    for data, message in (
        ({"messages": long}, "'model' is missing; send the name of a model that /v1/models lists"),
        ({"model": "m"}, "'messages' is missing; send it"),
        (CHAT | {"messages": []}, "'messages' is too short; send at least 1"),
        (
            CHAT | {"stop_token_ids": list(range(257))},
            "'stop_token_ids' is too long; send at most 256",
        ),
    ):
        with pytest.raises(BadRequest) as caught:
            parse_chat(data)
        assert caught.value.message == message


def test_null_equals_an_absent_field() -> None:
    nulls = {name: None for name in ChatRequest.model_fields if name not in CHAT}
    assert parse_chat(CHAT | nulls) == parse_chat(CHAT)
    nulls = {name: None for name in CompletionRequest.model_fields if name not in COMPLETION}
    assert parse_completion(COMPLETION | nulls) == parse_completion(COMPLETION)


def test_logprobs_fields_are_parsed() -> None:
    assert parse_chat(CHAT).output_logprobs is None
    assert parse_chat(CHAT | {"logprobs": True}).output_logprobs == 0
    assert parse_chat(CHAT | {"logprobs": True, "top_logprobs": 3}).output_logprobs == 3
    assert parse_completion(COMPLETION | {"logprobs": 0}).output_logprobs == 0


def test_logit_bias_ids_may_be_integers() -> None:
    body = parse_chat(CHAT | {"logit_bias": {7: -1, 3: 0.5}})
    assert body.logit_bias == ((3, 0.5), (7, -1.0))


def test_text_parts_are_joined_and_developer_becomes_system() -> None:
    kept: Any = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "a\0"}, {"type": "text", "text": "b", **kept}]
    data = {
        "model": "m",
        "messages": [
            {"role": "developer", "content": parts},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "name": "n"},
        ],
    }
    assert template_messages(parse_chat(data).messages) == [
        {"role": "system", "content": "a\0b"},
        {"role": "assistant", "content": "c"},
    ]


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("hi", ("hi",)),
        ("nul \0", ("nul \0",)),
        ([1, 2], ((1, 2),)),
        (["hi"], ("hi",)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a"] * 64, ("a",) * 64),
    ],
)
def test_prompt_forms_are_parsed(prompt: Any, parsed: Any) -> None:
    assert parse_completion(COMPLETION | {"prompt": prompt}).prompt == parsed


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": 1', "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b"[]", "a JSON object"),
        (b'"text"', "a JSON object"),
        (b"null", "a JSON object"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": Infinity}', "Infinity"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1, "a": 2}', "duplicate"),
        (b'{"b": {"a": 1, "a": 1}}', "duplicate"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "too long"),
        (b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "too deeply"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "too deeply"),
        (b'{"\\ud800": 1, "\\ud800": 2}', "duplicate"),
    ],
)
def test_bodies_other_than_a_json_object_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parse_object(body)


def test_a_float_that_overflows_is_refused() -> None:
    with pytest.raises(BadRequest) as caught:
        parse_chat(CHAT | parse_object(b'{"temperature": 1e999}'))
    assert caught.value.param == "temperature"
