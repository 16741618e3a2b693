"""`vllm bench serve`, vLLM's load generator: runs of a few requests each; a run is a call."""

import json
import os
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from tours import task
from tours.tour import Tour, check, equal, validate

tour = Tour()
REQUESTS = 3
RUN_TIMEOUT_S = 200
RESULT = Path("result.json")
ENVIRONMENT = {**os.environ, "OPENAI_API_KEY": tour.api_key, "VLLM_NO_USAGE_STATS": "1"}
ROUTES = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
}


def command(
    backend: str,
    *options: str,
    text: str = "",
    model: str = tour.model,
    requests: int = REQUESTS,
    max_tokens: int = task.TOKENS,
    **more: Any,
) -> list[str]:
    """The command of a run; `more` is added to each request.

    `text` is what each says; without it the benchmark draws tokens.
    """
    made = ["vllm", "bench", "serve", "--backend", backend, "--base-url", tour.url]
    made += ["--endpoint", ROUTES[backend], "--model", os.environ["TOUR_MODEL_DIR"]]
    made += ["--served-model-name", model, "--num-prompts", str(requests)]
    made += ["--max-concurrency", "1", "--temperature", "0", "--disable-tqdm", "--save-result"]
    made += ["--save-detailed", "--result-filename", str(RESULT), *options]
    made += ["--extra-body", json.dumps(more)] if more else []
    if not text:
        return [
            *(*made, "--dataset-name", "random", "--random-input-len", "24"),
            *("--random-output-len", str(max_tokens)),
        ]
    said = [{"from": "human", "value": text}, {"from": "gpt", "value": text}]
    Path("talks.json").write_text(json.dumps([{"conversations": said}] * requests))
    return [
        *(*made, "--dataset-name", "sharegpt", "--dataset-path", "talks.json"),
        *("--sharegpt-output-len", str(max_tokens)),
    ]


def run(backend: str, *options: str, **more: Any) -> Any:
    """The result of a run; see `command`."""
    RESULT.unlink(missing_ok=True)
    done = subprocess.run(
        command(backend, *options, **more),
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
        env=ENVIRONMENT,
    )
    said = (done.stdout + done.stderr)[-500:]
    check(RESULT.is_file(), f"no result, status {done.returncode}: {said}")
    return json.loads(RESULT.read_text())


def good(result: Any, wanted: int = REQUESTS) -> Any:
    """The result; Failure unless `wanted` requests succeeded."""
    errors = [error for error in result["errors"] if error]
    check(result["completed"] == wanted and not errors, f"{result['completed']}: {errors[:1]}")
    return result


def compared(backend: str) -> str:
    """A run whose text must be that of plain HTTP."""
    asked, wanted = task.QUESTION, tour.plain.chat_text
    if backend == "openai":
        asked, wanted = task.PROMPT, tour.plain.completion_text
    result = good(run(backend, text=asked))
    equal(result["generated_texts"], [wanted] * REQUESTS, "texts")
    return f"{REQUESTS} requests"


for door in ("openai-chat", "openai", "openai-responses"):
    tour.call("stream", door)(partial(compared, door))


@tour.call("stream", "vllm: completions with logprobs and penalties")
def _fields() -> str:
    options = ("--logprobs", "2", "--repetition-penalty", "1.1", "--top-k", "20", "--min-p", "0.1")
    penalties = ("--presence-penalty", "0.2", "--frequency-penalty", "0.2")
    good(run("vllm", *options, *penalties, text=task.PROMPT))
    return f"{REQUESTS} requests"


tour.cannot("unary", "it streams every request")


@tour.call("load", "openai: 16 random prompts, four at once")
def _random() -> str:
    # Some of the prompts that it draws hold U+0000.
    good(run("openai", "--max-concurrency", "4", "--ignore-eos", requests=16, max_tokens=8), 16)
    return "16 requests"


@tour.call("load", "openai-chat: 12 random prompts at a rate")
def _rate() -> str:
    options = ("--max-concurrency", "4", "--request-rate", "4", "--ignore-eos")
    good(run("openai-chat", *options, requests=12, max_tokens=8), 12)
    return "12 requests"


@tour.call("load", "vllm: prompts with a common prefix")
def _prefix() -> str:
    good(run("vllm", "--random-prefix-len", "32", requests=8, max_tokens=8), 8)
    return "8 requests"


@tour.call("cancel", "it is interrupted in the middle of a request")
def _cancel() -> None:
    asked = command("openai-chat", "--ignore-eos", text=task.QUESTION, max_tokens=task.LONG_TOKENS)
    before = tour.plain.output_tokens()
    with (
        tour.given_up(),
        subprocess.Popen(
            asked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT
        ) as process,
    ):
        try:
            tour.plain.wait_for_output(before)
            process.send_signal(signal.SIGINT)
            process.wait(RUN_TIMEOUT_S)
        finally:
            process.kill()


@tour.call("error", "unknown model")
def _unknown_model() -> None:
    told = ""
    try:
        told = str(run("openai-chat", text=task.QUESTION, model=task.UNKNOWN_MODEL)["errors"])
    except Exception as error:  # noqa: BLE001 - its first request is a trial whose failure ends it
        told = str(error)
    check("Not Found" in told, told)


@tour.call("schema", "openai-chat with response_format json_schema")
def _schema() -> str:
    asked: Any = {"text": task.CITY_QUESTION, "max_tokens": task.ANSWER_TOKENS}
    for text in good(run("openai-chat", **asked, response_format=task.CITY_FORM))[
        "generated_texts"
    ]:
        validate(json.loads(text), task.CITY_SCHEMA)
    return f"{REQUESTS} requests"


@tour.call("tool", "openai-chat with a tool that tool_choice names")
def _named() -> str:
    asked: Any = {"text": task.TOOL_MESSAGES[0]["content"], "max_tokens": task.ANSWER_TOKENS}
    result = good(run("openai-chat", **asked, tools=[task.TOOL], tool_choice=task.TOOL_CHOICE))
    # It keeps the text of answers only, and a tool call is none.
    equal(result["generated_texts"], [""] * REQUESTS, "texts")
    return f"{REQUESTS} requests"
