"""guidellm, the load generator: runs of a few requests each; a run is a call."""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tours import task
from tours.tour import Tour, check, check_tool, equal, validate

tour = Tour()
REQUESTS = 3
RUN_TIMEOUT_S = 300
# It would start ten processes for each step of a run, and each of them loads torch.
ENVIRONMENT = {**os.environ, "GUIDELLM__MAX_WORKER_PROCESSES": "2"}
TOKENIZER = os.environ["TOUR_MODEL_DIR"]
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GREEDY = {"temperature": 0}
ONE_BY_ONE: Any = {"kind": "synchronous"}
SYNTHETIC: Any = {
    "kind": "synthetic_text",
    "prompt_tokens": 24,
    "output_tokens": 8,
}
FEW: Any = {"kind": "max_requests", "count": REQUESTS}
RESULT = Path("result.json")


def run(*asked: Any, **more: Any) -> Any:
    """Requests of the only step of a run, by how they ended: successful, errored, incomplete."""
    (step,) = steps(*asked, **more)
    return step


def steps(
    route: str,
    data: dict[str, Any] | Sequence[dict[str, Any]] = SYNTHETIC,
    body: dict[str, Any] = GREEDY,
    profile: dict[str, Any] = ONE_BY_ONE,
    constraint: dict[str, Any] = FEW,
    **backend: Any,
) -> list[Any]:
    """A run, of which some profiles make several steps: the requests of each.

    `data` are rows or what it makes itself; `body` is added to each request.
    """
    if not isinstance(data, dict):
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
        data = {"kind": "json_file", "path": "rows.jsonl"}
    spec = {
        "backend": {
            "kind": "openai_http",
            "target": tour.url,
            "model": tour.model,
            "request_format": route,
            "api_key": tour.api_key,
            "max_tokens": task.TOKENS,
            "extras": {"body": body},
            **backend,
        },
        "profile": profile,
        "constraints": [constraint],
        "tokenizer": {"kind": "huggingface_auto", "model": TOKENIZER},
        "data": [data],
        "outputs": [{"kind": "json", "path": str(RESULT)}],
    }
    Path("scenario.json").write_text(json.dumps({"spec": spec}))
    RESULT.unlink(missing_ok=True)
    command = ["guidellm", "run", "-c", "scenario.json", "--disable-console"]
    told = ended(command)
    check(RESULT.is_file(), f"no result: {told[-500:]}")
    return [one["requests"] for one in json.loads(RESULT.read_text())["benchmarks"]]


def ended(command: Sequence[str]) -> str:
    """What the command prints; with its end all of its processes end.

    Raises:
        subprocess.TimeoutExpired: after RUN_TIMEOUT_S.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=RUN_TIMEOUT_S)[0]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def good(requests: Any, wanted: int = REQUESTS) -> Any:
    """The successful requests; Failure unless there are `wanted` and no others."""
    errors = [one["info"].get("error") for one in requests["errored"] or ()]
    counts = {state: len(found or ()) for state, found in requests.items()}
    check(counts["successful"] == wanted and not errors, f"{counts}: {errors[:1]}")
    return requests["successful"]


def compared(route: str, **more: Any) -> str:
    """A run whose text must be that of plain HTTP."""
    asked, wanted = task.QUESTION, tour.plain.chat_text
    if route == TEXT:
        asked, wanted = task.PROMPT, tour.plain.completion_text
    for one in good(run(route, [{"prompt": asked}] * REQUESTS, **more)):
        equal(one["output"], wanted)
    return f"{REQUESTS} requests"


for endpoint, path in (("chat", CHAT), ("completions", TEXT), ("responses", RESPONSES)):
    tour.call("stream", endpoint)(partial(compared, path))
    tour.call("unary", endpoint)(partial(compared, path, stream=False))


@tour.call("load", "synthetic text, four at once")
def _concurrent() -> str:
    many = {"kind": "max_requests", "count": 12}
    requests = run(CHAT, profile={"kind": "concurrent", "streams": 4}, constraint=many)
    for one in good(requests, 12):
        equal(one["output_metrics"]["text_tokens"], SYNTHETIC["output_tokens"], "tokens")
    return "12 requests"


@tour.call("load", "synthetic text, conversations of two turns")
def _turns() -> str:
    good(run(CHAT, {**SYNTHETIC, "turns": 2}))
    return f"{REQUESTS} requests"


@tour.call("load", "synthetic text, as fast as it goes, completions")
def _throughput() -> str:
    many = {"kind": "max_requests", "count": 12}
    good(run(TEXT, profile={"kind": "throughput", "max_concurrency": 8}, constraint=many), 12)
    return "12 requests"


@tour.call("load", "a sweep: one by one, as fast as it goes, and two rates between")
def _sweep() -> str:
    few = {"kind": "max_requests", "count": 6}
    found = steps(CHAT, profile={"kind": "sweep", "sweep_size": 4}, constraint=few)
    equal(len(found), 4, "steps")
    for requests in found:
        good(requests, 6)
    return "24 requests"


@tour.call("cancel", "requests in flight when the time is over")
def _cancel() -> str:
    short = {"kind": "max_duration", "seconds": 3}
    rows = [{"prompt": task.QUESTION}] * REQUESTS
    with tour.given_up():
        requests = run(
            CHAT,
            rows,
            {"temperature": 0, "ignore_eos": True},
            constraint=short,
            max_tokens=task.LONG_TOKENS,
        )
    check(requests["incomplete"], "none was in flight")
    return f"{len(requests['incomplete'])} requests"


@tour.call("error", "unknown model")
def _unknown_model() -> None:
    requests = run(CHAT, [{"prompt": task.QUESTION}] * REQUESTS, model=task.UNKNOWN_MODEL)
    errors = [one["info"]["error"] for one in requests["errored"]]
    equal(len(errors), REQUESTS, "errors")
    check("404" in errors[0], errors[0])


@tour.call("schema", "chat with response_format json_schema")
def _schema() -> str:
    rows = [{"prompt": task.CITY_QUESTION}] * REQUESTS
    body = {"temperature": 0, "response_format": task.CITY_FORM}
    for one in good(run(CHAT, rows, body, max_tokens=task.ANSWER_TOKENS)):
        validate(json.loads(one["output"]), task.CITY_SCHEMA)
    return f"{REQUESTS} requests"


def call_tools(**more: Any) -> str:
    """Two conversations of two requests: one calls the tool, and one gets its result.

    guidellm lets models call only tools of its data; `tool_choice` in the body holds for those.
    """
    row = {
        "prompt": task.TOOL_MESSAGES[0]["content"],
        "tools": json.dumps([task.TOOL]),
        "tool_response": task.TOOL_RESULT,
    }
    both: Any = {"kind": "max_requests", "count": 4}
    asked: Any = {"constraint": both, "max_tokens": task.ANSWER_TOKENS}
    requests = good(run(CHAT, [row] * 2, {**GREEDY, **more}, **asked), 4)
    called = [one for one in requests if one["tool_calls"]]
    equal(len(called), 2, "requests that called")
    for one in called:
        (call,) = one["tool_calls"]
        check_tool(call["function"]["name"], call["function"]["arguments"])
    return "4 requests"


# Without the field so small a model calls again and again: guidellm sets no limit of tokens here.
tour.call("tool", "a tool of the data, required, whose result is sent back")(
    partial(call_tools, parallel_tool_calls=False)
)
tour.call("tool", "a tool of the data that tool_choice names")(
    partial(call_tools, tool_choice=task.TOOL_CHOICE)
)
