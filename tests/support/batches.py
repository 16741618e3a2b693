"""Batches of a test: inputs, their way through a gateway, and their results."""

import json
from collections.abc import Sequence
from typing import Any

from openai import APIConnectionError, AsyncOpenAI, InternalServerError
from openai.types import Batch

from tests.support.waiting import DEADLINE_S, eventually

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "cancelled", "expired")
VARYING = frozenset({"id", "created", "request_id"})
"""Fields that differ between runs of a line; so does the number of cached tokens."""


def chat_line(number: int, **fields: Any) -> dict[str, Any]:
    """A line with a chat."""
    messages = [{"role": "user", "content": f"question {number}"}]
    body = {"model": "m", "messages": messages, "max_tokens": 12, "temperature": 0}
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body | fields}


def chat_lines(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Lines with chats."""
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
    """The batch; None while the gateway is away."""
    try:
        return await client.batches.retrieve(batch_id)
    except (APIConnectionError, InternalServerError):
        return None


async def ended(client: AsyncOpenAI, batch_id: str, deadline_s: float = DEADLINE_S) -> Batch:
    """The batch once it has ended; the gateway may be away meanwhile."""

    async def final() -> Batch | None:
        batch = await look(client, batch_id)
        return batch if batch is not None and batch.status in ENDED else None

    return await eventually(final, deadline_s=deadline_s, interval_s=0.1)


async def results(client: AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file; none without a file."""
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]


def comparable(value: Any) -> Any:
    """A result without what differs between runs."""
    if isinstance(value, list):
        return [comparable(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: 0 if name == "cached_tokens" else comparable(item)
        for name, item in value.items()
        if name not in VARYING
    }
