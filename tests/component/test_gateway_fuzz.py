"""Random requests, good and bad: no crash, no hang, nothing left behind, and good ones go on."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.etcd import Store
from services.worker.start_frame import to_request
from tests.support.bad_inputs import CONTEXT, VOCABULARY
from tests.support.exposition import samples, value
from tests.support.fuzz import random_body
from tests.support.gateway import Case, gateway_case
from tests.support.waiting import eventually

AT_ONCE = 24
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
# Of a request that is read to its end, or of one that asks for something that is not there.
STATUSES = {200, 400, 404, 409}
LEFT_OVER = ("requests_inflight", "requests_admitting", "requests_running", "body_bytes")


@pytest.fixture
async def case(store: Store, tmp_path: Path) -> AsyncIterator[Case]:
    async with gateway_case(store, tmp_path / "model", max_model_len=CONTEXT) as case:
        worker = case.cluster.workers[0]
        worker.step_s, worker.tokens_per_event = 0.0, 4
        yield case


class Fuzz:
    """Sends requests that a seed draws, and keeps what came of them."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.statuses: Counter[int | str] = Counter()

    async def run(self, seeds: range) -> None:
        """One request for each seed, many at once."""
        waiting = iter(seeds)

        async def sender() -> None:
            for seed in waiting:
                await self._one(random.Random(seed))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(sender())

    async def _one(self, rng: random.Random) -> None:
        endpoint = rng.choice(list(PATHS))
        body = random_body(rng, endpoint)
        content = _mangled(rng, json.dumps(body).encode())
        request = self._case.http.build_request(
            "POST",
            PATHS[endpoint],
            content=content,
            headers={"content-type": "application/json", **_headers(rng)},
        )
        answer = await self._case.http.send(request, stream=True)
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
            # One that dawdles.
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
    """Every choice ends once, and then the stream does."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ended = Counter(choice["index"] for choice in choices if choice["finish_reason"])
    assert ended == Counter({choice["index"]: 1 for choice in choices})


def check_whole(answer: dict[str, Any]) -> None:
    """Choices are numbered, ended, and counted."""
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    assert all(choice["finish_reason"] in ("stop", "length") for choice in choices)
    usage = answer["usage"]
    assert usage["prompt_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    for choice in choices:
        told = choice.get("logprobs") or {}
        lists = [values for values in told.values() if values is not None]
        assert len({len(values) for values in lists}) <= 1


def _headers(rng: random.Random) -> dict[str, str]:
    """Sometimes those that clients set, rarely right."""
    if rng.random() > 0.1:
        return {}
    name = rng.choice(("x-slo-ttft-ms", "x-slo-tpot-ms", "x-gateway-inference-objective"))
    return {name: rng.choice(("100", "batch", "-1", "nan", "", "x" * 99))}


def _mangled(rng: random.Random, content: bytes) -> bytes:
    """Rarely not the JSON that it was."""
    if rng.random() > 0.02:
        return content
    at = rng.randrange(len(content))
    return rng.choice((content[:at], content[:at] + rng.randbytes(3) + content[at:]))


async def fuzzed(case: Case, seeds: range) -> Counter[int | str]:
    """Send them, and check what is left behind."""
    fuzz = Fuzz(case)
    worker = case.cluster.workers[0]
    await fuzz.run(seeds)
    await eventually(lambda: not worker.active)

    async def nothing_left() -> bool:
        found = samples((await case.http.get("/metrics")).text)
        return not any(value(found, f"tideserve_gateway_{name}") for name in LEFT_OVER)

    await eventually(nothing_left)
    # What the gateway lets through is what a worker takes.
    for start in worker.starts:
        to_request(start, VOCABULARY, CONTEXT, now_s=0.0)
    for good in (case.chat, case.complete):
        assert (await good(max_tokens=3)).status_code == 200
    return fuzz.statuses


async def test_a_thousand_random_requests(case: Case) -> None:
    statuses = await fuzzed(case, range(1000))
    # Both kinds are there in numbers, or little would be shown.
    assert statuses[200] > 300
    assert statuses[400] > 200
    assert statuses["cut"] > 30


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_ten_thousand_random_requests(case: Case) -> None:
    statuses = await fuzzed(case, range(1000, 11_000))
    assert statuses[200] > 3000
    assert statuses[400] > 2000
