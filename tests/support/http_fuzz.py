"""Sends random requests over HTTP and checks the responses."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx

from tests.support.fuzz import random_body

PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
# Statuses of requests that are read completely, or that name something unknown.
STATUSES = {200, 400, 404, 409}


class HttpFuzz:
    """Sends random requests to a gateway that serves `model`, and records the outcomes."""

    def __init__(self, http: httpx.AsyncClient, model: str, at_once: int) -> None:
        self._http = http
        self._model = model
        self._at_once = at_once
        self.statuses: Counter[int | str] = Counter()

    async def run(self, seeds: range) -> None:
        """Send a request per seed, `at_once` concurrently."""
        waiting = iter(seeds)

        async def sender() -> None:
            for seed in waiting:
                await self._one(random.Random(seed))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._at_once):
                tasks.create_task(sender())

    async def _one(self, rng: random.Random) -> None:
        endpoint = rng.choice(list(PATHS))
        body = random_body(rng, endpoint)
        if body.get("model") == "m":
            body["model"] = self._model
        content = _mangled(rng, json.dumps(body).encode())
        request = self._http.build_request(
            "POST",
            PATHS[endpoint],
            content=content,
            headers={"content-type": "application/json", **_headers(rng)},
        )
        answer = await self._http.send(request, stream=True)
        try:
            await self._read(rng, answer)
        except (AssertionError, ValueError) as error:
            error.add_note(f"for {content[:2000]!r}")
            raise
        finally:
            await answer.aclose()

    async def _read(self, rng: random.Random, answer: httpx.Response) -> None:
        assert answer.status_code in STATUSES, answer.status_code
        assert answer.headers["x-request-id"]
        chance = rng.random()
        if answer.status_code == 200 and chance < 0.1:
            self.statuses["cut"] += 1
            return
        if chance > 0.95:
            # A slow reader.
            async for _ in answer.aiter_bytes():
                await asyncio.sleep(0.01)
                break
            self.statuses["cut"] += 1
            return
        text = (await answer.aread()).decode()
        self.statuses[answer.status_code] += 1
        if answer.status_code != 200:
            error = json.loads(text)["error"]
            assert error["message"]
        elif answer.headers["content-type"].startswith("text/event-stream"):
            check_stream(text)
        else:
            check_whole(json.loads(text))


def check_stream(text: str) -> None:
    """Check that every choice ends exactly once before the stream ends."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ended = Counter(choice["index"] for choice in choices if choice["finish_reason"])
    assert ended == Counter({choice["index"]: 1 for choice in choices})


def check_whole(answer: dict[str, Any]) -> None:
    """Check that choices are numbered, finished, and counted in the usage."""
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    assert all(choice["finish_reason"] in ("stop", "length") for choice in choices)
    usage = answer["usage"]
    assert usage["prompt_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    for choice in choices:
        logprobs = choice.get("logprobs") or {}
        lists = [values for values in logprobs.values() if values is not None]
        assert len({len(values) for values in lists}) <= 1


def _headers(rng: random.Random) -> dict[str, str]:
    """Random headers, rarely valid."""
    if rng.random() > 0.1:
        return {}
    name = rng.choice(("x-slo-ttft-ms", "x-slo-tpot-ms", "x-gateway-inference-objective"))
    return {name: rng.choice(("100", "batch", "-1", "nan", "", "x" * 99))}


def _mangled(rng: random.Random, content: bytes) -> bytes:
    """The content, sometimes with invalid JSON."""
    if rng.random() > 0.02:
        return content
    at = rng.randrange(len(content))
    return rng.choice((content[:at], content[:at] + rng.randbytes(3) + content[at:]))
