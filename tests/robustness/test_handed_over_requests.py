"""A real cluster computes prompts and outputs at different workers without changing outputs.

A worker is killed meanwhile. Outputs are compared with a cluster of mixed workers.
"""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from benchmarks.audit_logs import audit_logs
from tests.support.cluster import Cluster
from tests.support.disturbed_streams import (
    ATTEMPTS,
    MOVED,
    OUTPUT_TOKENS,
    Answer,
    both_serve,
    check_answers,
    disturbed,
    logged_cluster,
    run_all,
)

MIN_TOKENS = 20
"""Prompts have 24 tokens."""
STREAMS_MIN = 6
"""Of eleven in each run. Some decode where they start: without room or an answer at the target."""
salts = count()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def cluster(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with logged_cluster(
        tmp_path_factory.mktemp("model"),
        logs,
        roles="prefill=1,decode=1",
        scheduler={"hand_over_min_tokens": MIN_TOKENS},
    ) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    folder, logs = (tmp_path_factory.mktemp(name) for name in ("model", "other-events"))
    with logged_cluster(folder, logs) as mixed:
        both_serve(mixed)
        return run_all(mixed)


def have_roles(cluster: Cluster) -> bool:
    return sorted(row["role"] for row in cluster.workers()) == ["decode", "prefill"]


def worker_with(cluster: Cluster, role: str) -> str:
    return next(str(row["id"]) for row in cluster.workers() if row["role"] == role)


def handed(cluster: Cluster, at: int, *actions: Callable[[], object]) -> tuple[list[Answer], float]:
    """Streams with uncached prompts; see `disturbed`."""
    cluster.eventually(lambda: have_roles(cluster), deadline_s=60)
    return disturbed(cluster, at, *actions, more={"cache_salt": f"run {next(salts)}"})


def test_hand_overs_change_no_output(cluster: Cluster, undisturbed: list[Answer]) -> None:
    moved = 0.0
    for _ in range(ATTEMPTS):
        answers, more = handed(cluster, OUTPUT_TOKENS)
        check_answers(answers, undisturbed)
        moved += more
        if moved >= STREAMS_MIN:
            break
    assert moved >= STREAMS_MIN

    def handed_over(role: str) -> int:
        return sum(row["handed_over_total"] for row in cluster.workers() if row["role"] == role)

    cluster.eventually(lambda: handed_over("prefill") >= moved)
    assert handed_over("decode") == 0


@pytest.mark.parametrize(
    ("role", "at"),
    [
        ("decode", 1),
        ("prefill", 1),
        pytest.param("decode", 60, marks=pytest.mark.slow),
        pytest.param("prefill", 60, marks=pytest.mark.slow),
    ],
)
def test_a_worker_may_die_meanwhile(
    role: str, at: int, cluster: Cluster, undisturbed: list[Answer]
) -> None:
    cluster.eventually(lambda: have_roles(cluster), deadline_s=60)
    name, pids = worker_with(cluster, role), list[int]()
    answers, _ = handed(cluster, at, lambda: pids.append(cluster.kill(name)))
    check_answers(answers, undisturbed)
    cluster.wait_for_restart(name, pids[0])


def test_the_event_logs_hold_the_invariants(cluster: Cluster, logs: Path) -> None:
    both_serve(cluster)  # the log of a killed worker is complete once its successor has one
    cluster.eventually(lambda: all(not row["running"] for row in cluster.workers()))
    assert cluster.metric(MOVED) > 0
    audited = audit_logs(logs)
    assert audited.findings.violations == [] and audited.differing == []
    assert audited.findings.checks["I5"] > OUTPUT_TOKENS and audited.findings.checks["I15"]
