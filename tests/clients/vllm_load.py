"""`vllm bench serve`, vLLM's load generator: runs of a few streamed requests each."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import support as s

REQUESTS = 3
RUN_TIMEOUT_S = 200
RESULT = Path("result.json")
ENVIRONMENT = {**os.environ, "OPENAI_API_KEY": s.API_KEY, "VLLM_NO_USAGE_STATS": "1"}
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
    model: str = s.MODEL,
    requests: int = REQUESTS,
    max_tokens: int = s.TOKENS,
    **more: Any,
) -> list[str]:
    """The command of a run with `text` or drawn tokens; `more` is added to each request."""
    made = ["vllm", "bench", "serve", "--backend", backend, "--base-url", s.URL]
    made += ["--endpoint", ROUTES[backend], "--model", s.MODEL_DIR, "--served-model-name", model]
    made += ["--num-prompts", str(requests), "--max-concurrency", "1", "--temperature", "0"]
    made += ["--disable-tqdm", "--save-result", "--save-detailed"]
    made += ["--result-filename", str(RESULT), *options]
    made += ["--extra-body", json.dumps(more)] if more else []
    if not text:
        made += ["--dataset-name", "random", "--random-input-len", "24"]
        return [*made, "--random-output-len", str(max_tokens)]
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": text}]
    Path("talks.json").write_text(json.dumps([{"conversations": turns}] * requests))
    made += ["--dataset-name", "sharegpt", "--dataset-path", "talks.json"]
    return [*made, "--sharegpt-output-len", str(max_tokens)]


def texts_of(backend: str, *options: str, requests: int = REQUESTS, **more: Any) -> list[str]:
    """The answers of a run without errors; see `command`."""
    RESULT.unlink(missing_ok=True)
    asked = command(backend, *options, requests=requests, **more)
    subprocess.run(asked, timeout=RUN_TIMEOUT_S, check=True, env=ENVIRONMENT)
    result = json.loads(RESULT.read_text())
    assert not [error for error in result["errors"] if error]
    assert result["completed"] == requests
    return list(result["generated_texts"])


@pytest.mark.parametrize("backend", ["openai-chat", "openai", "openai-responses"])
def test_text(backend: str) -> None:
    asked, wanted = s.QUESTION, s.chat_text()
    if backend == "openai":
        asked, wanted = s.PROMPT, s.completion_text()
    assert texts_of(backend, text=asked) == [wanted] * REQUESTS


def test_logprobs_and_penalties() -> None:
    options = ("--logprobs", "2", "--repetition-penalty", "1.1", "--top-k", "20", "--min-p", "0.1")
    penalties = ("--presence-penalty", "0.2", "--frequency-penalty", "0.2")
    texts_of("vllm", *options, *penalties, text=s.PROMPT)


@pytest.mark.parametrize(
    ("backend", "requests", "options"),
    [
        # Some of its random prompts contain U+0000.
        ("openai", 16, ("--max-concurrency", "4", "--ignore-eos")),
        ("openai-chat", 12, ("--max-concurrency", "4", "--request-rate", "4", "--ignore-eos")),
        ("vllm", 8, ("--random-prefix-len", "32")),
    ],
)
def test_load(backend: str, requests: int, options: tuple[str, ...]) -> None:
    texts_of(backend, *options, requests=requests, max_tokens=8)


def test_an_interrupted_run_is_cancelled() -> None:
    asked = command("openai-chat", "--ignore-eos", text=s.QUESTION, max_tokens=s.LONG_TOKENS)
    with s.given_up() as before, subprocess.Popen(asked, env=ENVIRONMENT) as process:
        try:
            s.wait_for_token(before)
            process.send_signal(signal.SIGINT)
            process.wait(RUN_TIMEOUT_S)
        finally:
            process.kill()


def test_unknown_model() -> None:
    RESULT.unlink(missing_ok=True)
    asked = command("openai-chat", text=s.QUESTION, model=s.UNKNOWN_MODEL)
    done = subprocess.run(
        asked, timeout=RUN_TIMEOUT_S, check=False, env=ENVIRONMENT, capture_output=True, text=True
    )
    printed = done.stdout + done.stderr
    assert "Not Found" in (printed + RESULT.read_text() if RESULT.is_file() else printed)


def test_schema() -> None:
    asked: Any = {"text": s.CITY_QUESTION, "max_tokens": s.ANSWER_TOKENS}
    for text in texts_of("openai-chat", **asked, response_format=s.CITY_FORM):
        s.check_city(text)


def test_a_named_tool() -> None:
    asked: Any = {"text": s.TOOL_QUESTION, "max_tokens": s.ANSWER_TOKENS}
    texts = texts_of("openai-chat", **asked, tools=[s.TOOL], tool_choice=s.TOOL_CHOICE)
    # It stores only the text of outputs, which tool calls lack.
    assert texts == [""] * REQUESTS
