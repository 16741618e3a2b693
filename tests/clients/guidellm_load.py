"""guidellm, the load generator: runs of a few requests each."""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import support as s

REQUESTS = 3
RUN_TIMEOUT_S = 300
# By default it starts ten processes per step, each of which loads torch.
ENVIRONMENT = {**os.environ, "GUIDELLM__MAX_WORKER_PROCESSES": "2"}
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GREEDY: Any = {"temperature": 0}
ONE_BY_ONE: Any = {"kind": "synchronous"}
SYNTHETIC: Any = {"kind": "synthetic_text", "prompt_tokens": 24, "output_tokens": 8}
RESULT = Path("result.json")


def steps(
    route: str,
    data: dict[str, Any] | Sequence[dict[str, Any]] = SYNTHETIC,
    body: dict[str, Any] = GREEDY,
    profile: dict[str, Any] = ONE_BY_ONE,
    count: int = REQUESTS,
    seconds: int = 0,
    **backend: Any,
) -> list[Any]:
    """The requests of each step of a run by outcome: successful, errored, incomplete.

    `data`: rows or guidellm's synthetic data; `body` is added to each request. A run ends after
    `count` requests or after `seconds`.
    """
    if not isinstance(data, dict):
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
        data = {"kind": "json_file", "path": "rows.jsonl"}
    target = {"kind": "openai_http", "target": s.URL, "model": s.MODEL, "api_key": s.API_KEY}
    asked = {"request_format": route, "max_tokens": s.TOKENS, "extras": {"body": body}}
    ends = {"kind": "max_duration", "seconds": seconds} if seconds else None
    spec = {
        "backend": {**target, **asked, **backend},
        "profile": profile,
        "constraints": [ends or {"kind": "max_requests", "count": count}],
        "tokenizer": {"kind": "huggingface_auto", "model": s.MODEL_DIR},
        "data": [data],
        "outputs": [{"kind": "json", "path": str(RESULT)}],
    }
    Path("scenario.json").write_text(json.dumps({"spec": spec}))
    RESULT.unlink(missing_ok=True)
    command = ["guidellm", "run", "-c", "scenario.json", "--disable-console"]
    with subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True) as process:
        try:
            process.wait(RUN_TIMEOUT_S)
        finally:  # its exit ends all of its processes
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return [load["requests"] for load in json.loads(RESULT.read_text())["benchmarks"]]


def good(requests: Any, wanted: int = REQUESTS) -> Any:
    """The successful requests: `wanted`, and none failed."""
    assert not [request["info"].get("error") for request in requests["errored"] or ()]
    assert len(requests["successful"]) == wanted
    return requests["successful"]


@pytest.mark.parametrize("more", [{}, {"stream": False}], ids=["stream", "unary"])
@pytest.mark.parametrize("route", [CHAT, TEXT, RESPONSES])
def test_text(route: str, more: Any) -> None:
    asked, wanted = s.QUESTION, s.chat_text()
    if route == TEXT:
        asked, wanted = s.PROMPT, s.completion_text()
    (requests,) = steps(route, [{"prompt": asked}] * REQUESTS, **more)
    assert [request["output"] for request in good(requests)] == [wanted] * REQUESTS


def test_four_at_once() -> None:
    (requests,) = steps(CHAT, profile={"kind": "concurrent", "streams": 4}, count=12)
    for request in good(requests, 12):
        assert request["output_metrics"]["text_tokens"] == SYNTHETIC["output_tokens"]


def test_conversations_of_two_turns() -> None:
    (requests,) = steps(CHAT, {**SYNTHETIC, "turns": 2})
    good(requests)


def test_throughput_of_completions() -> None:
    (requests,) = steps(TEXT, profile={"kind": "throughput", "max_concurrency": 8}, count=12)
    good(requests, 12)


def test_sweep() -> None:
    results = steps(CHAT, profile={"kind": "sweep", "sweep_size": 4}, count=6)
    assert len(results) == 4
    for requests in results:
        good(requests, 6)


def test_requests_in_flight_at_the_end_are_cancelled() -> None:
    rows = [{"prompt": s.QUESTION}] * REQUESTS
    body = {"temperature": 0, "ignore_eos": True}
    with s.given_up():
        (requests,) = steps(CHAT, rows, body, seconds=3, max_tokens=s.LONG_TOKENS)
    assert requests["incomplete"]


def test_unknown_model() -> None:
    (requests,) = steps(CHAT, [{"prompt": s.QUESTION}] * REQUESTS, model=s.UNKNOWN_MODEL)
    errors = [request["info"]["error"] for request in requests["errored"]]
    assert len(errors) == REQUESTS and "404" in errors[0]


def test_schema() -> None:
    rows = [{"prompt": s.CITY_QUESTION}] * REQUESTS
    body = {"temperature": 0, "response_format": s.CITY_FORM}
    (requests,) = steps(CHAT, rows, body, max_tokens=s.ANSWER_TOKENS)
    for request in good(requests):
        s.check_city(request["output"])


# guidellm offers only tools of its data, to which `tool_choice` in the body applies.
# Without the first field a model this small calls endlessly, as guidellm sets no token limit.
@pytest.mark.parametrize("more", [{"parallel_tool_calls": False}, {"tool_choice": s.TOOL_CHOICE}])
def test_a_tool_of_the_data_and_its_result(more: Any) -> None:
    row = {
        "prompt": s.TOOL_QUESTION,
        "tools": json.dumps([s.TOOL]),
        "tool_response": s.TOOL_RESULT,
    }
    (requests,) = steps(CHAT, [row] * 2, {**GREEDY, **more}, count=4, max_tokens=s.ANSWER_TOKENS)
    called = [request for request in good(requests, 4) if request["tool_calls"]]
    assert len(called) == 2
    for request in called:
        (call,) = request["tool_calls"]
        s.check_tool(call["function"]["name"], call["function"]["arguments"])
