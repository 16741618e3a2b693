"""The gateway's API as clients see it, in front of fake services."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from services.gateway.admin.port import PAGE
from services.worker.start_frame import to_request
from tests.support.byte_tokenizer import CHAT_TEMPLATE, EOS_ID, VOCAB_SIZE
from tests.support.gateway import TEXT, Case, text_ids
from tests.support.waiting import eventually
from tideserve.memmgr.v1 import memmgr_pb2
from tideserve.scheduler.v1 import scheduler_pb2
from tideserve.worker.v1 import worker_pb2

HI: list[Any] = [{"role": "user", "content": "hi"}]
# HI rendered by the template, in tokens of a byte, two of them special.
HI_TOKENS = len("user\nhi" + "\n" + "assistant\n") + 3


async def test_a_streamed_chat_equals_the_whole_chat(case: Case) -> None:
    whole = await case.openai.chat.completions.create(model="m", messages=HI, max_tokens=90)
    choice = whole.choices[0]
    assert whole.id.startswith("chatcmpl-")
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert (TEXT * 3).startswith(choice.message.content.rstrip("\ufffd"))
    assert whole.usage is not None
    assert whole.usage.model_dump(include={"prompt_tokens", "completion_tokens"}) == {
        "prompt_tokens": HI_TOKENS,
        "completion_tokens": 90,
    }
    assert whole.usage.total_tokens == HI_TOKENS + 90
    for tokens_per_event in (1, 7):
        case.cluster.workers[0].tokens_per_event = tokens_per_event
        stream = await case.openai.chat.completions.create(
            model="m",
            messages=HI,
            max_tokens=90,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].choices == []
        assert chunks[-1].usage == whole.usage
        assert len({chunk.id for chunk in chunks}) == 1
        deltas = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
        assert "".join(deltas) == choice.message.content
        reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]


async def test_completions_of_text_ids_and_several_prompts(case: Case) -> None:
    prompts: list[Any] = ["hi", ["hi"], text_ids("hi"), [text_ids("hi")]]
    for prompt in prompts:
        answer = await case.openai.completions.create(model="m", prompt=prompt, max_tokens=8)
        assert answer.choices[0].text == TEXT[:8]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 8)
        assert list(case.cluster.workers[0].starts[-1].prompt_ids) == text_ids("hi")
    several = await case.openai.completions.create(model="m", prompt=["a", "bc"], max_tokens=8)
    assert [(c.index, c.text) for c in several.choices] == [(0, TEXT[:8]), (1, TEXT[:8])]
    assert several.usage is not None
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (3, 16)
    stream = await case.openai.completions.create(
        model="m", prompt=["a", "bc"], max_tokens=8, stream=True
    )
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [TEXT[:8]] * 2


async def test_sampling_parameters_reach_the_worker(case: Case) -> None:
    await case.complete(
        max_tokens=3,
        min_tokens=1,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        seed=-1,
        stop_token_ids=[9, 8],
    )
    start = case.cluster.workers[0].starts[-1]
    assert (start.group_id, start.epoch) == ("group-w0", 1)
    assert start.sampling == worker_pb2.Sampling(
        temperature=0.5, top_p=0.9, top_k=0, seed=2**64 - 1
    )
    assert start.limits == worker_pb2.Limits(
        max_tokens=3, min_tokens=1, stop_token_ids=[EOS_ID, 8, 9]
    )
    await case.complete(ignore_eos=True)
    start = case.cluster.workers[0].starts[-1]
    # The defaults of the OpenAI API, and a seed drawn by the gateway.
    assert start.limits == worker_pb2.Limits(max_tokens=16)
    assert (start.sampling.temperature, start.sampling.top_p) == (1.0, 1.0)
    await case.complete(max_tokens=1)
    assert case.cluster.workers[0].starts[-1].sampling.seed != start.sampling.seed
    # The rest of the context, if smaller, or if it is a chat.
    await case.complete(prompt="x" * 250)
    assert case.cluster.workers[0].starts[-1].limits.max_tokens == 6
    await case.chat()
    assert case.cluster.workers[0].starts[-1].limits.max_tokens == 256 - HI_TOKENS


async def test_an_end_is_forwarded_before_the_next_ask(case: Case) -> None:
    for _ in range(3):
        assert (await case.chat(max_tokens=3)).status_code == 200
    loads = case.cluster.scheduler.loads
    await eventually(lambda: len(loads) == 3)
    assert loads == [("w0", asked) for asked in (1, 2, 3)]


async def test_the_largest_number_of_stop_tokens_reaches_the_worker(case: Case) -> None:
    named = [number for number in range(VOCAB_SIZE) if number != EOS_ID][:256]
    assert (await case.complete(max_tokens=3, stop_token_ids=named)).status_code == 200
    start = case.cluster.workers[0].starts[-1]
    request = to_request(start, VOCAB_SIZE, max_model_len=256, now_s=0.0)
    assert request.limits.stop_token_ids == {*named, EOS_ID}
    named = [*range(257)]
    assert (await case.complete(stop_token_ids=named)).status_code == 400


async def test_stop_strings_and_stop_tokens(case: Case) -> None:
    worker = case.cluster.workers[0]
    for tokens_per_event in (1, 16):
        worker.tokens_per_event = tokens_per_event
        answer = await case.openai.chat.completions.create(
            model="m", messages=HI, stop=[" comes", "xyz"]
        )
        assert answer.choices[0].message.content == "The tide"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len("The tide comes")
        await eventually(lambda: worker.aborted == [worker.starts[-1].request_id])
        worker.aborted.clear()
    worker.script = lambda _: [*text_ids("end"), EOS_ID]
    answer = await case.openai.chat.completions.create(model="m", messages=HI, stop="nothing")
    assert answer.choices[0].message.content == "end"
    assert answer.choices[0].finish_reason == "stop"
    assert worker.aborted == []


async def test_models(case: Case) -> None:
    models = [model async for model in case.openai.models.list()]
    assert [model.id for model in models] == ["m"]
    assert models[0].model_dump()["max_model_len"] == 256
    assert (await case.openai.models.retrieve("m")).id == "m"
    for name in ("other", "a/b", "../x", "..%2fx"):
        answer = await case.http.get(f"/v1/models/{name}")
        assert answer.status_code == 404
        assert answer.json()["error"]["message"]
    with pytest.raises(openai.NotFoundError) as caught:
        await case.openai.chat.completions.create(model="../x", messages=HI)
    assert caught.value.code == "model_not_found"


async def test_too_long_for_the_context(case: Case) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await case.openai.completions.create(model="m", prompt="x" * 250, max_tokens=7)
    assert caught.value.code == "context_length_exceeded"
    for number in ("256", "257", "250", "7"):
        assert number in caught.value.message
    body = {"model": "m", "input": "x" * 200, "max_output_tokens": 50}
    error = (await case.http.post("/v1/responses", json=body)).json()["error"]
    assert error["param"] == "input"
    assert "in the input, 50 in the completion" in error["message"]
    answer = await case.complete(prompt="x" * 1_000_000)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert (await case.complete(prompt="x" * 255)).status_code == 200
    assert (await case.complete(prompt="x" * 256)).status_code == 400


async def test_ids_above_the_vocabulary(case: Case) -> None:
    for fields in (
        {"prompt": [VOCAB_SIZE]},
        {"stop_token_ids": [VOCAB_SIZE]},
        {"top_k": VOCAB_SIZE + 1},
    ):
        answer = await case.complete(**fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == next(iter(fields))
    assert (await case.complete(prompt=[VOCAB_SIZE - 1], max_tokens=1)).status_code == 200


REFUSING = "{% if messages[0]['content'] == 'no' %}{{ raise_exception('not no') }}{% endif %}"


@pytest.mark.gateway(template=REFUSING + CHAT_TEMPLATE)
async def test_messages_refused_by_the_template(case: Case) -> None:
    answer = await case.chat(messages=[{"role": "user", "content": "no"}])
    assert answer.status_code == 400
    assert "not no" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "content", "headers", "status"),
    [
        ("GET", "/nowhere", b"", {}, 404),
        ("GET", "/v1/chat/completions", b"", {}, 405),
        ("DELETE", "/v1/models", b"", {}, 405),
        ("POST", "/v1/completions", b"{}", {"content-type": "text/plain"}, 415),
        ("POST", "/v1/completions", b"{}", {}, 415),
        (
            "POST",
            "/v1/completions",
            b"{}",
            {"content-type": "application/json", "content-encoding": "gzip"},
            415,
        ),
        ("POST", "/v1/completions", b"{", {"content-type": "application/json"}, 400),
        ("POST", "/v1/completions", b"{}", {"content-type": "application/json"}, 400),
        (
            "POST",
            "/v1/completions",
            b'{"prompt": "' + b"x" * 2**22 + b'"}',
            {"content-type": "application/json"},
            413,
        ),
        ("GET", "/v1/models", b"", {"x-long": "x" * 17_000}, 431),
        ("GET", "/v1/models/" + "x" * 9000, b"", {}, 414),
    ],
)
async def test_http_errors_have_openai_bodies(
    case: Case, method: str, path: str, content: bytes, headers: dict[str, str], status: int
) -> None:
    answer = await case.http.request(method, path, content=content, headers=headers)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert (await case.complete(max_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            b"{",
            "the body is not valid JSON: Expecting property name enclosed in double quotes at "
            "line 1 column 2; correct it there",
        ),
        (
            b'{"model": "m",\n"prompt" "hi"}',
            "the body is not valid JSON: Expecting ':' delimiter at line 2 column 10; "
            "correct it there",
        ),
        (b"", "the body is not valid JSON: Expecting value at line 1 column 1; correct it there"),
        (b"[]", "the body must be a JSON object; put the parameters into { }"),
        (b'{"model": "\xff"}', "the body is not valid UTF-8; encode it as UTF-8"),
    ],
)
async def test_malformed_json_is_answered_with_cause_and_remedy(
    case: Case, content: bytes, sentence: str
) -> None:
    headers = {"content-type": "application/json"}
    answer = await case.http.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": sentence,
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


async def test_a_chunked_body_is_bounded(case: Case) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(70):
            yield b" " * 2**16

    headers = {"content-type": "application/json"}
    answer = await case.http.post("/v1/completions", content=chunks(), headers=headers)
    assert answer.status_code == 413


REFUSALS: list[tuple[Any, float, int, set[str | None]]] = [
    (scheduler_pb2.REFUSAL_REASON_TOO_LARGE, 0, 400, {None}),
    (scheduler_pb2.REFUSAL_REASON_INVALID, 0, 400, {None}),
    (scheduler_pb2.REFUSAL_REASON_QUEUE_FULL, 2.5, 503, {"3", "4", "5"}),
    (scheduler_pb2.REFUSAL_REASON_EXPIRED, 0, 504, {"1", "2", "3"}),
    (scheduler_pb2.REFUSAL_REASON_UNKNOWN_MODEL, 0, 503, {"1", "2", "3"}),
    (scheduler_pb2.REFUSAL_REASON_UNKNOWN_MODEL, 1, 503, {"1", "2", "3"}),
]


@pytest.mark.parametrize(("reason", "retry_after_s", "status", "delays"), REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals(
    case: Case,
    reason: Any,
    retry_after_s: float,
    status: int,
    delays: set[str | None],
    stream: bool,
) -> None:
    case.cluster.scheduler.refusal = scheduler_pb2.Refusal(
        reason=reason, message="because", retry_after_s=retry_after_s
    )
    answer = await case.chat(stream=stream)
    assert answer.status_code == status
    assert answer.headers.get("retry-after") in delays
    assert answer.json()["error"]["message"] == "because"


async def test_status_metrics_and_probes(case: Case) -> None:
    await case.complete(max_tokens=4)
    assert (await case.http.get("/tideserve/v1/status")).status_code == 404

    async def registered() -> bool:
        rows = (await case.admin.get("/tideserve/v1/status")).json()["services"]
        return "gateway" in {row["name"] for row in rows}

    await eventually(registered)
    status = (await case.admin.get("/tideserve/v1/status")).json()
    assert set(status) == {
        "services",
        "etcd",
        "workers",
        "groups",
        "decisions",
        "losses",
        "shortfalls",
        "split_obstacles",
        "late_refusals",
        "scheduling",
    }
    assert status["scheduling"] == "slo"
    services = {row["name"]: row for row in status["services"]}
    assert set(services) == {"gateway", "scheduler", "memmgr", "w0"}
    assert all(set(row) == {"name", "pid", "rss_bytes", "ready"} for row in status["services"])
    assert services["gateway"]["ready"]
    assert services["gateway"]["rss_bytes"] > 0
    (worker,) = status["workers"]
    assert {name: value for name, value in worker.items() if value} == {
        "id": "w0",
        "pids": [1, 2],
        "parameter_bytes": 1000,
        "kv_blocks_total": 100,
        "kv_blocks_free": 50,
        "pipeline_busy_s": 7.5,
        "pipeline_bubble_s": 2.5,
        "engine": "tideserve",
        "can_merge": True,
        "host": "127.0.0.1",
        "block_size": 16,
        "model": "m",
        "role": "mixed",
    }
    reported = {field.name for field in memmgr_pb2.WorkerMemory.DESCRIPTOR.fields} - {"worker_id"}
    assert reported <= worker.keys() and worker["paced"] is None
    assert status["groups"] == [
        {
            "id": "group-w0",
            "epoch": 1,
            "model": "m",
            "members": ["w0"],
            "layers": [],
            "changing": False,
            "degraded": False,
        }
    ]
    assert status["decisions"] == []
    metrics = (await case.http.get("/metrics")).text
    for line in (
        'tideserve_gateway_requests_total{endpoint="/v1/completions",status="200"} 1.0',
        'vllm:time_to_first_token_seconds_count{class="standard",model_name="m"} 1.0',
        'vllm:e2e_request_latency_seconds_count{model_name="m"} 1.0',
        'vllm:request_queue_time_seconds_count{model_name="m"} 1.0',
        'vllm:request_generation_tokens_sum{model_name="m"} 4.0',
        'vllm:request_params_max_tokens_sum{model_name="m"} 4.0',
        'vllm:request_success_total{finished_reason="length",model_name="m"} 1.0',
        'vllm:request_success_total{finished_reason="error",model_name="m"} 0.0',
        'vllm:admission_rejections_total{class="batch",model_name="m",reason="queue_full"} 0.0',
        "tideserve_gateway_ready 1.0",
        'tideserve_gateway_model_ready{model_name="m"} 1.0',
        'tideserve_gateway_output_tokens_total{model_name="m"} 4.0',
        "tideserve_gateway_requests_inflight 0.0",
    ):
        assert line in metrics.splitlines()
    # Each process exports its own metrics only, so that sums are right.
    assert "num_requests_running" not in metrics
    assert "tideserve_worker_" not in metrics
    for path in ("/live", "/ready", "/health", "/ping"):
        assert (await case.http.get(path)).status_code == 200
    assert (await case.http.post("/ping")).content == b""
    assert (await case.http.get("/load")).json() == {"server_load": 0}
    description = (await case.http.get("/openapi.json")).json()
    assert "/v1/chat/completions" in description["paths"]


@pytest.mark.gateway(cluster_metrics=True)
async def test_a_single_port_may_export_the_load_of_the_cluster(case: Case) -> None:
    await eventually(case.ready)
    lines = (await case.http.get("/metrics")).text.splitlines()

    assert 'vllm:num_requests_running{engine="cluster",model_name="m"} 0.0' in lines
    assert 'vllm:kv_cache_usage_perc{engine="cluster",model_name="m"} 0.5' in lines
    assert "tideserve_gateway_ready 1.0" in lines


async def test_head_on_every_route_that_has_get(case: Case) -> None:
    await eventually(case.ready)
    for client, extra in (
        (case.http, ["/openapi.json", "/v1/models/unknown"]),
        (case.admin, ["/openapi.json", *PAGE]),
    ):
        paths = (await client.get("/openapi.json")).json()["paths"]
        served = [path for path, methods in paths.items() if "get" in methods]
        assert served
        for path in [*served, *extra]:
            async with client.stream("GET", path) as got:
                head = await client.head(path, timeout=20)
            assert (head.status_code, head.content) == (got.status_code, b""), path
            assert head.headers.get("content-type") == got.headers.get("content-type"), path
        assert (await client.head("/nowhere")).status_code == 404
        assert all("head" not in methods for methods in paths.values())


@pytest.mark.gateway(api_key="secret")
async def test_all_routes_except_probes_need_the_key(case: Case) -> None:
    assert (await case.complete(max_tokens=1)).status_code == 200
    paths = ("/v1/models", "/load", "/metrics", "/openapi.json", "/nowhere")
    for given in ("", "Bearer", "Bearer wrong", "secret", "Basic secret"):
        for path in paths:
            answer = await case.http.get(path, headers={"authorization": given})
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/live", "/ready", "/health", "/ping"):
            answer = await case.http.get(path, headers={"authorization": given})
            assert answer.status_code == 200
