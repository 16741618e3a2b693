"""OpenAI's Responses API as its clients see it, in front of fake services."""

import itertools
import json
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.support.byte_tokenizer import VOCAB_SIZE
from tests.support.gateway import TEXT, Case, named_events
from tests.support.waiting import eventually

# "hi" rendered by the template, in tokens of a byte, two of them special.
HI_TOKENS = len("user\nhi" + "\n" + "assistant\n") + 3
ASK: dict[str, Any] = {"model": "m", "max_output_tokens": 8, "input": "hi"}
ARGUMENTS = '{"city": "Köln"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


pytestmark = pytest.mark.gateway(max_model_len=2048)


async def send(case: Case, **fields: Any) -> httpx.Response:
    """Send a request without the official client."""
    return await case.http.post("/v1/responses", json=ASK | fields)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must be numbered consecutively."""
    events = named_events(answer)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """The response without fields that differ between responses."""
    items = [
        {n: v for n, v in item.items() if n not in ("id", "call_id")} for item in response["output"]
    ]
    return response | {"output": items, "id": None, "created_at": None, "completed_at": None}


async def test_whole(case: Case) -> None:
    case.answer_with("Paris.")
    answer = (await send(case, temperature=0.5, metadata={"k": "v"}, store=True)).json()
    (item,) = answer.pop("output")
    assert answer.pop("id").startswith("resp_")
    assert answer.pop("created_at") <= answer.pop("completed_at")
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Paris.", "annotations": [], "logprobs": []}],
    }
    assert answer == {
        "object": "response",
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": 8,
        "metadata": {"k": "v"},
        "model": "m",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        # Regardless of the request.
        "store": False,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": HI_TOKENS,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len("Paris.") + 1,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": HI_TOKENS + len("Paris.") + 1,
        },
    }


async def test_a_truncated_response_is_incomplete(case: Case) -> None:
    answer = await case.openai.responses.create(model="m", input="hi", max_output_tokens=8)
    assert (answer.status, answer.output_text) == ("incomplete", TEXT[:8])
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]
    events = events_of(await send(case, stream=True))
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(events[-1]["response"]) == without_ids((await send(case)).json())


@pytest.mark.parametrize("tokens_per_event", [1, 7, 1000])
async def test_a_streams_events_follow_the_order_of_the_api(
    case: Case, tokens_per_event: int
) -> None:
    case.cluster.workers[0].tokens_per_event = tokens_per_event
    case.answer_with(TEXT)
    whole = (await send(case, max_output_tokens=200)).json()
    events = events_of(await send(case, max_output_tokens=200, stream=True))
    created, going, added, part, *deltas, text, part_done, item_done, completed = events
    assert [created["type"], going["type"]] == ["response.created", "response.in_progress"]
    assert created["response"] == going["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    assert added["type"] == "response.output_item.added"
    assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])
    item_id = added["item"]["id"]
    assert part["type"] == "response.content_part.added"
    assert part["part"]["text"] == ""
    assert {event["type"] for event in deltas} == {"response.output_text.delta"}
    assert "".join(event["delta"] for event in deltas) == TEXT
    assert (text["type"], text["text"]) == ("response.output_text.done", TEXT)
    assert part_done["part"] == item_done["item"]["content"][0]
    assert (part_done["type"], part_done["part"]["text"]) == ("response.content_part.done", TEXT)
    for event in (part, *deltas, text, part_done):
        place = (event["item_id"], event["output_index"], event["content_index"])
        assert place == (item_id, 0, 0)
    assert (item_done["type"], item_done["item"]["id"]) == ("response.output_item.done", item_id)
    assert completed["type"] == "response.completed"
    assert completed["response"]["output"] == [item_done["item"]]
    assert without_ids(completed["response"]) == without_ids(whole)


async def test_the_official_client_accumulates_a_stream(case: Case) -> None:
    case.answer_with(f"Well.\n{CALL}\n{CALL}")
    ask: Any = {"model": "m", "input": "hi", "tools": [TOOL]}
    async with case.openai.responses.stream(**ask) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "Well."
    calls = [item for item in final.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [("get_weather", ARGUMENTS)] * 2
    assert len({call.call_id for call in calls}) == 2
    pieces = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in pieces) == ARGUMENTS * 2
    assert final.status == "completed"


@pytest.mark.parametrize("tokens_per_event", [1, 3, 1000])
@pytest.mark.parametrize(
    "text", [CALL, f"{CALL}\n{CALL}", f"a {CALL} b {CALL} c", "<tool_call>\n{"]
)
async def test_a_stream_has_the_items_of_the_whole_response(
    case: Case, tokens_per_event: int, text: str
) -> None:
    case.cluster.workers[0].tokens_per_event = tokens_per_event
    case.answer_with(text)
    whole = (await send(case, max_output_tokens=500, tools=[TOOL])).json()
    events = events_of(await send(case, max_output_tokens=500, tools=[TOOL], stream=True))
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    opened = [e["output_index"] for e in events if e["type"] == "response.output_item.added"]
    ended = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert opened == list(range(len(ended)))
    assert ended == events[-1]["response"]["output"]


@pytest.mark.parametrize("ended_by", ["length", "stop", "stop string", "invalid"])
async def test_a_truncated_call_is_incomplete_and_calls_before_it_are_complete(
    case: Case, ended_by: str
) -> None:
    text = f'{CALL}\n<tool_call>\n{{"name": "get_weather", "arguments": {{"city": '
    case.answer_with(text + ("New" if ended_by in ("invalid", "stop string") else ""))
    body: dict[str, Any] = {"max_output_tokens": 500, "tools": [TOOL]}
    if ended_by == "length":
        body["max_output_tokens"] = len(text) - 5
    if ended_by == "stop string":
        body["stop"] = ["New"]
    whole = (await send(case, **body)).json()
    first, second, *rest = whole["output"]
    assert (first["status"], first["arguments"]) == ("completed", ARGUMENTS)
    assert second["status"] == "incomplete"
    assert not ARGUMENTS.startswith(second["arguments"] + "}")
    assert (whole["status"], whole["completed_at"]) == ("incomplete", None)
    reason = {"reason": "max_output_tokens"} if ended_by == "length" else None
    assert whole["incomplete_details"] == reason
    assert [item["type"] for item in rest] == ["message"] * (ended_by == "invalid")
    events = events_of(await send(case, **body, stream=True))
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    ended = [e["item"]["status"] for e in events if e["type"] == "response.output_item.done"]
    assert ended == [item["status"] for item in whole["output"]]


async def test_a_function_and_its_output(case: Case) -> None:
    case.answer_with(CALL)
    conversation: list[Any] = [{"role": "user", "content": "weather?"}]
    choice: Any = {"type": "function", "name": "get_weather"}
    first = await case.openai.responses.create(
        model="m", input=conversation, tools=[TOOL], tool_choice=choice
    )
    (call,) = first.output
    assert call.type == "function_call"
    assert first.tools[0].name == "get_weather"  # type: ignore[union-attr]
    assert case.cluster.workers[0].starts[-1].sampling.HasField("grammar")
    case.answer_with("It rains.")
    conversation += first.output
    conversation.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    second = await case.openai.responses.create(
        model="m", input=conversation, tools=[TOOL], instructions="Be brief."
    )
    assert second.output_text == "It rains."
    prompt = case.prompt
    await case.chat(
        tools=[{"type": "function", "function": {n: v for n, v in TOOL.items() if n != "type"}}],
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": call.call_id,
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": ARGUMENTS},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
        ],
    )
    assert prompt == case.prompt


async def test_output_formats(case: Case) -> None:
    class City(pydantic.BaseModel):
        name: str

    case.answer_with('{"name": "Paris"}')
    answer = await case.openai.responses.parse(model="m", input="hi", text_format=City)
    assert answer.output_parsed == City(name="Paris")
    grammar = case.cluster.workers[0].starts[-1].sampling.grammar
    await case.chat(
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "City",
                "strict": True,
                "schema": answer.text.format.schema_,  # type: ignore[union-attr]
            },
        }
    )
    assert grammar == case.cluster.workers[0].starts[-1].sampling.grammar


async def test_sampling_equals_that_of_a_chat(case: Case) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "ignore_eos": True}
    assert (await send(case, **fields, user="u", prompt_cache_key="k")).status_code == 200
    start = case.cluster.workers[0].starts[-1]
    await case.chat(max_tokens=8, **fields)
    other = case.cluster.workers[0].starts[-1]
    assert (start.sampling, start.limits) == (other.sampling, other.limits)


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities(case: Case, stream: bool) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    case.answer_with("Paris.")
    answer = await send(case, **asked, stream=stream)
    response = events_of(answer)[-1]["response"] if stream else answer.json()
    logprobs = response["output"][0]["content"][0]["logprobs"]
    chat = (await case.chat(max_tokens=8, logprobs=True, top_logprobs=1)).json()
    assert logprobs == chat["choices"][0]["logprobs"]["content"][: len("Paris.")]


async def test_a_prompt_may_be_truncated(case: Case) -> None:
    assert (await send(case, input="x" * 3000)).status_code == 400
    assert (await send(case, input="x" * 3000, truncation="auto")).status_code == 200
    assert len(case.cluster.workers[0].starts[-1].prompt_ids) == 2048 - 8


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"model": "other"}, "model"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [3]}, "input.0"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.0.message.role"),
    ({"input": [{"role": "user", "content": 3}]}, "input.0.message.content"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input"),
    ({"input": [{"type": ["x"]}]}, "input.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input"),
    ({"input": "\ud800"}, "input"),
    ({"input": "x" * 2040}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "8"}, "max_output_tokens"),
    ({"temperature": 9}, "temperature"),
    ({"top_k": VOCAB_SIZE + 1}, "top_k"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"text": {"format": {"type": "odd"}}}, "text.format"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"metadata": {"k": 1}}, "metadata.k"),
]


async def test_errors(case: Case) -> None:
    for stream, (fields, param) in itertools.product((False, True), ERRORS):
        content = json.dumps(ASK | {"stream": stream} | fields).encode()
        answer = await case.http.post(
            "/v1/responses", content=content, headers={"content-type": "application/json"}
        )
        assert answer.status_code == (404 if param == "model" else 400), fields
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["param"] == param
        assert "'messages" not in error["message"]
        assert case.cluster.workers[0].starts == []


async def test_routes_of_stored_responses_are_missing(case: Case) -> None:
    created = await case.openai.responses.create(model="m", input="hi", max_output_tokens=1)
    with pytest.raises(openai.NotFoundError, match="stored"):
        await case.openai.responses.retrieve(created.id)
    with pytest.raises(openai.BadRequestError, match="stored"):
        await case.openai.responses.create(model="m", input="hi", previous_response_id=created.id)


async def test_unknown_fields_are_listed(case: Case) -> None:
    answer = await send(case, odd=1, n=2, messages=[])
    assert answer.status_code == 200
    assert answer.headers["warning"] == '299 tideserve "ignored unknown fields: odd, n, messages"'


async def test_a_full_cluster(case: Case) -> None:
    case.refuse(message="because", retry_after_s=2.5)
    answer = await send(case, stream=True)
    assert answer.status_code == 503 and 3 <= int(answer.headers["retry-after"]) <= 5
    assert answer.json()["error"]["message"] == "because"


async def test_a_lost_worker_fails_the_stream(case: Case) -> None:
    worker = case.paused(3)
    asked = ASK | {"stream": True, "max_output_tokens": 50}
    async with case.http.stream("POST", "/v1/responses", json=asked) as answer:
        lines = answer.aiter_lines()
        seen = ""
        while len(seen) < 3:
            line = await anext(lines)
            if line.startswith("data: "):
                seen += json.loads(line.removeprefix("data: ")).get("delta", "")
        worker.die()
        rest = [line async for line in lines if line]
    assert rest[-4::2] == ["event: error", "event: response.failed"]
    error, failed = (json.loads(line.removeprefix("data: ")) for line in rest[-3::2])
    assert (error["code"], error["message"]) == (
        "worker_lost",
        failed["response"]["error"]["message"],
    )
    assert failed["sequence_number"] == error["sequence_number"] + 1
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert failed["response"]["output"][0]["content"][0]["text"] == seen


async def test_a_client_that_hangs_up_ends_the_generation(case: Case) -> None:
    worker = case.paused(3)
    asked = ASK | {"stream": True, "max_output_tokens": 50}
    async with case.http.stream("POST", "/v1/responses", json=asked) as answer:
        await anext(answer.aiter_lines())
    await eventually(lambda: worker.aborted == [worker.starts[-1].request_id])


async def test_metrics_and_description(case: Case) -> None:
    assert (await send(case)).status_code == 200
    metrics = (await case.http.get("/metrics")).text.splitlines()
    line = 'tideserve_gateway_requests_total{endpoint="/v1/responses",status="200"} 1.0'
    assert line in metrics
    paths = (await case.http.get("/openapi.json")).json()["paths"]
    body = paths["/v1/responses"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"input", "max_output_tokens", "temperature", "stream"} <= body["properties"].keys()
    assert not {"messages", "n", "max_tokens"} & body["properties"].keys()
    assert "$ref" not in json.dumps(body)


async def test_embeddings_are_refused(case: Case) -> None:
    with pytest.raises(openai.BadRequestError, match="does not support embeddings") as caught:
        await case.openai.embeddings.create(model="m", input="hi")
    assert caught.value.code == "unsupported"
