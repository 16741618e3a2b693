"""Anthropic's Messages API as its clients see it, in front of fake services."""

import itertools
import json
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.etcd import Store
from services.core.quota.limits import QuotaLimits
from tests.support.byte_tokenizer import EOS_ID, VOCAB_SIZE
from tests.support.gateway import TEXT, Case, gateway_case, named_events, text_ids
from tests.support.waiting import eventually
from tideserve.cli.keys import add_key

HI: list[Any] = [{"role": "user", "content": "hi"}]
# HI rendered by the template, in tokens of a byte, two of them special.
HI_TOKENS = len("user\nhi" + "\n" + "assistant\n") + 3
ASK: dict[str, Any] = {"model": "m", "max_tokens": 8, "messages": HI}


async def send(case: Case, **fields: Any) -> httpx.Response:
    """Send a message without the official client."""
    return await case.http.post("/v1/messages", json=ASK | fields)


async def test_whole(case: Case) -> None:
    answer = await send(case)
    assert answer.status_code == 200
    message = answer.json()
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": TEXT[:8]}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": HI_TOKENS,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 8,
            "service_tier": "standard",
        },
    }


@pytest.mark.parametrize("tokens_per_event", [1, 7])
async def test_a_streams_events_follow_the_order_of_the_api(
    case: Case, tokens_per_event: int
) -> None:
    case.cluster.workers[0].tokens_per_event = tokens_per_event
    whole = (await send(case, max_tokens=90)).json()
    events = named_events(await send(case, max_tokens=90, stream=True))
    start, block, *deltas, stop, delta, end = events
    assert start["message"].pop("id") != whole["id"]
    assert start == {
        "type": "message_start",
        "message": {name: whole[name] for name in ("type", "role", "model")}
        | {"content": [], "stop_reason": None, "stop_sequence": None}
        | {"usage": whole["usage"] | {"output_tokens": 0}},
    }
    assert block == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    assert {event["type"] for event in deltas} == {"content_block_delta"}
    assert all(event["delta"].keys() == {"type", "text"} for event in deltas)
    assert "".join(event["delta"]["text"] for event in deltas) == whole["content"][0]["text"]
    assert stop == {"type": "content_block_stop", "index": 0}
    assert delta == {
        "type": "message_delta",
        "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
        "usage": {name: n for name, n in whole["usage"].items() if name != "service_tier"},
    }
    assert end == {"type": "message_stop"}


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_reasons(case: Case, stream: bool) -> None:
    async def stop_of(**fields: Any) -> tuple[str, str | None, str]:
        answer = await send(case, max_tokens=40, stream=stream, **fields)
        if not stream:
            message = answer.json()
            text = "".join(block["text"] for block in message["content"])
            return message["stop_reason"], message["stop_sequence"], text
        events = named_events(answer)
        texts = [event["delta"].get("text", "") for event in events if "delta" in event]
        delta = events[-2]["delta"]
        return delta["stop_reason"], delta["stop_sequence"], "".join(texts)

    assert await stop_of(stop_sequences=["xyz", " comes"]) == (
        "stop_sequence",
        " comes",
        "The tide",
    )
    case.cluster.workers[0].script = lambda _: [*text_ids("end"), EOS_ID]
    assert await stop_of() == ("end_turn", None, "end")
    # An empty output is a response without blocks.
    case.cluster.workers[0].script = lambda _: [EOS_ID]
    assert await stop_of() == ("end_turn", None, "")


async def test_messages_are_converted_to_a_chat(case: Case) -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    await send(
        case,
        system=[{"type": "text", "text": "be "}, {"type": "text", "text": "brief", **hint}],
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "c", "citations": None},
                ],
            },
            {"role": "user", "content": "d"},
        ],
    )
    prompt = case.prompt
    await case.chat(
        max_tokens=1,
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ],
    )
    assert prompt == case.prompt


async def test_sampling_equals_that_of_a_chat(case: Case) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "ignore_eos": True}
    await send(case, **fields, metadata={"user_id": "u"}, service_tier="auto")
    start = case.cluster.workers[0].starts[-1]
    await case.chat(max_tokens=8, **fields)
    other = case.cluster.workers[0].starts[-1]
    assert start.sampling == other.sampling
    assert start.limits == other.limits
    assert EOS_ID not in start.limits.stop_token_ids


@pytest.mark.parametrize(
    ("asked", "tier"), [("standard_only", "standard"), ("flex", "batch"), ("priority", "priority")]
)
async def test_the_service_tier_can_be_requested(case: Case, asked: str, tier: str) -> None:
    answer = await send(case, service_tier=asked)
    assert answer.json()["usage"]["service_tier"] == tier


async def test_a_partial_answer_is_continued(case: Case) -> None:
    begun = {"role": "assistant", "content": "The"}
    assert (await send(case, messages=[*HI, begun])).status_code == 200
    assert case.prompt.endswith("<|im_start|>assistant\nThe")


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
async def test_an_empty_partial_answer_is_ignored(case: Case, content: Any) -> None:
    begun = {"role": "assistant", "content": content}
    prompts = []
    for messages in (HI, [*HI, begun]):
        answer = await send(case, messages=messages)
        assert answer.status_code == 200, answer.text
        prompts.append(case.prompt)
    assert prompts[0] == prompts[1]


async def test_unknown_fields_are_listed_or_refused(store: Store, tmp_path: Path) -> None:
    # Chat fields that are named differently or missing here count as unknown.
    fields: dict[str, Any] = {"odd": 1, "n": 2, "stop": ["x"]}
    async with gateway_case(store, tmp_path / "model") as case:
        answer = await send(case, **fields, speed="fast", cache_control={"type": "ephemeral"})
        assert answer.status_code == 200
        assert answer.headers["warning"] == '299 tideserve "ignored unknown fields: odd, n, stop"'
        assert answer.json()["content"] == [{"type": "text", "text": TEXT[:8]}]
    async with gateway_case(store, tmp_path / "model", unknown_fields="refuse") as case:
        for name, value in fields.items():
            answer = await send(case, **{name: value})
            assert answer.status_code == 400
            assert f"'{name}'" in answer.json()["error"]["message"]
        assert (await send(case, speed="fast")).status_code == 200


async def test_the_model_list_suits_clients_of_both_apis(case: Case) -> None:
    models = (await case.http.get("/v1/models")).json()
    assert models["has_more"] is False
    assert (models["first_id"], models["last_id"]) == ("m", "m")
    (model,) = models["data"]
    assert (model["type"], model["object"], model["display_name"]) == ("model", "model", "m")
    assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]


async def test_nothing_is_stored(case: Case) -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        answer = await send(case, thread=thread)
        assert answer.status_code == 400
        assert answer.json()["error"]["details"] == {
            "error_code": "thread_unsupported_request",
            "unsupported": ["thread"],
        }
    assert (await send(case, thread=None)).status_code == 200


async def test_count_tokens(case: Case) -> None:
    for fields in ({}, {"system": "brief"}, {"messages": [*HI, *HI], "max_tokens": 3}):
        answer = await case.http.post(
            "/v1/messages/count_tokens", json={"model": "m", "messages": HI} | fields
        )
        assert answer.status_code == 200
        usage = (await send(case, **{"max_tokens": 1} | fields)).json()["usage"]
        assert answer.json() == {"input_tokens": usage["input_tokens"]}
    answer = await case.http.post("/v1/messages/count_tokens", json={"model": "m"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.gateway(api_key="secret")
async def test_the_key_may_be_in_x_api_key(case: Case) -> None:
    async with httpx.AsyncClient(base_url=case.url) as http:
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"authorization": "Bearer secret"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": ""}, 401),
            # A valid key does not make up for a wrong one.
            ({"x-api-key": "secret", "authorization": "Bearer wrong"}, 401),
            ({}, 401),
        ):
            answer = await http.post("/v1/messages", json=ASK, headers=headers)
            assert answer.status_code == status
            if status == 401:
                body = answer.json()
                assert body["type"] == "error"
                assert body["error"]["type"] == "authentication_error"


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"model": "other"}, "other"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
    ({"messages": [{"role": "user", "content": 3}]}, "content"),
    ({"messages": [{"role": "user", "content": [{"type": "odd"}]}]}, "type"),
    ({"messages": [{"role": "user", "content": [{"type": ["odd"]}]}]}, "type"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]},
        "'thinking'",
    ),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "'messages'"),
    ({"system": 3}, "system"),
    ({"max_tokens": -1}, "'max_tokens'"),
    ({"max_tokens": None}, "'max_tokens'"),
    ({"max_tokens": "8"}, "'max_tokens'"),
    ({"max_tokens": 300}, "300"),
    ({"temperature": 9}, "'temperature'"),
    ({"top_k": VOCAB_SIZE + 1}, "'top_k'"),
    ({"stop_sequences": [""]}, "'stop_sequences'"),
    ({"stop_sequences": ["x"] * 17}, "'stop_sequences'"),
    ({"container": "c"}, "'container'"),
    ({"tools": [{"type": "web_search_20250305", "name": "s"}]}, "web_search"),
]


async def test_errors(case: Case) -> None:
    for stream, (fields, word) in itertools.product((False, True), ERRORS):
        unknown = (404, "not_found_error")
        status, kind = unknown if "model" in fields else (400, "invalid_request_error")
        content = json.dumps(ASK | {"stream": stream} | fields).encode()
        answer = await case.http.post(
            "/v1/messages", content=content, headers={"content-type": "application/json"}
        )
        assert answer.status_code == status, fields
        body = answer.json()
        assert body.keys() == {"type", "error", "request_id"}
        assert body["type"] == "error"
        assert body["error"].keys() == {"type", "message"}
        assert body["error"]["type"] == kind
        assert word in body["error"]["message"]
        assert body["request_id"] == answer.headers["x-request-id"] == answer.headers["request-id"]
        assert case.cluster.workers[0].starts == []


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
    ],
)
async def test_missing_routes(case: Case, method: str, path: str, status: int, kind: str) -> None:
    answer = await case.http.request(method, path)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)


async def test_a_full_cluster_is_overloaded(case: Case) -> None:
    case.refuse(message="because", retry_after_s=2.5)
    answer = await send(case, stream=True)
    assert answer.status_code == 529 and 3 <= int(answer.headers["retry-after"]) <= 5
    assert answer.json()["error"] == {"type": "overloaded_error", "message": "because"}


@pytest.mark.gateway(messages_529=False)
async def test_a_full_cluster_may_answer_503(case: Case) -> None:
    case.refuse(message="because", retry_after_s=2.5)
    answer = await send(case)
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "overloaded_error"


async def test_a_stream_that_breaks_ends_with_an_error_event(case: Case) -> None:
    worker = case.paused(3)
    asked = ASK | {"stream": True, "max_tokens": 50}
    async with case.http.stream("POST", "/v1/messages", json=asked) as answer:
        lines = answer.aiter_lines()
        seen = ""
        while TEXT[2] not in seen:
            line = await anext(lines)
            if line.startswith("data: "):
                seen += json.loads(line.removeprefix("data: ")).get("delta", {}).get("text", "")
        worker.die()
        rest = [line async for line in lines if line]
    assert rest[-2] == "event: error"
    error = json.loads(rest[-1].removeprefix("data: "))
    assert error["type"] == "error"
    assert error["error"]["type"] == "overloaded_error"
    assert error["error"]["message"]


async def test_a_client_that_hangs_up_ends_the_generation(case: Case) -> None:
    worker = case.paused(3)
    asked = ASK | {"stream": True, "max_tokens": 50}
    async with case.http.stream("POST", "/v1/messages", json=asked) as answer:
        await anext(answer.aiter_lines())
    await eventually(lambda: worker.aborted == [worker.starts[-1].request_id])


async def test_metrics_are_labelled_by_endpoint(case: Case) -> None:
    assert (await send(case)).status_code == 200
    await case.http.post("/v1/messages/count_tokens", json={"model": "m", "messages": HI})
    metrics = (await case.http.get("/metrics")).text.splitlines()
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        line = f'tideserve_gateway_requests_total{{endpoint="{path}",status="200"}} 1.0'
        assert line in metrics
    assert 'vllm:request_success_total{finished_reason="length",model_name="m"} 1.0' in metrics


async def test_the_description_lists_the_fields(case: Case) -> None:
    paths = (await case.http.get("/openapi.json")).json()["paths"]
    body = paths["/v1/messages"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "max_tokens", "stop_sequences", "temperature"} <= body["properties"].keys()
    assert not {"n", "stop", "stream_options"} & body["properties"].keys()
    assert set(body["required"]) == {"model", "messages", "max_tokens"}
    assert "$ref" not in json.dumps(body)


ARGUMENTS = '{"city": "Köln"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "get_weather", "description": "Tells.", "input_schema": PARAMETERS}
FUNCTION = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tells.", "parameters": PARAMETERS},
}


@pytest.fixture
async def roomy(store: Store, tmp_path: Path) -> AsyncIterator[Case]:
    """A gateway whose context leaves room for tools."""
    fields = {"max_model_len": 4096, "reasoning_format": "qwen3"}
    async with gateway_case(store, tmp_path / "model", **fields) as case:
        yield case


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a stream, accumulated as by clients."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"] | {"json": ""})
            case "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                assert event["index"] == len(blocks) - 1
                if delta["type"] == "input_json_delta":
                    block["json"] += delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "content_block_stop":
                assert event["index"] == len(blocks) - 1
    for block in blocks:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(arguments)
    return blocks


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks without fields that differ between responses."""
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


@pytest.mark.parametrize("tokens_per_event", [1, 3, 1000])
@pytest.mark.parametrize("text", [CALL, f"<think>\nhm\n</think>\n\na {CALL} b {CALL} c", "a"])
async def test_thoughts_text_and_calls_are_blocks(
    roomy: Case, tokens_per_event: int, text: str
) -> None:
    roomy.cluster.workers[0].tokens_per_event = tokens_per_event
    roomy.answer_with(text)
    asked: dict[str, Any] = {"tools": [TOOL], "max_tokens": 400}
    whole = (await send(roomy, **asked)).json()
    kinds = [block["type"] for block in whole["content"]]
    assert kinds.count("tool_use") == text.count("<tool_call>")
    assert kinds.count("thinking") == text.count("<think>")
    assert whole["stop_reason"] == ("tool_use" if CALL in text else "end_turn")
    for block in whole["content"]:
        if block["type"] == "tool_use":
            assert (block["name"], block["input"]) == ("get_weather", {"city": "Köln"})
    events = named_events(await send(roomy, **asked, stream=True))
    assert without_ids(put_together(events)) == without_ids(whole["content"])
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]


async def test_a_call_and_its_result(roomy: Case) -> None:
    roomy.answer_with(f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}")
    first = (await send(roomy, tools=[TOOL], max_tokens=400)).json()
    use = first["content"][-1]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "rain", "is_error": False}
    after = {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}
    messages = [*HI, {"role": "assistant", "content": first["content"]}, after]
    assert (await send(roomy, tools=[TOOL], messages=messages)).status_code == 200
    prompt = roomy.prompt
    function = {"name": "get_weather", "arguments": ARGUMENTS}
    message = {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning": first["content"][0]["thinking"],
        "tool_calls": [{"id": use["id"], "type": "function", "function": function}],
    }
    answer = {"role": "tool", "tool_call_id": use["id"], "content": "rain"}
    chat = [*HI, message, answer, {"role": "user", "content": "So?"}]
    assert (await roomy.chat(tools=[FUNCTION], messages=chat)).status_code == 200
    assert prompt == roomy.prompt
    counted = {"model": "m", "messages": messages, "tools": [TOOL]}
    answer_ = await roomy.http.post("/v1/messages/count_tokens", json=counted)
    starts = roomy.cluster.workers[0].starts
    assert answer_.json() == {"input_tokens": len(starts[-1].prompt_ids)}


@pytest.mark.parametrize(
    ("asked", "chat"),
    [
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        (
            {"tool_choice": {"type": "tool", "name": "get_weather"}},
            {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        ),
        (
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"tool_choice": {"type": "auto"}}, {}),
    ],
)
async def test_choices_of_tools(roomy: Case, asked: dict[str, Any], chat: dict[str, Any]) -> None:
    assert (await send(roomy, tools=[TOOL], **asked)).status_code == 200
    await roomy.chat(tools=[FUNCTION], max_tokens=8, **chat)
    ours, theirs = roomy.cluster.workers[0].starts[-2:]
    assert ours.sampling.grammar == theirs.sampling.grammar
    assert ours.prompt_ids == theirs.prompt_ids


@pytest.mark.parametrize("name", ["output_config", "output_format"])
async def test_output_formats(roomy: Case, name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form: dict[str, Any] = {"type": "json_schema", "schema": schema}
    asked = {name: {"format": form} if name == "output_config" else form}
    assert (await send(roomy, **asked)).status_code == 200
    json_schema = {"name": "output", "schema": schema, "strict": True}
    json_form = {"type": "json_schema", "json_schema": json_schema}
    await roomy.chat(response_format=json_form, max_tokens=8)
    ours, theirs = roomy.cluster.workers[0].starts[-2:]
    assert ours.sampling.HasField("grammar")
    assert ours.sampling.grammar == theirs.sampling.grammar
    form["schema"] = {"type": "object", "$ref": "#/nowhere"}
    answer = await send(roomy, **asked)
    assert answer.status_code == 400
    assert "output_config.format" in answer.json()["error"]["message"]


async def test_a_truncated_call(roomy: Case) -> None:
    roomy.answer_with(CALL)
    message = (await send(roomy, tools=[TOOL], max_tokens=60)).json()
    assert message["stop_reason"] == "max_tokens"
    (block,) = message["content"]
    assert block["input"] == {"INVALID_JSON": ARGUMENTS[: len(block["input"]["INVALID_JSON"])]}
    assert 0 < len(block["input"]["INVALID_JSON"]) < len(ARGUMENTS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", ["max_tokens", "tool_use"])
async def test_a_truncated_call_leaves_the_stop_reason_of_calls_before_it(
    roomy: Case, stream: bool, reason: str
) -> None:
    text = f'{CALL}\n<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "Ne'
    roomy.answer_with(text)
    limit = len(text) if reason == "max_tokens" else 400
    answer = await send(roomy, tools=[TOOL], max_tokens=limit, stream=stream)
    message = named_events(answer)[-2]["delta"] if stream else answer.json()
    assert message["stop_reason"] == reason


async def test_a_quota_error_in_the_format_of_the_api(store: Store, tmp_path: Path) -> None:
    keys = tmp_path / "keys.jsonl"
    keys.touch(0o600)
    key = add_key(keys, "owner", False, None, QuotaLimits(requests_per_minute=1))
    async with (
        gateway_case(store, tmp_path / "model", api_keys_file=keys, api_key="all") as case,
        httpx.AsyncClient(base_url=case.url, headers={"x-api-key": key}) as http,
    ):
        answers = [await http.post("/v1/messages", json=ASK) for _ in range(20)]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
