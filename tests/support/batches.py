"""Helpers that build, submit, follow and compare batches."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
from openai import APIConnectionError, AsyncOpenAI, InternalServerError
from openai.types import Batch

from tests.support.client import open_client
from tests.support.waiting import DEADLINE_S, eventually

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "cancelled", "expired")
VARYING = frozenset({"id", "created", "request_id"})
"""Result fields that differ between runs of a line (so does the number of cached tokens)."""
KILL_POINTS = (
    "gateway.batches.claimed=kill",
    "gateway.started=kill@5",
    "gateway.token=kill@60",
    "gateway.batches.result=kill@9",
    "gateway.batches.committed=kill@9",
    "gateway.batches.output_begun=kill",
    "gateway.batches.output_written=kill",
)
"""Numbers of finished lines, of 24, at which a gateway is killed."""
WATCH_S = 10.0


def chat_line(number: int, **fields: Any) -> dict[str, Any]:
    """An input line that calls the chat endpoint."""
    messages = [{"role": "user", "content": f"question {number}"}]
    body = {"model": "m", "messages": messages, "max_tokens": 12, "temperature": 0}
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body | fields}


def chat_lines(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Input lines that call the chat endpoint."""
    return [chat_line(number, **fields) for number in range(count)]


def as_file(lines: Sequence[dict[str, Any]]) -> bytes:
    """The content of an input file."""
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


async def submit(client: AsyncOpenAI, content: bytes, endpoint: str = CHAT) -> Batch:
    """Upload a file and create a batch."""
    file = await client.files.create(file=("input.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,  # type: ignore[arg-type]
        completion_window="24h",
    )


async def look(client: AsyncOpenAI, batch_id: str) -> Batch | None:
    """The batch object; None while the gateway is unreachable."""
    try:
        return await client.batches.retrieve(batch_id)
    except (APIConnectionError, InternalServerError):
        return None


async def ended(client: AsyncOpenAI, batch_id: str, deadline_s: float = DEADLINE_S) -> Batch:
    """Wait for the batch to end; the gateway may be unreachable meanwhile."""

    async def final() -> Batch | None:
        batch = await look(client, batch_id)
        return batch if batch is not None and batch.status in ENDED else None

    return await eventually(final, deadline_s=deadline_s, interval_s=0.1)


async def results(client: AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file; empty without a file id."""
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]


def comparable(value: Any) -> Any:
    """A result without the fields that differ between runs."""
    if isinstance(value, list):
        return [comparable(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: 0 if name == "cached_tokens" else comparable(item)
        for name, item in value.items()
        if name not in VARYING
    }


async def check_answers(url: str, batch_id: str, lines: Sequence[dict[str, Any]]) -> None:
    """Assert that a batch ends with the answer of each line's request, in input order."""
    async with (
        open_client(url) as client,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        batch = await ended(client, batch_id)
        assert batch.status == "completed" and batch.error_file_id is None, batch
        assert batch.request_counts is not None
        assert batch.request_counts.completed == len(lines)
        answers = await results(client, batch.output_file_id)
        assert [answer["custom_id"] for answer in answers] == [line["custom_id"] for line in lines]
        for answer, line in zip(answers, lines, strict=True):
            asked = await http.post(line["url"], json=line["body"] | {"slo_class": "batch"})
            assert comparable(answer["response"]["body"]) == comparable(asked.json())


def differing(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[str]:
    """The ids of the results that differ between two runs of the same lines."""
    assert [line["custom_id"] for line in first] == [line["custom_id"] for line in second]
    return [
        line["custom_id"]
        for line, other in zip(first, second, strict=True)
        if comparable(line) != comparable(other)
    ]


@asynccontextmanager
async def watched(client: AsyncOpenAI, batch_id: str, kills: Sequence[str]) -> AsyncIterator[None]:
    """Print the progress of a batch and the processes killed so far, every `WATCH_S`."""
    began_s = time.monotonic()

    async def watch() -> None:
        while True:
            batch = await look(client, batch_id)
            counts = None if batch is None else batch.request_counts
            lines = "no answer" if counts is None else f"{counts.completed}/{counts.total} lines"
            print(f"{time.monotonic() - began_s:4.0f} s: {lines}, {len(kills)} kills", flush=True)
            await asyncio.sleep(WATCH_S)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
