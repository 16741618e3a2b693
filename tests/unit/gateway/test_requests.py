"""Request bodies: what is accepted, and the sentence for everything else."""

import json
from typing import Any

import pytest

from services.gateway.api.requests import parse_chat, parse_completion
from services.gateway.errors import GatewayError, InvalidRequest, Unsupported
from services.gateway.http.json_body import parse_object

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}


def chat_error(**fields: Any) -> GatewayError:
    """The error of a chat request with these fields."""
    with pytest.raises(GatewayError) as caught:
        parse_chat(parse_object(json.dumps(CHAT | fields).encode()))
    assert caught.value.status == 400
    return caught.value


BAD_SAMPLING = [
    ("max_tokens", [0, -1, 1.5, 1.0, "5", True, 2**63, [], {}]),
    ("max_completion_tokens", [0, -1, 1.5, "5", True, 2**31]),
    ("min_tokens", [-1, 1.5, "1", True]),
    ("temperature", [-0.1, 2.1, 1e308, "1", True, [1]]),
    ("top_p", [0, 0.0, 1.01, -1, "0.5", True]),
    ("top_k", [-2, 0.5, "1", True, 2**31]),
    ("seed", [2**63, 2**64, -(2**63) - 1, 1.5, "1", True]),
    ("stop", [["a"] * 5, "", [""], ["a", ""], "x" * 257, 1, [1], {}, "\ud800", [["a"]]]),
    ("stop_token_ids", [[-1], [1.5], [True], ["1"], [2**31], list(range(257)), 5, "5"]),
    ("ignore_eos", ["yes", 1, 0]),
    ("stream", ["yes", 1, "true"]),
    ("stream_options", [{}, {"include_usage": True}, "usage", {"include_usage": "yes"}]),
    ("model", [None, 1, "", "x" * 513]),
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_SAMPLING for value in values]
)
def test_numbers_and_flags_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    error = chat_error(**{name: value})
    assert isinstance(error, InvalidRequest)
    assert (error.param or "").split(".")[0] == name
    assert name in error.message


UNSUPPORTED = [
    ("n", [0, 2, 9, 1_000_000, True, "1"]),
    ("best_of", [0, 2]),
    ("presence_penalty", [0.5, 2.01, -2.01, "0"]),
    ("frequency_penalty", [1, 2.01, True]),
    ("repetition_penalty", [0, 1.1]),
    ("min_p", [-1, 0.1]),
    ("logprobs", [True, -1, 21, 5]),
    ("top_logprobs", [0, 5]),
    ("logit_bias", [{"abc": 1}, {"5": 101}, []]),
    ("tools", [[{"type": "function"}], "x"]),
    ("tool_choice", ["auto", "required", {"type": "function"}]),
    ("functions", [[{"name": "f"}]]),
    ("function_call", ["auto", {"name": "f"}]),
    ("response_format", [{"type": "json_object"}, {"type": "odd"}, "text"]),
    ("modalities", [["audio"], ["text", "audio"]]),
    ("audio", [{"voice": "x"}]),
    ("prediction", [{"type": "content"}]),
    ("reasoning_effort", ["low"]),
    ("chat_template", ["{{ messages }}"]),
    ("chat_template_kwargs", [{"tokenize": True}]),
    ("prompt_embeds", ["abc"]),
    ("suffix", ["x"]),
    ("echo", [True]),
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in UNSUPPORTED for value in values]
)
def test_what_is_not_served_yet_says_so(name: str, value: Any) -> None:
    error = chat_error(**{name: value})
    assert isinstance(error, Unsupported)
    assert error.param == name
    assert "not supported yet" in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
        {"parallel_tool_calls": True, "safety_identifier": "s", "prompt_cache_key": "k"},
        {"n": 1, "logprobs": False, "logit_bias": {}, "presence_penalty": 0, "tools": []},
        {"frequency_penalty": 0.0, "response_format": {"type": "text"}, "modalities": ["text"]},
        {"n": None, "temperature": None, "stop": None, "seed": None, "max_tokens": None},
        {"max_tokens": 5, "max_completion_tokens": 5, "min_tokens": 5},
        {"temperature": 2, "top_p": 1, "top_k": -1, "seed": 2**63 - 1, "stop": ["a"] * 4},
        {"temperature": 0, "top_p": 1e-9, "top_k": 0, "seed": -(2**63), "stop": "x" * 256},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"stop_token_ids": list(range(256)), "ignore_eos": True},
    ],
)
def test_harmless_and_neutral_fields_pass(fields: dict[str, Any]) -> None:
    parse_chat(parse_object(json.dumps(CHAT | fields).encode()))


@pytest.mark.parametrize("name", ["top_kk", "tokenize", "", "x" * 500, "\ud800"])
def test_an_unknown_field_is_named(name: str) -> None:
    error = chat_error(**{name: 1})
    assert error.code == "unknown_parameter"
    assert error.param is not None
    assert error.param[:6] in error.message
    error.message.encode()


def test_limits_that_contradict_each_other() -> None:
    assert chat_error(max_tokens=5, max_completion_tokens=6).param == "max_tokens"
    assert chat_error(max_tokens=5, min_tokens=6).param == "min_tokens"
    assert chat_error(max_completion_tokens=5, min_tokens=6).param == "min_tokens"


MESSAGES = [
    None,
    [],
    "hi",
    [1],
    [{}],
    [{"role": "user"}],
    [{"content": "x"}],
    [{"role": "wizard", "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": [{"type": "odd"}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "text", "text": 1}]}],
    [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}],
    [{"role": "user", "content": [5]}],
    [{"role": "user", "content": "lone \ud800"}],
    [{"role": "user", "content": "nul \0"}],
    [{"role": "user", "content": "x", "mood": "good"}],
    [{"role": "tool", "content": "x", "tool_call_id": "1"}],
    [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
    [{"role": "user", "content": [{"type": "file", "file": {}}]}],
]


@pytest.mark.parametrize("messages", MESSAGES)
def test_bad_messages(messages: Any) -> None:
    error = chat_error(messages=messages)
    assert (error.param or "").startswith("messages")
    json.dumps(error.body()).encode()


def test_messages_are_missing() -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        parse_chat({"model": "m"})


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    data = {
        "model": "m",
        "messages": [
            {"role": "developer", "content": parts},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "name": "n"},
        ],
    }
    assert parse_chat(data).template_messages() == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": "c"},
    ]


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("hi", ("hi",)),
        ([1, 2], ((1, 2),)),
        (["hi"], ("hi",)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a"] * 64, ("a",) * 64),
    ],
)
def test_prompts(prompt: Any, parsed: Any) -> None:
    assert parse_completion(COMPLETION | {"prompt": prompt}).prompt == parsed


@pytest.mark.parametrize(
    "prompt",
    [
        *(None, "", [], [[]], [""], [1, "a"], [True], [1.5], [-1], [2**31], ["a", [1], 2]),
        *({"a": 1}, 5, ["a"] * 65, "lone \ud800", "nul \0", [[1], []], [None], [[[1]]]),
    ],
)
def test_bad_prompts(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(COMPLETION | {"prompt": prompt})
    assert caught.value.param == "prompt"
    caught.value.message.encode()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": 1', "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b"[]", "one JSON object"),
        (b'"text"', "one JSON object"),
        (b"null", "one JSON object"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": Infinity}', "Infinity"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"b": {"a": 1, "a": 1}}', "twice"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "too long"),
        (b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "too deeply"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "too deeply"),
        (b'{"\\ud800": 1, "\\ud800": 2}', "twice"),
    ],
)
def test_bodies_that_are_not_one_json_object(body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        parse_object(body)


def test_a_float_that_overflows_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(CHAT | parse_object(b'{"temperature": 1e999}'))
    assert caught.value.param == "temperature"
