"""aiperf, NVIDIA's load generator: runs of a few requests each; a run is a call."""

import json
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from tours import task
from tours.tour import Tour, check, check_tool, equal, validate

tour = Tour()
REQUESTS = 3
RUN_TIMEOUT_S = 200
FOLDER = Path("artifacts")
RECORDS, RAW = "profile_export.jsonl", "profile_export_raw.jsonl"
TOKENIZER = os.environ["TOUR_MODEL_DIR"]
# It does not find a tokenizer's folder without a hub.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
FIXED = (
    *("profile", "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"),
    *("--export-level", "raw", "--export-outputs-json", "--artifact-dir", str(FOLDER)),
    *("--url", tour.url, "--api-key", tour.api_key, "--tokenizer", TOKENIZER),
)


def run(
    kind: str,
    *options: str,
    text: str = "",
    model: str = tour.model,
    max_tokens: int = task.TOKENS,
    streaming: bool = True,
    **more: Any,
) -> list[Any]:
    """What each of the requests got, in figures; `more` is added to each request.

    `text` is what each says; without it aiperf makes prompts.
    """
    limit = "max_output_tokens" if kind == "responses" else "max_tokens"
    extra = {"temperature": 0, limit: max_tokens, **more}
    command = ["aiperf", *FIXED, "--endpoint-type", kind, "--model", model]
    command += ["--extra-inputs", json.dumps(extra), *options]
    command += ["--streaming"] if streaming else []
    if text:
        Path("input.jsonl").write_text(json.dumps({"text": text}) + "\n")
        command += ["--input-file", "input.jsonl", "--custom-dataset-type", "single-turn"]
    if "--request-count" not in options:
        command += ["--request-count", str(REQUESTS), "--concurrency", "1"]
    shutil.rmtree(FOLDER, ignore_errors=True)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
        env=ENVIRONMENT,
    )
    check((FOLDER / RECORDS).is_file(), f"no result: {(done.stdout + done.stderr)[-500:]}")
    return rows_of(RECORDS)


def rows_of(name: str) -> list[Any]:
    """The rows of a file of the last run."""
    return [json.loads(row) for row in (FOLDER / name).read_text().splitlines()]


def good(records: list[Any], wanted: int = REQUESTS) -> list[Any]:
    """The records; Failure unless there are `wanted`, all of them without an error."""
    errors = [record["error"] for record in records if record.get("error")]
    check(not errors, f"{len(errors)} errors: {errors[:1]}")
    equal(len(records), wanted, "requests")
    return records


def texts() -> list[str]:
    """The answers of the last run."""
    outputs = json.loads((FOLDER / "outputs.json").read_text())["data"]
    return [one["response_text"] for one in outputs]


def compared(kind: str, streaming: bool) -> str:
    """A run whose text must be that of plain HTTP."""
    whole = kind == "completions"
    text, wanted = (
        (task.PROMPT, tour.plain.completion_text)
        if whole
        else (task.QUESTION, tour.plain.chat_text)
    )
    good(run(kind, text=text, streaming=streaming))
    equal(texts(), [wanted] * REQUESTS, "texts")
    return f"{REQUESTS} requests"


for endpoint in ("chat", "completions", "responses", "messages"):
    tour.call("stream", endpoint)(partial(compared, endpoint, streaming=True))
    tour.call("unary", endpoint)(partial(compared, endpoint, streaming=False))


@tour.call("load", "synthetic chats, four at once, usage of the server and of each chunk")
def _concurrent() -> str:
    made = ("--synthetic-input-tokens-mean", "24", "--use-server-token-count", "--per-chunk-usage")
    records = run("chat", *made, "--request-count", "12", "--concurrency", "4", ignore_eos=True)
    good(records, 12)
    return "12 requests"


@tour.call("load", "synthetic completions at a rate")
def _rate() -> str:
    made = ("--synthetic-input-tokens-mean", "24", "--request-rate", "4")
    good(run("completions", *made, "--request-count", "8"), 8)
    return "8 requests"


@tour.call("cancel", "requests that it cancels after a second")
def _cancel() -> str:
    options = ("--request-cancellation-rate", "100", "--request-cancellation-delay", "1")
    with tour.given_up():
        records = run(
            "chat", *options, text=task.QUESTION, max_tokens=task.LONG_TOKENS, ignore_eos=True
        )
    cancelled = [record["metadata"]["was_cancelled"] for record in records]
    equal(cancelled, [True] * REQUESTS, "cancelled")
    return f"{REQUESTS} requests"


@tour.call("error", "unknown model")
def _unknown_model() -> str:
    records = run("chat", text=task.QUESTION, model=task.UNKNOWN_MODEL)
    equal([record["error"]["code"] for record in records], [404] * REQUESTS, "status")
    return f"{REQUESTS} requests"


@tour.call("schema", "chat with response_format json_schema")
def _schema() -> str:
    asked: Any = {"text": task.CITY_QUESTION, "max_tokens": task.ANSWER_TOKENS}
    good(run("chat", **asked, response_format=task.CITY_FORM))
    for text in texts():
        validate(json.loads(text), task.CITY_SCHEMA)
    return f"{REQUESTS} requests"


@tour.call("tool", "chat with a tool that tool_choice names")
def _named() -> str:
    asked: Any = {"text": task.TOOL_MESSAGES[0]["content"], "max_tokens": task.ANSWER_TOKENS}
    tools = {"tools": [task.TOOL], "tool_choice": task.TOOL_CHOICE}
    good(run("chat", **asked, **tools, streaming=False))
    for record in rows_of(RAW):
        message = json.loads(record["responses"][0]["text"])["choices"][0]["message"]
        (call,) = message["tool_calls"]
        check_tool(call["function"]["name"], call["function"]["arguments"])
    return f"{REQUESTS} requests"
