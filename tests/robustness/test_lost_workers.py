"""Workers are killed while they stream; all outputs equal those of an undisturbed cluster.

Whole workers or engines alone are killed at several tokens. Outputs are greedy or sampled, with
penalties, a grammar, log probabilities or several choices.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.audit_logs import audit_logs
from tests.support.cluster import Cluster
from tests.support.disturbed_streams import (
    KINDS,
    OUTPUT_TOKENS,
    Answer,
    ask,
    both_serve,
    check_answers,
    kill,
)
from tests.support.tiny_models import make_tiny_model

RESUMED = "tideserve_gateway_resumed_streams_total"


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
        overload_policy="recompute",  # groups never change
    ) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Answer]:
    async def run() -> list[Answer]:
        return await asyncio.gather(*(ask(cluster, number) for number in range(len(KINDS))))

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("at", "name", "engine"),
    [
        (1, "worker-0", True),
        (9, "worker-1", False),
        (70, "worker-0", False),
        (150, "worker-1", True),
    ],
)
def test_killing_a_worker_changes_no_output(
    at: int, name: str, engine: bool, cluster: Cluster, undisturbed: list[Answer]
) -> None:
    killed: list[int] = []
    # Both get requests: the scheduler's heartbeat counts reporting workers.
    both_serve(cluster)

    def note(tokens: int) -> None:
        if tokens >= at and not killed:
            killed.append(kill(cluster, name, engine))

    async def run() -> list[Answer]:
        return await asyncio.gather(*(ask(cluster, number, note) for number in range(len(KINDS))))

    answers = asyncio.run(run())
    check_answers(answers, undisturbed)
    cluster.wait_for_restart(name, killed[0])


def test_the_event_logs_hold_the_invariants(cluster: Cluster, logs: Path) -> None:
    """Includes the logs of killed engines: a segment holds what its engine has emitted."""
    cluster.eventually(lambda: all(not row["running"] for row in cluster.workers()))
    assert cluster.metric(RESUMED) > 0, "nothing ran at the workers that were killed"
    findings = audit_logs(logs).findings
    assert findings.violations == []
    assert findings.checks["I5"] > OUTPUT_TOKENS
