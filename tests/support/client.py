"""Clients' requests to a cluster."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from openai import APIConnectionError, AsyncOpenAI, DefaultAsyncHttpxClient

TIMEOUT_S = 240.0
T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """A completion as the client received it."""

    text: str
    finish_reason: str | None
    completion_tokens: int


def open_client(url: str, api_key: str = "none") -> AsyncOpenAI:
    """The official client without its own retries, which would hide a failure.

    It does not read the machine's certificates, which takes a tenth of a gateway's start.
    """
    plain = DefaultAsyncHttpxClient(verify=not url.startswith("http://"))
    return AsyncOpenAI(
        base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=TIMEOUT_S, http_client=plain
    )


def prompt_of(number: int, tokens: int) -> list[int]:
    """A random prompt of token ids that any tiny model's vocabulary has."""
    rng = random.Random(number)
    return [rng.randrange(3, 200) for _ in range(tokens)]


async def stream_completion(
    url: str,
    *,
    ignore_eos: bool = False,
    on_chunk: Callable[[int], Awaitable[None]] | None = None,
    model: str | None = None,
    api_key: str = "none",
    **options: Any,
) -> Answer:
    """Stream a completion to its end; `on_chunk` is awaited with the number of chunks so far."""
    async with open_client(url, api_key) as client, _explained():
        if model is None:
            model = (await client.models.list()).data[0].id
        stream = await client.completions.create(
            model=model,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": ignore_eos},
            **options,
        )
        text, reason, usage, chunks = "", None, None, 0
        async for chunk in stream:
            chunks += 1
            if chunk.choices:
                text += chunk.choices[0].text
                reason = chunk.choices[0].finish_reason or reason
            usage = chunk.usage or usage
            if on_chunk is not None:
                await on_chunk(chunks)
        assert usage is not None, "the stream ended without usage"
        return Answer(text, reason, usage.completion_tokens)


async def numbered_completion(
    url: str, number: int, *, prompt_tokens: int, max_tokens: int, **options: Any
) -> Answer:
    """Stream a reproducible completion: greedy for even numbers, seeded sampling for odd ones."""
    return await stream_completion(
        url,
        prompt=prompt_of(number, prompt_tokens),
        max_tokens=max_tokens,
        temperature=0.7 if number % 2 else 0.0,
        seed=number,
        ignore_eos=True,
        **options,
    )


@asynccontextmanager
async def _explained() -> AsyncIterator[None]:
    """Add the root cause to a connection error."""
    try:
        yield
    except APIConnectionError as error:
        error.add_note(f"because of {error.__cause__!r}")
        raise


async def gather_bounded(jobs: list[Callable[[], Awaitable[T]]], at_once: int) -> list[T]:
    """Results in order, with at most `at_once` jobs running."""
    gate = asyncio.Semaphore(at_once)

    async def run(job: Callable[[], Awaitable[T]]) -> T:
        async with gate:
            return await job()

    return await asyncio.gather(*(run(job) for job in jobs))


async def seeded_completion(url: str, max_tokens: int, **options: Any) -> Answer:
    """Stream a sampled completion with a fixed seed."""
    return await stream_completion(
        url,
        prompt=prompt_of(1, 40),
        max_tokens=max_tokens,
        temperature=0.8,
        seed=11,
        ignore_eos=True,
        **options,
    )
