"""The policy static-pipeline: workers are merged from the start and split only on request."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.client import Answer, gather_bounded, numbered_completion
from tests.support.cluster import Cluster
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually
from tideserve.cli.groups import restore

STREAMS = 24
SPLIT_DWELL_S = 0.2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), seed=3, layers=4)
    with Cluster(
        model_dir=folder,
        memory="16MiB",
        dtype="float64",
        chunk_size="64KiB",
        overload_policy="static-pipeline",
        memmgr={"split_dwell_s": SPLIT_DWELL_S},
    ) as running:
        yield running


def sizes(cluster: Cluster) -> list[int]:
    groups = cluster.status()["groups"]
    return [0] if any(g["changing"] for g in groups) else [len(g["members"]) for g in groups]


def decisions(cluster: Cluster) -> list[tuple[Any, Any]]:
    return [(row["action"], row["cause"]) for row in cluster.status()["decisions"]]


async def answers(cluster: Cluster) -> list[Answer]:
    jobs = [
        lambda number=number: numbered_completion(
            cluster.url, number, prompt_tokens=24, max_tokens=96
        )
        for number in range(STREAMS)
    ]
    return await gather_bounded(jobs, STREAMS)


async def test_workers_are_merged_at_the_start_and_split_only_on_request(cluster: Cluster) -> None:
    await eventually(lambda: sizes(cluster) == [2])
    merged = await answers(cluster)
    assert sum(worker["pipeline_busy_s"] > 0 for worker in cluster.workers()) == 2
    # Demand is low for far longer than a split would wait.
    await asyncio.sleep(10 * SPLIT_DWELL_S)
    assert sizes(cluster) == [2]
    assert decisions(cluster) == [("merge", "start")]

    await asyncio.to_thread(restore, cluster.admin_url, None, None, None)
    await eventually(lambda: sizes(cluster) == [1, 1])
    single = await answers(cluster)
    assert [answer.text for answer in single] == [answer.text for answer in merged]
    assert decisions(cluster) == [("merge", "start"), ("restore", "manual")]
    assert sizes(cluster) == [1, 1]
