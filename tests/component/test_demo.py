"""The demo against a server that answers like a gateway."""

import io
from collections.abc import Iterator

import pytest

from tests.support.fake_openai import FakeOpenAI, fake_openai
from tideserve.cli.demo import MODEL_NAME, shown, watch
from tideserve.cli.demo_state import Score
from tideserve.cli.report import Report
from tideserve.cli.status import STATUS_PATH
from tideserve.load.client import Job
from tideserve.load.workload import PlannedRequest

STATUS = {
    "services": [],
    "workers": [
        {
            "id": "worker-0",
            "parameter_bytes": 60,
            "kv_blocks_total": 4,
            "kv_blocks_free": 1,
            "kv_used_bytes": 30,
            "kv_free_bytes": 10,
            "preemptions_total": 3,
            "running": 2,
            "block_size": 1,
            "arena_bytes": 100,
            "shape": {"num_layers": 2, "kv_bytes": 5},
        }
    ],
    "groups": [{"id": "g", "epoch": 1, "members": ["worker-0"], "layers": [[0, 2]]}],
    "decisions": [],
}


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    with fake_openai({9: 500}) as running:
        running.pages[STATUS_PATH] = STATUS
        yield running


def job(url: str, *first_ids: int) -> Job:
    requests = tuple(PlannedRequest(0.3, (first, 1), 4, first) for first in first_ids)
    return Job((url,), MODEL_NAME, requests, 20.0)


async def test_requests_are_sent_and_the_cluster_is_shown(server: FakeOpenAI) -> None:
    screen = io.StringIO()
    scores = [Score("recompute", 1, completed=1)]
    with shown(Report(screen)) as show:
        await watch(job(server.url, 300, 301, 9), server.url, "drop", scores, show)
    score = scores[1]
    assert (score.planned, score.completed, score.failed) == (3, 2, 1)
    assert score.ttft_p50_s is not None and score.preemptions == 3 and score.merges == 0
    first = screen.getvalue().splitlines()[0]
    assert first.startswith("drop ")
    assert "worker-0 parameters 60% KV in use 30% free 10%" in first
    assert "groups worker-0 (all layers)" in first


async def test_the_demo_continues_without_a_cluster_status() -> None:
    scores: list[Score] = []
    with fake_openai() as server, shown(Report(io.StringIO())) as show:
        await watch(job(server.url, 300), server.url, "drop", scores, show)
    assert scores[0].completed == 1
