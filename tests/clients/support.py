"""Requests of the clients, and plain HTTP of the standard library for comparison.

Prompts and answers are short, so that a small model on a busy machine answers within seconds.
"""

import asyncio
import json
import os
import re
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

URL = os.environ["TIDESERVE_URL"].rstrip("/")
GRPC = os.environ["TIDESERVE_GRPC"]
API_KEY = os.environ.get("TIDESERVE_API_KEY") or "none"
MODEL_DIR = os.environ["TIDESERVE_MODEL_DIR"]
TIMEOUT_S = 120.0

QUESTION = "What is the capital of France?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
BRIEFLY: Any = {"role": "system", "content": "Answer briefly."}
PROMPT = "The capital of France is"
TOKENS = 12
LONG_TOKENS = 2000  # with `ignore_eos`, for calls that are cancelled: half a minute and more
UNKNOWN_MODEL = "no-such-model"
TOO_LONG = "word " * 20_000
CITIES = ["Paris", "London", "Rome"]


def schema_of(**properties: Any) -> Any:
    """An object of which all properties are required."""
    required = list(properties)
    rest = {"required": required, "additionalProperties": False}
    return {"type": "object", "properties": properties, **rest}


# Bounded, so that every output ends by itself within ANSWER_TOKENS.
ANSWER_TOKENS = 64
CITY_SCHEMA = schema_of(
    city={"type": "string", "enum": CITIES},
    millions={"type": "integer", "minimum": 0, "maximum": 99},
)
CITY_FORM: Any = {
    "type": "json_schema",
    "json_schema": {"name": "city", "strict": True, "schema": CITY_SCHEMA},
}
CITY_QUESTION = "Name the capital of France and how many million people live there, as JSON."
CITY_MESSAGES: Any = [{"role": "user", "content": CITY_QUESTION}]
TOOL_NAME = "get_weather"
TOOL_DESCRIPTION = "Tells the weather of a city."
TOOL_SCHEMA = schema_of(
    city={"type": "string", "enum": CITIES},
    unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
)
FUNCTION = {"name": TOOL_NAME, "description": TOOL_DESCRIPTION, "parameters": TOOL_SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
TOOL_CHOICE: Any = {"type": "function", "function": {"name": TOOL_NAME}}
TOOL_QUESTION = "What is the weather in Paris?"
TOOL_MESSAGES: Any = [{"role": "user", "content": TOOL_QUESTION}]
TOOL_RESULT = '{"sky": "clear", "degrees": 21}'


def _read(path: str, body: Any = None) -> bytes:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return bytes(answer.read())


MODEL = str(json.loads(_read("/v1/models"))["data"][0]["id"])


def chat(messages: list[Any], max_tokens: int = TOKENS, **more: Any) -> str:
    """The greedy answer to the messages by plain HTTP."""
    greedy = {"model": MODEL, "temperature": 0, "max_tokens": max_tokens}
    answer = json.loads(_read("/v1/chat/completions", {**greedy, "messages": messages, **more}))
    return str(answer["choices"][0]["message"]["content"])


@cache
def chat_text() -> str:
    """The greedy answer to MESSAGES by plain HTTP."""
    return chat(MESSAGES)


@cache
def completion_text() -> str:
    """The greedy continuation of PROMPT by plain HTTP."""
    body = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS, "prompt": PROMPT}
    return str(json.loads(_read("/v1/completions", body))["choices"][0]["text"])


def metric(name: str) -> float:
    """The sum over its labels of one of the gateway's metrics."""
    pattern = rf"^tideserve_gateway_{name}(?:{{[^}}]*}})? (\S+)$"
    return sum(map(float, re.findall(pattern, _read("/metrics").decode(), re.MULTILINE)))


def wait_until(ready: Callable[[], bool]) -> None:
    """Raises TimeoutError."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not ready():
        if time.monotonic() > deadline_s:
            raise TimeoutError
        time.sleep(0.1)


def wait_for_token(before: float) -> None:
    """Wait until the gateway has sent more than `before` tokens. Raises TimeoutError."""
    wait_until(lambda: metric("output_tokens_total") > before)


@contextmanager
def given_up() -> Iterator[float]:
    """The body abandons a call for LONG_TOKENS, which the cluster must then stop computing."""
    before = metric("output_tokens_total")
    yield before
    wait_until(lambda: metric("requests_inflight") <= 0)
    assert metric("output_tokens_total") - before < LONG_TOKENS


async def cancelled(call: Coroutine[Any, Any, object]) -> None:
    """Cancel the task of a call for LONG_TOKENS after a second."""
    with given_up():
        running = asyncio.create_task(call)
        await asyncio.sleep(1)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()


def joined(pieces: Iterable[str | None]) -> str:
    """The text of streamed pieces."""
    return "".join(piece or "" for piece in pieces)


def check_city(value: Any) -> None:
    """Check that a value, or JSON, matches CITY_SCHEMA."""
    value = json.loads(value) if isinstance(value, str) else value
    assert value.keys() == {"city", "millions"} and value["city"] in CITIES
    assert type(value["millions"]) is int and 0 <= value["millions"] <= 99


def check_tool(name: object, arguments: Any) -> None:
    """Check that TOOL is called with arguments, or their JSON, that match TOOL_SCHEMA."""
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == TOOL_NAME and arguments.keys() == {"city", "unit"}
    assert arguments["city"] in CITIES and arguments["unit"] in ("celsius", "fahrenheit")
