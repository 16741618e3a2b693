"""Workers are killed while they stream: every answer is that of a cluster that nobody disturbs.

Whole workers and engines alone, at several moments of the answers. These are greedy or sampled,
with penalties, a grammar, log probabilities or several choices.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.client import TIMEOUT_S, prompt_of
from tests.support.cluster import Cluster
from tests.support.tiny_models import make_tiny_model
from tideserve.bench.audit_logs import audit_logs

OUTPUT_TOKENS = 300
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
]

RESUMED = "tideserve_gateway_resumed_streams_total"

Answer = list[dict[str, Any]]


@pytest.fixture(scope="module", params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def logs(dtype: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(dtype)


@pytest.fixture(scope="module")
def cluster(dtype: str, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), seed=3, layers=4)
    with Cluster(
        model_dir=folder,
        memory="32MiB",
        dtype=dtype,
        services={"event_log": str(logs)},
        chunk_size="64KiB",
        overload_policy="recompute",  # groups do not change
    ) as running:
        yield running


async def chunks_of(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream; it must end as it should."""
    line = ""
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))
        elif line:
            assert line == "data: [DONE]"


async def ask(cluster: Cluster, number: int, note: Callable[[int], None] | None = None) -> Answer:
    """What a client gets of each choice. `note` is called with the tokens so far."""
    fields = KINDS[number]
    body = {
        "model": cluster.get("/v1/models")["data"][0]["id"],
        "prompt": prompt_of(number, 24),
        "max_tokens": OUTPUT_TOKENS,
        "stream": True,
        "return_token_ids": True,
        "ignore_eos": "structured_outputs" not in fields,
        **fields,
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
            for told in chunk["choices"]:
                one = choices[told["index"]]
                one["text"] += told["text"]
                one["ids"] += told["token_ids"] or []
                one["logprobs"] += (told["logprobs"] or {"token_logprobs": []})["token_logprobs"]
                one["finish"] = told["finish_reason"] or one["finish"]
                if note is not None:
                    note(len(one["ids"]))
    return choices


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Answer]:
    async def run() -> list[Answer]:
        return await asyncio.gather(*(ask(cluster, number) for number in range(len(KINDS))))

    return asyncio.run(run())


def kill(cluster: Cluster, name: str, engine: bool) -> int:
    """Kill a worker with its engine, or the engine alone; returns the worker's process id."""
    pid = cluster.pids()[name]
    worker = psutil.Process(pid)
    # The worker first, so that it cannot tell of the death of its engine.
    for process in [*([] if engine else [worker]), *worker.children(recursive=True)]:
        process.kill()
    return pid


def metric(cluster: Cluster, name: str) -> float:
    """A metric of the gateway."""
    lines = httpx.get(f"{cluster.url}/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(name)))


@pytest.mark.parametrize(
    ("at", "name", "engine"),
    [
        (1, "worker-0", True),
        (9, "worker-1", False),
        (70, "worker-0", False),
        (150, "worker-1", True),
    ],
)
def test_no_answer_shows_that_a_worker_was_killed(
    at: int, name: str, engine: bool, cluster: Cluster, undisturbed: list[Answer]
) -> None:
    killed: list[int] = []
    # Both get requests: the heartbeat of the scheduler counts those that report.
    cluster.eventually(lambda: metric(cluster, "tideserve_gateway_groups_serving") == 2)

    def note(tokens: int) -> None:
        if tokens >= at and not killed:
            killed.append(kill(cluster, name, engine))

    async def run() -> list[Answer]:
        return await asyncio.gather(*(ask(cluster, number, note) for number in range(len(KINDS))))

    answers = asyncio.run(run())
    for number, (answer, expected) in enumerate(zip(answers, undisturbed, strict=True)):
        for one, other in zip(answer, expected, strict=True):
            # The KV of prompts and that of decoded tokens are rounded differently in float32.
            assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-3)
            one["logprobs"] = other["logprobs"]
        assert answer == expected, f"{KINDS[number]} differs"
    cluster.wait_for_restart(name, killed[0])


def test_the_event_logs_hold_the_invariants(cluster: Cluster, logs: Path) -> None:
    """Also with the logs of killed engines: a segment is what its engine has emitted."""
    cluster.eventually(lambda: all(not row["running"] for row in cluster.workers()))
    assert metric(cluster, RESUMED) > 0, "nothing ran at the workers that were killed"
    findings = audit_logs(logs).findings
    assert findings.violations == []
    assert findings.checks["I5"] > OUTPUT_TOKENS
