"""aiperf, NVIDIA's load generator: runs of a few requests each."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import support as s

REQUESTS = 3
RUN_TIMEOUT_S = 200
FOLDER = Path("artifacts")
# It cannot load a tokenizer's folder without a hub.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
FIXED = (
    *("aiperf", "profile", "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"),
    *("--export-level", "raw", "--export-outputs-json", "--artifact-dir", str(FOLDER)),
    *("--url", s.URL, "--api-key", s.API_KEY, "--tokenizer", s.MODEL_DIR),
)
SYNTHETIC = ("--synthetic-input-tokens-mean", "24")


def run(
    kind: str,
    *options: str,
    text: str = "",
    model: str = s.MODEL,
    max_tokens: int = s.TOKENS,
    **more: Any,
) -> list[Any]:
    """Run requests with `text` or synthetic text; returns their records. `more` extends bodies."""
    limit = "max_output_tokens" if kind == "responses" else "max_tokens"
    extra = {"temperature": 0, limit: max_tokens, **more}
    command = [*FIXED, "--endpoint-type", kind, "--model", model, *options]
    command += ["--extra-inputs", json.dumps(extra)]
    if text:
        Path("input.jsonl").write_text(json.dumps({"text": text}) + "\n")
        command += ["--input-file", "input.jsonl", "--custom-dataset-type", "single-turn"]
    if "--request-count" not in options:
        command += ["--request-count", str(REQUESTS), "--concurrency", "1"]
    shutil.rmtree(FOLDER, ignore_errors=True)
    subprocess.run(command, timeout=RUN_TIMEOUT_S, check=False, env=ENVIRONMENT)
    return rows_of("profile_export.jsonl")


def rows_of(name: str) -> list[Any]:
    """The rows of a file of the last run."""
    return [json.loads(row) for row in (FOLDER / name).read_text().splitlines()]


def texts_of(records: list[Any], wanted: int = REQUESTS) -> list[str]:
    """The outputs of the last run, in which all `wanted` requests must have succeeded."""
    assert not [record["error"] for record in records if record.get("error")]
    assert len(records) == wanted
    outputs = json.loads((FOLDER / "outputs.json").read_text())["data"]
    return [output["response_text"] for output in outputs]


@pytest.mark.parametrize("options", [("--streaming",), ()], ids=["stream", "unary"])
@pytest.mark.parametrize("kind", ["chat", "completions", "responses", "messages"])
def test_text(kind: str, options: tuple[str, ...]) -> None:
    completions = kind == "completions"
    wanted = s.completion_text() if completions else s.chat_text()
    records = run(kind, *options, text=s.PROMPT if completions else s.QUESTION)
    assert texts_of(records) == [wanted] * REQUESTS


def test_synthetic_chats_at_once() -> None:
    usage = ("--use-server-token-count", "--per-chunk-usage", "--streaming")
    load = ("--request-count", "12", "--concurrency", "4")
    texts_of(run("chat", *SYNTHETIC, *usage, *load, ignore_eos=True), 12)


def test_synthetic_completions_at_a_rate() -> None:
    load = ("--request-count", "8", "--request-rate", "4", "--streaming")
    texts_of(run("completions", *SYNTHETIC, *load), 8)


def test_requests_that_it_cancels_are_cancelled() -> None:
    cancel = ("--request-cancellation-rate", "100", "--request-cancellation-delay", "1")
    long: Any = {"text": s.QUESTION, "max_tokens": s.LONG_TOKENS, "ignore_eos": True}
    with s.given_up():
        records = run("chat", *cancel, "--streaming", **long)
    assert [record["metadata"]["was_cancelled"] for record in records] == [True] * REQUESTS


def test_unknown_model() -> None:
    records = run("chat", "--streaming", text=s.QUESTION, model=s.UNKNOWN_MODEL)
    assert [record["error"]["code"] for record in records] == [404] * REQUESTS


def test_schema() -> None:
    asked: Any = {"text": s.CITY_QUESTION, "max_tokens": s.ANSWER_TOKENS}
    for text in texts_of(run("chat", "--streaming", **asked, response_format=s.CITY_FORM)):
        s.check_city(text)


def test_a_named_tool() -> None:
    asked: Any = {"text": s.TOOL_QUESTION, "max_tokens": s.ANSWER_TOKENS}
    texts_of(run("chat", **asked, tools=[s.TOOL], tool_choice=s.TOOL_CHOICE))
    for record in rows_of("profile_export_raw.jsonl"):
        message = json.loads(record["responses"][0]["text"])["choices"][0]["message"]
        (call,) = message["tool_calls"]
        s.check_tool(call["function"]["name"], call["function"]["arguments"])
