"""A cluster with the real vLLM as its engine, as seen by clients and operators.

It needs the environment of `tideserve engine install vllm`, and takes some minutes.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI

from benchmarks.systems.system import read_metrics
from tests.support.client import open_client, stream_completion
from tests.support.cluster import Cluster
from tests.support.waiting import eventually
from tideserve.cli.cache import cache_root
from tideserve.cli.vllm_install import installed_vllm

START_S = 900.0
MODEL = "SmolLM2-135M-Instruct"
LONG_PROMPT_TOKENS = 900
"""Tokens of a request; the worker has KV for two or three."""
BLOCK_SIZE = 16

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3 * START_S),
    pytest.mark.skipif(
        installed_vllm(cache_root()) is None, reason="needs `tideserve engine install vllm`"
    ),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(
        workers=1,
        memory="330MiB",
        dtype="bfloat16",
        engine="vllm",
        max_batch_tokens=512,
        queue_limit=2,
        ready_timeout=START_S,
        threads=1,  # more threads would spin on shared processors
        worker={"start_timeout_s": START_S, "drain_timeout_s": START_S},
    ) as running:
        yield running


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncOpenAI]:
    async with open_client(cluster.url) as opened:
        yield opened


async def at_rest(cluster: Cluster) -> None:
    """Wait until no request runs or waits, and all KV is free."""

    def idle() -> bool:
        (row,) = cluster.workers()
        busy = row["running"] or row["waiting"]
        return not busy and row["kv_blocks_free"] == row["kv_blocks_total"] > 0

    await eventually(idle)


async def long_answer(cluster: Cluster, number: int = 0, **options: Any) -> Any:
    return await stream_completion(
        cluster.url,
        prompt=[300 + number] * options.pop("prompt_tokens", 8),
        max_tokens=options.pop("max_tokens", 200),
        temperature=0.0,
        ignore_eos=True,
        **options,
    )


async def test_streamed_and_whole_responses(cluster: Cluster, client: AsyncOpenAI) -> None:
    asked: Any = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    whole = await client.completions.create(model=MODEL, **asked)
    text = whole.choices[0].text
    assert text.startswith(" Paris")
    stream = await client.completions.create(model=MODEL, **asked, stream=True)
    pieces = [chunk.choices[0].text async for chunk in stream if chunk.choices]
    assert "".join(pieces) == text and len(pieces) > 2
    await at_rest(cluster)


async def test_a_chat_ends_with_the_models_own_token(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Answer with one word: which animal barks?"}],
        temperature=0,
        max_tokens=200,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content and "<|im_end|>" not in choice.message.content


async def test_log_probabilities_and_stop_strings(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL,
        prompt="One, two, three, four, five,",
        max_tokens=24,
        temperature=0,
        logprobs=3,
        echo=True,
        stop=["eight"],
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop" and "eight" not in choice.text
    assert "six" in choice.text and choice.logprobs is not None
    numbers, best = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
    assert numbers is not None and best is not None
    assert all(-60 < number <= 0 for number in numbers[1:] if number is not None)
    assert all(len(row) >= 3 for row in best[1:])


@pytest.mark.parametrize(
    ("form", "fits"),
    [
        (
            {
                "json": {
                    "type": "object",
                    "properties": {"a": {"type": "integer", "maximum": 9}},
                    "required": ["a"],
                    "additionalProperties": False,
                }
            },
            lambda text: isinstance(json.loads(text)["a"], int),
        ),
        ({"regex": "[ab]{4}"}, lambda text: len(text) == 4 and set(text) <= set("ab")),
        ({"choice": ["tide", "ebb"]}, lambda text: text in ("tide", "ebb")),
    ],
)
async def test_output_formats(client: AsyncOpenAI, form: Any, fits: Any) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say something."}],
        max_tokens=48,
        temperature=1.0,
        seed=3,
        extra_body={"structured_outputs": form},
    )
    assert fits(answer.choices[0].message.content)


async def test_unsupported_fields_are_refused(client: AsyncOpenAI) -> None:
    with pytest.raises(APIStatusError) as refused:
        await client.completions.create(
            model=MODEL, prompt="a", max_tokens=4, extra_body={"bad_words": ["the sea"]}
        )
    assert refused.value.status_code == 400
    assert "logit_bias" in str(refused.value)


async def test_the_engine_is_shown_in_the_status(cluster: Cluster) -> None:
    (row,) = cluster.workers()
    assert (row["engine"], row["can_merge"], row["shape"]) == ("vllm", False, None)
    assert 0 < row["parameter_bytes"] < row["budget_bytes"]


async def test_an_abort_frees_its_kv(cluster: Cluster) -> None:
    begun = asyncio.Event()

    async def note(_chunks: int) -> None:
        begun.set()

    running = asyncio.create_task(long_answer(cluster, max_tokens=1500, on_chunk=note))
    await begun.wait()
    await eventually(lambda: cluster.workers()[0]["running"] == 1)
    running.cancel()
    await asyncio.wait([running])
    await at_rest(cluster)


async def test_overload_is_refused_with_retry_after(cluster: Cluster) -> None:
    async def ask(number: int) -> str:
        try:
            await long_answer(cluster, number, prompt_tokens=LONG_PROMPT_TOKENS, max_tokens=64)
        except APIStatusError as error:
            assert error.status_code == 503
            assert int(error.response.headers["retry-after"]) >= 1
            return "refused"
        return "served"

    outcomes = await asyncio.gather(*map(ask, range(10)))
    assert {"refused", "served"} == set(outcomes)
    await at_rest(cluster)


def metrics_of_the_worker(cluster: Cluster) -> dict[str, float]:
    targets = json.loads((cluster.folder / "cluster" / "prometheus_targets.json").read_text())
    (targets_of_worker,) = [
        target["targets"] for target in targets if target["labels"]["process"] == "worker-0"
    ]
    return read_metrics(f"http://{targets_of_worker[0]}")


async def test_a_repeated_prompt_is_cached(cluster: Cluster, client: AsyncOpenAI) -> None:
    before = metrics_of_the_worker(cluster)
    cached = []
    for _ in range(2):
        answer = await client.completions.create(
            model=MODEL, prompt=[700] * LONG_PROMPT_TOKENS, max_tokens=4, temperature=0
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    await at_rest(cluster)
    assert cached == [0, (LONG_PROMPT_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE]
    after = metrics_of_the_worker(cluster)
    queries, hits = [
        after[name] - before[name]
        for name in ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    ]
    assert (queries, hits) == (2 * LONG_PROMPT_TOKENS, cached[1])


async def test_metrics_are_those_of_any_worker(cluster: Cluster) -> None:
    metrics = metrics_of_the_worker(cluster)
    assert metrics["tideserve_worker_kv_blocks_total"] > 0
    assert metrics["vllm:num_requests_running"] == 0
    assert metrics["vllm:prompt_tokens_total"] > LONG_PROMPT_TOKENS


def children_of(pid: int) -> list[int]:
    """vLLM's compute process, and the tracker of shared resources."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(pid_text) for pid_text in listed]


def computing_process(pid: int) -> int:
    """vLLM's compute process, a child of the engine process `pid`."""
    (child,) = [
        child_pid
        for child_pid in children_of(pid)
        if b"resource_tracker" not in Path(f"/proc/{child_pid}/cmdline").read_bytes()
    ]
    return child


def runs(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.parametrize("which", ["computing", "adapter"])
async def test_a_killed_vllm_restarts_and_its_request_continues(
    cluster: Cluster, which: str
) -> None:
    begun = asyncio.Event()

    async def note(_chunks: int) -> None:
        begun.set()

    running = asyncio.create_task(long_answer(cluster, max_tokens=1500, on_chunk=note))
    await begun.wait()
    servicer, adapter = cluster.workers()[0]["pids"]
    computing = computing_process(adapter)
    others = children_of(adapter)
    os.kill(computing if which == "computing" else adapter, signal.SIGKILL)
    await asyncio.to_thread(cluster.wait_for_restart, "worker-0", servicer)
    await eventually(lambda: not any(map(runs, (adapter, *others))))
    await asyncio.to_thread(cluster.eventually, lambda: cluster.get("/ready"), START_S)
    assert (await running).completion_tokens == 1500
    assert (await long_answer(cluster, max_tokens=8)).completion_tokens == 8


async def test_a_stopping_worker_finishes_its_requests(cluster: Cluster) -> None:
    begun = asyncio.Event()

    async def note(_chunks: int) -> None:
        begun.set()

    running = asyncio.create_task(long_answer(cluster, max_tokens=100, on_chunk=note))
    await begun.wait()
    cluster.kill("worker-0", signal.SIGTERM)
    assert (await running).completion_tokens == 100
