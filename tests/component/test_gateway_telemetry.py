"""Ids, log lines and traces of a real gateway in front of fake services."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.common.etcd import Store
from services.common.tracing import TraceContext
from tests.support.gateway import Case, gateway_case
from tests.support.log_lines import LogLines, log_lines
from tests.support.otlp_receiver import OtlpReceiver, attributes_of
from tests.support.waiting import eventually
from tideserve.worker.v1 import worker_pb2

KEY, SECRET_PROMPT = "key-that-must-stay-secret", "a prompt that must stay secret"
CALLER = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", sampled=True)
CHANGE = TraceContext("c" * 32, "d" * 16, sampled=True)


@pytest.fixture
def lines() -> Iterator[LogLines]:
    # Log lines of the test's own clients are ignored.
    with log_lines("httpx", "httpcore", "openai") as lines:
        yield lines


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture
async def case(store: Store, tmp_path: Path, receiver: OtlpReceiver) -> AsyncIterator[Case]:
    async with gateway_case(
        store,
        tmp_path / "model",
        workers=2,
        api_key=KEY,
        otlp_endpoint=receiver.endpoint,
        trace_sample_ratio=0.0,
    ) as case:
        yield case


async def test_responses_have_an_id_which_is_the_clients_if_safe(case: Case) -> None:
    wrong_key = {"authorization": "Bearer wrong"}
    asked = [
        ("GET", "/live", {}, 200),
        ("GET", "/ready", {}, 200),
        ("GET", "/metrics", {}, 200),
        ("GET", "/nowhere", {}, 404),
        ("DELETE", "/v1/models", {}, 405),
        ("GET", "/v1/models", wrong_key, 401),
        ("POST", "/v1/chat/completions", {"content-type": "application/json"}, 400),
        ("GET", "/v1/models", {"x-filler": "x" * 17_000}, 431),
    ]
    for method, path, headers, status in asked:
        own = await case.http.request(method, path, headers={"x-request-id": "mine/1", **headers})
        assert (own.status_code, own.headers["x-request-id"]) == (status, "mine/1"), path
        made = await case.http.request(method, path, headers={"x-request-id": "a b", **headers})
        assert len(made.headers.get_list("x-request-id")) == 1
        assert made.headers["x-request-id"].partition("-")[0] in ("req", "chatcmpl"), path


async def test_a_generated_id_is_that_of_the_response(case: Case) -> None:
    for stream in (False, True):
        answer = await case.chat(max_tokens=2, stream=stream)
        assert answer.headers["x-request-id"] in answer.text
    body = {"model": "m", "prompt": "hi", "max_tokens": 1}
    answers = [
        await case.http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        for _ in range(2)
    ]
    assert len({answer.json()["id"] for answer in answers}) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_the_log_line_of_a_request(case: Case, lines: LogLines, stream: bool) -> None:
    messages = [{"role": "user", "content": SECRET_PROMPT}]
    headers = {"x-request-id": "mine", "traceparent": CALLER.traceparent}
    body = {"model": "m", "messages": messages, "max_tokens": 3, "stream": stream}
    answer = await case.http.post("/v1/chat/completions", json=body, headers=headers)
    await eventually(lambda: bool(lines.requests("/v1/chat/completions")))
    (line,) = lines.requests("/v1/chat/completions")
    assert line["request_id"] == "mine" and line["response_id"] in answer.text
    assert line["trace_id"] == CALLER.trace_id
    fields = {
        name: line[name] for name in ("status", "model", "output_tokens", "finish_reason", "moved")
    }
    assert fields == {
        "status": 200,
        "model": "m",
        "output_tokens": 3,
        "finish_reason": "length",
        "moved": 0,
    }
    assert line["worker"] in ("w0", "w1") and line["prompt_tokens"] > len(SECRET_PROMPT)
    assert 0 <= line["queue_s"] <= line["ttft_s"] <= line["total_s"]


async def test_the_log_lines_of_a_refusal_and_a_disconnect(case: Case, lines: LogLines) -> None:
    case.refuse(retry_after_s=2.5, message="full")
    assert (await case.chat()).status_code == 503
    (line,) = lines.requests("/v1/chat/completions")
    assert (line["status"], line["code"], line["retry_after_s"]) == (503, "queue_full", 2.5)
    case.cluster.scheduler.refusal = None
    case.cluster.workers[0].pause_at = case.cluster.workers[1].pause_at = 2
    async with case.stream() as answer:
        assert answer.status_code == 200
        sent, text = answer.aiter_lines(), ""
        while len(text) < 2:  # A token is a byte.
            line = await anext(sent)
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"] if line else ""
    await eventually(lambda: bool(lines.requests("/v1/completions")))
    (line,) = lines.requests("/v1/completions")
    assert (line["status"], line["code"], line["output_tokens"]) == (499, "client_gone", 2)


async def test_the_trace_of_a_request_that_moved(case: Case, receiver: OtlpReceiver) -> None:
    first, second = case.cluster.workers
    first.moves_to, first.move_at, first.moved_by = second, 2, CHANGE.traceparent
    second.epoch = 2
    second.times = worker_pb2.RequestTimes(wait_s=0.5, decode_s=0.25, preempted_s=[0.1])
    case.cluster.scheduler.workers = [first]
    body = {"model": "m", "prompt": "hi", "max_tokens": 4, "temperature": 0.5}
    headers = {"traceparent": CALLER.traceparent}
    answer = await case.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    await eventually(lambda: "text_completion m" in receiver.trace(CALLER.trace_id))
    spans = receiver.trace(CALLER.trace_id)
    (root,) = spans["text_completion m"]
    assert set(spans) == {
        *("text_completion m", "parse", "tokenise", "queue", "wait", "prefill", "decode")
    }
    assert root.parent_span_id.hex() == CALLER.span_id
    children = [span for name in spans for span in spans[name] if span is not root]
    assert {span.parent_span_id for span in children} == {root.span_id}
    assert attributes_of(root)["gen_ai.usage.output_tokens"] == 4
    assert attributes_of(root)["gen_ai.request.temperature"] == 0.5
    assert attributes_of(root)["gen_ai.latency.time_in_model_decode"] == 0.25
    events = {event.name: attributes_of(event) for event in root.events}
    assert events == {
        "moved": {
            "tideserve.from_worker": "w0",
            "tideserve.to_worker": "w1",
            "tideserve.group": "group-w1",
            "tideserve.epoch": 2,
        },
        "preempted": {"tideserve.worker": "w1"},
    }
    (link,) = root.links
    assert (link.trace_id.hex(), link.span_id.hex()) == (CHANGE.trace_id, CHANGE.span_id)
    assert SECRET_PROMPT not in str(receiver.all_spans) and "The tide" not in str(
        receiver.all_spans
    )


async def test_unsampled_traces_are_exported_on_failure_only(
    case: Case, receiver: OtlpReceiver
) -> None:
    assert (await case.chat(max_tokens=2)).status_code == 200
    unsampled = {"traceparent": TraceContext("a" * 32, "b" * 16, sampled=False).traceparent}
    for worker in case.cluster.workers:
        worker.finish = worker_pb2.FINISH_REASON_ERROR
    body = {"model": "m", "prompt": "hi", "max_tokens": 1}
    assert (await case.http.post("/v1/completions", json=body, headers=unsampled)).is_error
    assert (await case.chat(max_tokens=1)).status_code == 503
    case.stop.set()
    await eventually(lambda: bool(receiver.all_spans))
    roots = [span.name for span in receiver.all_spans if span.name.endswith(" m")]
    assert sorted(roots) == ["chat m", "text_completion m"], "only the failed one is exported"
    (failed,) = [span for span in receiver.all_spans if span.name == "chat m"]
    assert attributes_of(failed)["error.type"] == "worker_lost"
    assert failed.status.message == "worker_lost", "the worker may quote its client"
