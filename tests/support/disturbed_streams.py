"""Streams with every kind of sampling, for tests that disturb the cluster during them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import psutil
import pytest

from services.gateway.admin.guard import ADMIN_HEADER
from tests.support.client import TIMEOUT_S, prompt_of
from tests.support.cluster import Cluster
from tests.support.tiny_models import make_tiny_model

ATTEMPTS = 5
"""Retries: on a loaded machine streams may end before they move."""
OUTPUT_TOKENS = 300
MOVED = "tideserve_gateway_moved_streams_total"
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 0.0, **PENALTIES},
    {"temperature": 0.9, "seed": 6, "min_tokens": 200, **PENALTIES},
    {"temperature": 0.8, "seed": 7, "structured_outputs": {"regex": "([a-f]{3}[0-9]{2} ){40}z"}},
    {"temperature": 0.8, "seed": 8, "logprobs": 2},
    {"temperature": 0.8, "seed": 9, "n": 2},
    {"temperature": 0.0, "bad_words": ["ab"], "logit_bias": {"70": 2}},
    # Characters of two to four tokens, and a stop string of seven.
    {"temperature": 0.9, "seed": 10, "structured_outputs": {"regex": "([日本語é🌊]{4} ){15}z"}},
    {
        "temperature": 0.8,
        "seed": 11,
        "structured_outputs": {"regex": "([ab]{9} ){12}the end[0-9]{90}"},
        "stop": ["the end"],
    },
]
NO_FIELDS: Mapping[str, Any] = {}

Answer = list[dict[str, Any]]


async def chunks_of(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream that must end with [DONE]."""
    line = ""
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))
        elif line:
            assert line == "data: [DONE]"


async def ask(
    cluster: Cluster,
    number: int,
    note: Callable[[int], None] | None = None,
    tokens: int = OUTPUT_TOKENS,
    more: Mapping[str, Any] = NO_FIELDS,
) -> Answer:
    """Stream a request; returns each choice's output. `note` is called with the token count so far.

    `more`: further fields of the request.
    """
    fields = KINDS[number]
    body = {
        "model": cluster.get("/v1/models")["data"][0]["id"],
        "prompt": prompt_of(number, 24),
        "max_tokens": tokens,
        "stream": True,
        "return_token_ids": True,
        "ignore_eos": "structured_outputs" not in fields,
        **fields,
        **more,
    }
    choices: Answer = [
        {"text": "", "ids": [], "logprobs": [], "finish": None} for _ in range(fields.get("n", 1))
    ]
    async with (
        httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_S) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        async for chunk in chunks_of(answer):
            for choice in chunk["choices"]:
                output = choices[choice["index"]]
                output["text"] += choice["text"]
                output["ids"] += choice["token_ids"] or []
                output["logprobs"] += (choice["logprobs"] or {"token_logprobs": []})[
                    "token_logprobs"
                ]
                output["finish"] = choice["finish_reason"] or output["finish"]
                if note is not None:
                    note(len(output["ids"]))
    return choices


def run_all(
    cluster: Cluster,
    note: Callable[[int], None] | None = None,
    tokens: int = OUTPUT_TOKENS,
    more: Mapping[str, Any] = NO_FIELDS,
    all_begun: bool = False,
) -> list[Answer]:
    """Run a stream of each kind concurrently; returns their outputs. See `ask`.

    `all_begun`: `note` is first called once each stream has a token.
    """
    waiting = set(range(len(KINDS))) if all_begun else set[int]()

    def noted(number: int) -> Callable[[int], None]:
        def note_begun(tokens: int) -> None:
            waiting.discard(number)
            if note is not None and not waiting:
                note(tokens)

        return note_begun

    async def run() -> list[Answer]:
        numbers = range(len(KINDS))
        asked = (ask(cluster, number, noted(number), tokens, more) for number in numbers)
        return await asyncio.gather(*asked)

    return asyncio.run(run())


def asked_to_move(cluster: Cluster, source: str, target: str) -> dict[str, Any]:
    """Move all running requests; returns the response, which may be an error."""
    answer: dict[str, Any] = httpx.post(
        f"{cluster.admin_url}/tideserve/v1/requests/move",
        params={"source": source, "target": target},
        headers={ADMIN_HEADER: "1"},
        timeout=120,
    ).json()
    return answer


def disturbed(
    cluster: Cluster,
    at: int,
    *actions: Callable[[], object],
    more: Mapping[str, Any] = NO_FIELDS,
    all_begun: bool = False,
) -> tuple[list[Answer], float]:
    """Run `actions` once a stream reaches token `at`; returns the outputs and the moves.

    `more`: further fields of the requests. `all_begun`: after the first token of each stream.
    """
    both_serve(cluster)
    moved, threads = cluster.metric(MOVED), list[Thread]()

    def note(tokens: int) -> None:
        if tokens >= at and not threads:
            threads.extend(Thread(target=action) for action in actions)
            for thread in threads:
                thread.start()

    answers = run_all(cluster, note, more=more, all_begun=all_begun)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return answers, cluster.metric(MOVED) - moved


@contextmanager
def logged_cluster(folder: Path, logs: Path, **options: Any) -> Iterator[Cluster]:
    """Two workers with a tiny model in `folder`, whose groups change by hand only."""
    model = make_tiny_model(folder, seed=3, layers=4)
    with Cluster(
        model_dir=model,
        memory="32MiB",
        dtype="float64",
        services={"event_log": str(logs)},
        chunk_size="64KiB",
        overload_policy="recompute",
        **options,
    ) as running:
        yield running


def both_serve(cluster: Cluster) -> None:
    """Wait until both workers serve."""
    cluster.eventually(
        lambda: cluster.metric("tideserve_gateway_groups_serving") == 2, deadline_s=120
    )


async def streamed_ids(
    cluster: Cluster, prompt: list[int], tokens: int, note: Callable[[int], None]
) -> list[int]:
    """The token ids of a greedy stream. `note` is called with the token count so far."""
    body = {
        "model": cluster.get("/v1/models")["data"][0]["id"],
        "prompt": prompt,
        "max_tokens": tokens,
        "stream": True,
        "return_token_ids": True,
        "ignore_eos": True,
        "temperature": 0.0,
    }
    ids: list[int] = []
    async with (
        httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_S) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        async for chunk in chunks_of(answer):
            ids += [token for choice in chunk["choices"] for token in choice["token_ids"] or []]
            note(len(ids))
    return ids


def apart(cluster: Cluster) -> bool:
    """Whether each worker is registered and serves in a group of its own."""
    groups = cluster.status()["groups"]
    return len(groups) == 2 and not any(group["degraded"] or group["changing"] for group in groups)


def merge(cluster: Cluster) -> list[str]:
    """Merge both workers after any back-off; returns the workers, leader first."""
    cluster.eventually(lambda: apart(cluster), deadline_s=120)

    def stable() -> bool:
        headers = {ADMIN_HEADER: "1"}
        url = f"{cluster.admin_url}/tideserve/v1/groups/merge"
        try:
            return '"stable"' in httpx.post(url, headers=headers, timeout=60).text
        except httpx.TransportError:
            return False

    cluster.eventually(stable, deadline_s=120)
    (group,) = cluster.status()["groups"]
    members: list[str] = group["members"]
    return members


def kill(cluster: Cluster, name: str, engine: bool) -> int:
    """Kill a worker with its engine, or the engine alone; returns the worker's process id."""
    pid = cluster.pids()[name]
    worker = psutil.Process(pid)
    # The worker first, so that it cannot report the death of its engine.
    for process in [*([] if engine else [worker]), *worker.children(recursive=True)]:
        process.kill()
    return pid


def check_answers(answers: list[Answer], undisturbed: list[Answer]) -> None:
    """Texts, token ids and ends are those of the undisturbed run."""
    for number, (answer, expected) in enumerate(zip(answers, undisturbed, strict=True)):
        for output, other in zip(answer, expected, strict=True):
            # The KV of prompts and that of decoded tokens are rounded differently in float32.
            assert output["logprobs"] == pytest.approx(other["logprobs"], abs=1e-3)
            output["logprobs"] = other["logprobs"]
        assert answer == expected, f"{KINDS[number]} differs"
