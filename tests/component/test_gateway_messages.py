"""Anthropic's Messages API as its clients see it, in front of fake services."""

import json
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.etcd import Store
from tests.support.byte_tokenizer import EOS_ID, VOCAB_SIZE
from tests.support.gateway import TEXT, TOKENIZER, Case, gateway_case, text_ids
from tests.support.waiting import eventually
from tideserve.scheduler.v1 import scheduler_pb2

HI: list[Any] = [{"role": "user", "content": "hi"}]
# What the template makes of HI, in tokens of one byte, two of them special.
HI_TOKENS = len("user\nhi" + "\n" + "assistant\n") + 3
ASK: dict[str, Any] = {"model": "m", "max_tokens": 8, "messages": HI}


@pytest.fixture
async def case(store: Store, tmp_path: Path) -> AsyncIterator[Case]:
    async with gateway_case(store, tmp_path / "model") as case:
        yield case


async def send(case: Case, **fields: Any) -> httpx.Response:
    """A message, by hand."""
    return await case.http.post("/v1/messages", json=ASK | fields)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; the name of each is its type."""
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def prompt_of(case: Case) -> str:
    """The text that the worker was last asked to go on with."""
    ids = case.cluster.workers[0].starts[-1].prompt_ids
    return TOKENIZER.decode(list(ids), skip_special_tokens=False)


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
        },
    }


@pytest.mark.parametrize("tokens_per_event", [1, 7])
async def test_events_of_a_stream_in_the_order_of_the_api(
    case: Case, tokens_per_event: int
) -> None:
    case.cluster.workers[0].tokens_per_event = tokens_per_event
    whole = (await send(case, max_tokens=90)).json()
    events = events_of(await send(case, max_tokens=90, stream=True))
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
        "usage": whole["usage"],
    }
    assert end == {"type": "message_stop"}


@pytest.mark.parametrize("stream", [False, True])
async def test_why_it_stopped(case: Case, stream: bool) -> None:
    async def stop_of(**fields: Any) -> tuple[str, str | None, str]:
        answer = await send(case, max_tokens=40, stream=stream, **fields)
        if not stream:
            message = answer.json()
            text = "".join(block["text"] for block in message["content"])
            return message["stop_reason"], message["stop_sequence"], text
        events = events_of(answer)
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
    # Nothing at all is an answer without blocks.
    case.cluster.workers[0].script = lambda _: [EOS_ID]
    assert await stop_of() == ("end_turn", None, "")


async def test_messages_become_the_chat_that_they_stand_for(case: Case) -> None:
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
    prompt = prompt_of(case)
    await case.chat(
        max_tokens=1,
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ],
    )
    assert prompt == prompt_of(case)


async def test_sampling_is_that_of_the_chat(case: Case) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "ignore_eos": True}
    await send(case, **fields, metadata={"user_id": "u"}, service_tier="auto")
    start = case.cluster.workers[0].starts[-1]
    await case.chat(max_tokens=8, **fields)
    other = case.cluster.workers[0].starts[-1]
    assert start.sampling == other.sampling
    assert start.limits == other.limits
    assert EOS_ID not in start.limits.stop_token_ids


async def test_an_answer_that_has_begun_goes_on(case: Case) -> None:
    begun = {"role": "assistant", "content": "The"}
    assert (await send(case, messages=[*HI, begun])).status_code == 200
    assert prompt_of(case).endswith("<|im_start|>assistant\nThe")


async def test_unknown_fields_are_told_or_refused(store: Store, tmp_path: Path) -> None:
    # Names of the chat that are spelled otherwise here, or have no place, are as unknown as others.
    fields: dict[str, Any] = {"odd": 1, "n": 2, "stop": ["x"]}
    async with gateway_case(store, tmp_path / "model") as case:
        answer = await send(case, **fields, speed="fast", cache_control={"type": "ephemeral"})
        assert answer.status_code == 200
        assert answer.headers["warning"] == '299 tideserve "unknown and ignored: odd, n, stop"'
        assert answer.json()["content"] == [{"type": "text", "text": TEXT[:8]}]
    async with gateway_case(store, tmp_path / "model", unknown_fields="refuse") as case:
        for name, value in fields.items():
            answer = await send(case, **{name: value})
            assert answer.status_code == 400
            assert f"'{name}'" in answer.json()["error"]["message"]
        assert (await send(case, speed="fast")).status_code == 200


async def test_models_as_clients_of_both_apis_read_them(case: Case) -> None:
    models = (await case.http.get("/v1/models")).json()
    assert models["has_more"] is False
    assert (models["first_id"], models["last_id"]) == ("m", "m")
    (model,) = models["data"]
    assert (model["type"], model["object"], model["display_name"]) == ("model", "model", "m")
    assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]


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


async def test_the_key_may_stand_in_a_header_of_its_own(store: Store, tmp_path: Path) -> None:
    async with (
        gateway_case(store, tmp_path / "model", api_key="secret") as case,
        httpx.AsyncClient(base_url=case.url) as http,
    ):
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"authorization": "Bearer secret"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": ""}, 401),
            # One that is wrong is not made good by another one.
            ({"x-api-key": "secret", "authorization": "Bearer wrong"}, 401),
            ({}, 401),
        ):
            answer = await http.post("/v1/messages", json=ASK, headers=headers)
            assert answer.status_code == status
            if status == 401:
                body = answer.json()
                assert body["type"] == "error"
                assert body["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "kind", "word"),
    [
        ({"model": "other"}, 404, "not_found_error", "other"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": "hi"}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error", "role"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "invalid_request_error", "content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "odd"}]}]},
            400,
            "invalid_request_error",
            "type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": ["odd"]}]}]},
            400,
            "invalid_request_error",
            "type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]},
            400,
            "invalid_request_error",
            "'thinking'",
        ),
        (
            {"messages": [{"role": "user", "content": "\ud800"}]},
            400,
            "invalid_request_error",
            "'messages'",
        ),
        ({"system": 3}, 400, "invalid_request_error", "system"),
        ({"max_tokens": -1}, 400, "invalid_request_error", "'max_tokens'"),
        ({"max_tokens": None}, 400, "invalid_request_error", "'max_tokens'"),
        ({"max_tokens": "8"}, 400, "invalid_request_error", "'max_tokens'"),
        ({"max_tokens": 300}, 400, "invalid_request_error", "300"),
        ({"temperature": 9}, 400, "invalid_request_error", "'temperature'"),
        ({"top_k": VOCAB_SIZE + 1}, 400, "invalid_request_error", "'top_k'"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "'stop_sequences'"),
        ({"stop_sequences": ["x"] * 5}, 400, "invalid_request_error", "'stop_sequences'"),
        ({"container": "c"}, 400, "invalid_request_error", "'container'"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "s"}]},
            400,
            "invalid_request_error",
            "web_search",
        ),
    ],
)
async def test_errors(
    case: Case, stream: bool, fields: dict[str, Any], status: int, kind: str, word: str
) -> None:
    content = json.dumps(ASK | {"stream": stream} | fields).encode()
    answer = await case.http.post(
        "/v1/messages", content=content, headers={"content-type": "application/json"}
    )
    assert answer.status_code == status
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
async def test_what_is_not_there(
    case: Case, method: str, path: str, status: int, kind: str
) -> None:
    answer = await case.http.request(method, path)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)


async def test_a_full_cluster_is_overloaded(case: Case) -> None:
    case.cluster.scheduler.refusal = scheduler_pb2.Refusal(
        reason=scheduler_pb2.REFUSAL_REASON_QUEUE_FULL, message="because", retry_after_s=2.5
    )
    answer = await send(case, stream=True)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    assert answer.json()["error"] == {"type": "overloaded_error", "message": "because"}


async def test_a_stream_that_breaks_ends_with_an_error_event(case: Case) -> None:
    worker = case.cluster.workers[0]
    worker.pause_at = 3
    asked = ASK | {"stream": True, "max_tokens": 50}
    async with case.http.stream("POST", "/v1/messages", json=asked) as answer:
        lines = answer.aiter_lines()
        seen = ""
        while TEXT[2] not in seen:
            line = await anext(lines)
            if line.startswith("data: "):
                seen += json.loads(line.removeprefix("data: ")).get("delta", {}).get("text", "")
        worker.hang_up()
        rest = [line async for line in lines if line]
    assert rest[-2] == "event: error"
    error = json.loads(rest[-1].removeprefix("data: "))
    assert error["type"] == "error"
    assert error["error"]["type"] == "overloaded_error"
    assert error["error"]["message"]


async def test_a_client_that_hangs_up_ends_the_generation(case: Case) -> None:
    worker = case.cluster.workers[0]
    worker.pause_at = 3
    asked = ASK | {"stream": True, "max_tokens": 50}
    async with case.http.stream("POST", "/v1/messages", json=asked) as answer:
        await anext(answer.aiter_lines())
    await eventually(lambda: worker.aborted == [worker.starts[-1].request_id])


async def test_metrics_tell_the_endpoints(case: Case) -> None:
    assert (await send(case)).status_code == 200
    await case.http.post("/v1/messages/count_tokens", json={"model": "m", "messages": HI})
    metrics = (await case.http.get("/metrics")).text.splitlines()
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        line = f'tideserve_gateway_requests_total{{endpoint="{path}",status="200"}} 1.0'
        assert line in metrics
    assert 'vllm:request_success_total{finished_reason="length",model_name="m"} 1.0' in metrics


async def test_the_description_tells_the_fields(case: Case) -> None:
    paths = (await case.http.get("/openapi.json")).json()["paths"]
    body = paths["/v1/messages"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "max_tokens", "stop_sequences", "temperature"} <= body["properties"].keys()
    assert not {"n", "stop", "stream_options"} & body["properties"].keys()
    assert set(body["required"]) == {"model", "messages", "max_tokens"}
    assert "$ref" not in json.dumps(body)
