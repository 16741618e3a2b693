"""A worker of a merged group stops while requests run; their outputs do not change.

As in a rolling restart during a flood: other workers continue, and a new process replaces it.
"""

import asyncio
import signal
from collections.abc import Iterator

import pytest

from tests.support.client import Answer, numbered_completion
from tests.support.cluster import Cluster
from tests.support.disturbed_streams import apart
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually
from tideserve.cli.groups import drop

STREAMS = 8
PROMPT_TOKENS = 24
OUTPUT_TOKENS = 400


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), seed=3, layers=4)
    with Cluster(
        model_dir=folder,
        memory="32MiB",
        dtype="float64",
        chunk_size="64KiB",
        overload_policy="recompute",  # groups change only on request or for a leaving worker
    ) as running:
        yield running


async def ask(cluster: Cluster, number: int, begun: asyncio.Barrier | None = None) -> Answer:
    async def wait_for_all(chunks: int) -> None:
        if chunks == 1 and begun is not None:
            await begun.wait()

    return await numbered_completion(
        cluster.url,
        number,
        prompt_tokens=PROMPT_TOKENS,
        max_tokens=OUTPUT_TOKENS,
        on_chunk=wait_for_all,
    )


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Answer]:
    async def run() -> list[Answer]:
        return await asyncio.gather(*(ask(cluster, number) for number in range(STREAMS)))

    return asyncio.run(run())


@pytest.mark.parametrize("name", ["worker-0", "worker-1"])
def test_a_stopping_worker_leaves_its_group_first(
    name: str, cluster: Cluster, undisturbed: list[Answer]
) -> None:
    async def run() -> None:
        await eventually(lambda: apart(cluster))
        begun = asyncio.Barrier(STREAMS + 1)
        answers = [asyncio.create_task(ask(cluster, n, begun)) for n in range(STREAMS)]
        await asyncio.to_thread(drop, cluster.admin_url, None, [])
        await begun.wait()
        (group,) = cluster.status()["groups"]
        assert name in group["members"]
        pid = cluster.kill(name, signal.SIGTERM)
        texts = [answer.text for answer in await asyncio.gather(*answers)]
        assert texts == [answer.text for answer in undisturbed]
        await asyncio.to_thread(cluster.wait_for_restart, name, pid)
        causes = [decision["cause"] for decision in cluster.status()["decisions"]]
        assert "draining" in causes

    asyncio.run(run())
