"""Workers of two versions in a cluster: no KV moves between them, and no stream is lost."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest

from tests.support.cluster import REPOSITORY, Cluster
from tests.support.disturbed_streams import (
    ATTEMPTS,
    Answer,
    asked_to_move,
    both_serve,
    check_answers,
    disturbed,
    logged_cluster,
    run_all,
)

RESUMED = "tideserve_gateway_resumed_streams_total"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages, in which the test modifies a file of the worker."""
    copy = tmp_path_factory.mktemp("tree")
    for package in ("services", "tideserve"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, copy / package, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def cluster(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, logs = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("events")
    with logged_cluster(folder, logs, tree=tree) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Answer]:
    return run_all(cluster)


def upgrade_second(cluster: Cluster, tree: Path) -> None:
    """Restart the second worker with a newer version of the code."""
    with (tree / "services/worker/errors.py").open("a") as source:
        source.write("\n# A newer version.\n")
    cluster.wait_for_restart("worker-1", cluster.kill("worker-1", SIGTERM))
    both_serve(cluster)


def test_a_worker_of_another_version_gets_no_kv(
    cluster: Cluster, tree: Path, undisturbed: list[Answer]
) -> None:
    upgrade_second(cluster, tree)
    orders: list[dict[str, Any]] = []
    answers, moved = disturbed(
        cluster, 40, lambda: orders.append(asked_to_move(cluster, "worker-0", "worker-1"))
    )
    check_answers(answers, undisturbed)
    assert moved == 0 and "do not run the same version of the code" in str(orders[0])


def test_a_drained_worker_returns_streams_to_the_newer_version_without_kv(
    cluster: Cluster, tree: Path, undisturbed: list[Answer]
) -> None:
    resumed, pids = cluster.metric(RESUMED), list[int]()
    for _ in range(ATTEMPTS):
        answers, moved = disturbed(
            cluster, 40, lambda: pids.append(cluster.kill("worker-0", SIGTERM))
        )
        check_answers(answers, undisturbed)
        cluster.wait_for_restart("worker-0", pids[-1])
        assert moved == 0
        if cluster.metric(RESUMED) > resumed:
            return
        upgrade_second(cluster, tree)
    pytest.fail("no stream was resumed")


def test_kv_moves_again_after_both_upgrades(cluster: Cluster, undisturbed: list[Answer]) -> None:
    for _ in range(ATTEMPTS):
        answers, moved = disturbed(
            cluster, 40, lambda: asked_to_move(cluster, "worker-0", "worker-1")
        )
        check_answers(answers, undisturbed)
        if moved > 0:
            break
    assert moved > 0
