"""All streams run at one of two workers and outgrow its KV cache: they move before any merge."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.client import Answer, gather_bounded, numbered_completion
from tests.support.cluster import Cluster
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually
from tideserve.cli.errors import CommandError
from tideserve.cli.move import move

PROMPT_TOKENS, OUTPUT_TOKENS = 24, 300
AT_REST = 4  # requests at once that nothing disturbs
SHARE = 1.4
"""KV of all streams at their ends, over the KV cache of a worker."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), seed=3, layers=4)
    with Cluster(
        model_dir=folder,
        memory="16MiB",
        dtype="float64",
        chunk_size="64KiB",
        scheduler={"lateness": 0.0},
        memmgr={"rebalance": "stuck"},
    ) as running:
        yield running


async def ask(cluster: Cluster, number: int, begun: set[int]) -> Answer:
    async def note(_chunks: int) -> None:
        begun.add(number)

    return await numbered_completion(
        *(cluster.url, number),
        prompt_tokens=PROMPT_TOKENS,
        max_tokens=OUTPUT_TOKENS,
        ignore_eos=True,
        on_chunk=note,
    )


async def test_streams_move_away_from_a_full_worker(cluster: Cluster) -> None:
    capacity = min(row["kv_blocks_total"] for row in cluster.workers()) * 16
    count = round(SHARE * capacity / (PROMPT_TOKENS + OUTPUT_TOKENS))
    jobs = [lambda number=number: ask(cluster, number, set()) for number in range(count)]
    undisturbed = await gather_bounded(jobs, AT_REST)
    begun = set[int]()
    streams = [asyncio.create_task(ask(cluster, number, begun)) for number in range(count)]
    await eventually(lambda: len(begun) == count)
    await asyncio.to_thread(gather_at, cluster, "worker-0")
    answers = await asyncio.gather(*streams)
    assert answers == undisturbed
    decisions = cluster.status()["decisions"]
    moves = [row for row in decisions if (row["action"], row["cause"]) == ("move", "full")]
    assert moves and all(row["group_ids"][0] == "group-worker-0" for row in moves)
    assert "merge" not in {row["action"] for row in decisions}, "a move was enough"
    assert all(len(group["members"]) == 1 for group in cluster.status()["groups"])


def gather_at(cluster: Cluster, target: str) -> None:
    """Move all requests to a worker; a worker without requests has none to move."""
    (source,) = [row["id"] for row in cluster.workers() if row["id"] != target]
    try:
        move(cluster.admin_url, None, source, target, None)
    except CommandError as error:
        raise AssertionError(str(error)) from error
