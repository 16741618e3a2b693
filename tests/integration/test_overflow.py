"""Requests that need three times the KV cache: all complete, with unchanged outputs.

Under the policy `recompute` the newest are preempted; under `drop` the workers merge, use the
memory of dropped layers to keep all requests running, and split again afterwards. Stop strings are
detected, and end their requests, while workers merge and split.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.client import Answer, gather_bounded, numbered_completion
from tests.support.cluster import Cluster
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually
from tideserve.cli.groups import drop, restore

AT_REST = 5  # concurrent undisturbed requests: a worker can hold them all
STREAMS = 64
PROMPT_TOKENS = 24
OUTPUT_TOKENS = 160
BLOCK_SIZE = 16
REQUEST_BLOCKS = -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE)
MEMORY_MIB = 16


@pytest.fixture(scope="module", params=["recompute", "drop"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, policy: str) -> Iterator[Cluster]:
    # An even number of layers: uneven stages of so few layers would gain nothing.
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), seed=3, layers=4)
    with Cluster(
        model_dir=folder,
        memory=f"{MEMORY_MIB}MiB",
        dtype="float64",
        chunk_size="64KiB",
        overload_policy=policy,
        # No queueing deadline.
        scheduler={"lateness": 0.0},
        memmgr={"split_dwell_s": 1.0},
    ) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed() -> list[Answer]:
    """The outputs of undisturbed requests, filled in by the first test."""
    return []


async def ask(cluster: Cluster, number: int, **options: Any) -> Answer:
    return await numbered_completion(
        cluster.url, number, prompt_tokens=PROMPT_TOKENS, max_tokens=OUTPUT_TOKENS, **options
    )


class Answering:
    """Counts the streams that are generating; `most` is their largest number."""

    def __init__(self) -> None:
        self.most = 0
        self._now = 0

    async def answer(self, cluster: Cluster, number: int) -> Answer:
        async def note(chunks: int) -> None:
            if chunks == 1:
                self._now += 1
                self.most = max(self.most, self._now)

        try:
            return await ask(cluster, number, on_chunk=note)
        finally:
            self._now -= 1


async def run_all(cluster: Cluster, at_once: int) -> tuple[list[Answer], int]:
    """Run all requests; returns their outputs, and how many generated concurrently at most."""
    answering = Answering()
    jobs = [lambda number=number: answering.answer(cluster, number) for number in range(STREAMS)]
    return await gather_bounded(jobs, at_once), answering.most


def actions(cluster: Cluster) -> list[str]:
    """The memory manager's decisions so far."""
    return [decision["action"] for decision in cluster.status()["decisions"]]


async def test_a_flood_of_three_times_the_kv_cache(
    cluster: Cluster, policy: str, undisturbed: list[Answer]
) -> None:
    blocks = cluster.kv_blocks("kv_blocks_total")
    demand = STREAMS * REQUEST_BLOCKS
    assert demand >= 3 * blocks, f"{demand} blocks wanted, {blocks} there: no flood"
    assert blocks // 2 >= AT_REST * REQUEST_BLOCKS, "one of the two workers could overflow"

    if not undisturbed:
        undisturbed += (await run_all(cluster, at_once=AT_REST))[0]
    assert cluster.kv_blocks("preemptions_total") == 0, "the reference run was disturbed"
    flooded, most_answering = await run_all(cluster, at_once=STREAMS)

    assert [answer.completion_tokens for answer in flooded] == [OUTPUT_TOKENS] * STREAMS
    assert [answer.text for answer in flooded] == [answer.text for answer in undisturbed]
    assert most_answering > 8
    if policy == "recompute":
        assert cluster.kv_blocks("preemptions_total") > 0
        assert "merge" not in actions(cluster)
        assert not any(worker["pipeline_busy_s"] for worker in cluster.workers())
    else:
        assert "merge" in actions(cluster)
        await eventually(lambda: "restore" in actions(cluster))
        await eventually(lambda: len(cluster.status()["groups"]) == 2)
        for worker in cluster.workers():
            assert worker["pipeline_busy_s"] > 0 and worker["pipeline_bubble_s"] > 0
    await eventually(lambda: cluster.kv_blocks("kv_blocks_free") == blocks)
    cluster.check_memory(budget_bytes=MEMORY_MIB * 2**20)


def stop_string_of(answer: Answer, after: int) -> str:
    """A printable substring that first occurs after `after` characters."""
    text = answer.text
    pieces = ((at, text[at : at + 6]) for at in range(after, len(text) - 5))
    return next(piece for at, piece in pieces if piece.isprintable() and text.find(piece) == at)


async def test_stop_strings_are_detected_while_workers_merge_and_split(
    cluster: Cluster, policy: str, undisturbed: list[Answer]
) -> None:
    if policy != "drop":
        pytest.skip("nothing merges under this policy")
    blocks = cluster.kv_blocks("kv_blocks_total")
    stops = {number: stop_string_of(undisturbed[number], 30 * number) for number in range(8)}
    begun = asyncio.Barrier(len(stops) + 1)

    async def stopped(number: int) -> Answer:
        async def wait_for_all(chunks: int) -> None:
            if chunks == 1:
                await begun.wait()

        return await ask(cluster, number, stop=[stops[number]], on_chunk=wait_for_all)

    answers = [asyncio.create_task(stopped(number)) for number in stops]
    await begun.wait()
    await asyncio.to_thread(drop, cluster.admin_url, None, [])
    await asyncio.to_thread(restore, cluster.admin_url, None, None)
    for answer, (number, stop) in zip(await asyncio.gather(*answers), stops.items(), strict=True):
        assert answer.finish_reason == "stop"
        assert answer.text == undisturbed[number].text.split(stop)[0]
    await eventually(lambda: len(cluster.status()["groups"]) == 2)
    await eventually(lambda: cluster.kv_blocks("kv_blocks_free") == blocks)
