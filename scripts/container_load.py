"""Requests to a cluster in containers; compares their tokens with an undisturbed run."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from openai import AsyncOpenAI

from services.common.timeouts import timeout
from services.core.request import Sampling

TIMEOUT_S = 240.0
BEGIN_TIMEOUT_S = 60.0
RETRIES_MAX = 20
"""Retries of a refused request, as on a busy machine; a stream that breaks is not retried."""
PROMPT_TOKENS = 64
EXCUSED_MAX = 0.005
"""Maximum share of tokens that may differ by rounding."""


@dataclass(frozen=True)
class Answer:
    """A completion as its client received it."""

    request_id: str
    finish_reason: str | None
    tokens: int


def prompt_of(number: int) -> list[int]:
    """A random prompt with token ids of any vocabulary."""
    rng = random.Random(number)
    return [rng.randrange(300, 4000) for _ in range(PROMPT_TOKENS)]


def sampling_of(number: int) -> Sampling:
    """Sampling of request `number`: greedy if even, seeded if odd."""
    return Sampling(0.7, seed=number) if number % 2 else Sampling(0.0)


class Progress:
    """Signals when every stream has started."""

    def __init__(self, streams: int) -> None:
        self._left = streams
        self.begun = asyncio.Event()

    def first(self) -> None:
        """Record the first token of a stream."""
        self._left -= 1
        if self._left == 0:
            self.begun.set()


async def stream(
    url: str, number: int, max_tokens: int, progress: Progress | None = None
) -> Answer:
    """Stream a completion of exactly `max_tokens`. Raises the client's error if it breaks."""
    sampling = sampling_of(number)
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=RETRIES_MAX, timeout=TIMEOUT_S
    ) as client:
        model = (await client.models.list()).data[0].id
        chunks = await client.completions.create(
            model=model,
            prompt=prompt_of(number),
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            seed=number,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        request_id, reason, tokens, first = "", None, 0, True
        async for chunk in chunks:
            if first and progress is not None:
                progress.first()
            request_id, first = chunk.id, False
            if chunk.choices:
                reason = chunk.choices[0].finish_reason or reason
            # A chunk may have several tokens, so count with the usage.
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    assert tokens == max_tokens, f"the stream ended with {tokens} of {max_tokens} tokens: {reason}"
    return Answer(request_id, reason, tokens)


@asynccontextmanager
async def running_streams(url: str, count: int, max_tokens: int) -> AsyncIterator[None]:
    """A context with `count` running streams, which all must complete on exit."""
    progress = Progress(count)
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            tasks.create_task(stream(url, number, max_tokens, progress))
        async with timeout(BEGIN_TIMEOUT_S):
            await progress.begun.wait()
        yield


async def stream_all(
    url: str, numbers: Sequence[int], max_tokens: int, at_once: int
) -> dict[int, Answer]:
    """The answers by number, with at most `at_once` concurrent streams."""
    gate = asyncio.Semaphore(at_once)

    async def stream_number(number: int) -> tuple[int, Answer]:
        async with gate:
            return number, await stream(url, number, max_tokens)

    return dict(await asyncio.gather(*map(stream_number, numbers)))


async def stream_until(
    url: str, numbers: Sequence[int], max_tokens: int, stopped: asyncio.Event
) -> dict[int, Answer]:
    """Repeat all requests concurrently until `stopped`; returns the last answer of each."""

    async def repeat(number: int) -> tuple[int, Answer]:
        while True:
            answer = await stream(url, number, max_tokens)
            if stopped.is_set():
                return number, answer

    return dict(await asyncio.gather(*map(repeat, numbers)))


def tokens_by_request(lines: Sequence[list[object]]) -> dict[str, list[int]]:
    """The output tokens of each request in a gateway's event log."""
    outputs: dict[str, list[int]] = {}
    for _, kind, value in lines:
        if kind == "TokensForwarded" and isinstance(value, dict):
            outputs.setdefault(value["request_id"], []).extend(value["token_ids"])
    return outputs


def check_equal(
    model_dir: str, undisturbed: dict[int, list[int]], flooded: dict[int, list[int]]
) -> int:
    """The number of tokens that differ by rounding. Raises AssertionError on other differences.

    `model_dir` has the weights, which are read only if an output differs.
    """
    different = [number for number in undisturbed if undisturbed[number] != flooded[number]]
    if not different:
        return 0
    # Import only if needed: they take seconds to load.
    import torch
    import transformers

    from tests.support.near_ties import count_excused

    reference = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    excused = 0
    for number in different:
        for output in (undisturbed[number], flooded[number]):
            excused += count_excused(reference, prompt_of(number), output, sampling_of(number))
    total = sum(map(len, undisturbed.values())) + sum(map(len, flooded.values()))
    assert excused, f"outputs {different} differ, but none of their tokens is a near-tie"
    assert excused <= EXCUSED_MAX * total, f"{excused} of {total} tokens are near-ties"
    return excused
