"""Workers stop while they stream; their streams continue at others without a change.

Streams use every kind of sampling; workers stop at several tokens, while other parts of the cluster
are suspended or killed.
"""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.audit_logs import audit_logs
from tests.support.cluster import Cluster
from tests.support.disturbed_streams import (
    OUTPUT_TOKENS,
    Answer,
    both_serve,
    check_answers,
    logged_cluster,
    run_all,
)

RESUMED = "tideserve_gateway_resumed_streams_total"
SHIPPED = "tideserve_gateway_moved_streams_total"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def cluster(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with logged_cluster(tmp_path_factory.mktemp("model"), logs) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Answer]:
    return run_all(cluster)


def drained(
    cluster: Cluster,
    names: list[str],
    at: int,
    also: Callable[[], object] = lambda: None,
    all_begun: bool = False,
) -> tuple[list[Answer], float]:
    """Stop workers at token `at`, after `also`; returns outputs, and the number of resumptions.

    `all_begun`: after the first token of each stream.
    """
    both_serve(cluster)
    resumed, stopped = cluster.metric(RESUMED), dict[str, int]()

    def note(tokens: int) -> None:
        if tokens >= at and not stopped:
            also()
            stopped.update({name: cluster.kill(name, signal.SIGTERM) for name in names})

    answers = run_all(cluster, note, all_begun=all_begun)
    for name, pid in stopped.items():
        cluster.wait_for_restart(name, pid)
    return answers, cluster.metric(RESUMED) - resumed


@pytest.mark.parametrize(("at", "name"), [(1, "worker-0"), (40, "worker-1"), (150, "worker-0")])
def test_draining_a_worker_changes_no_output(
    at: int, name: str, cluster: Cluster, undisturbed: list[Answer]
) -> None:
    answers, _ = drained(cluster, [name], at)
    check_answers(answers, undisturbed)


@pytest.mark.parametrize("suspended", ["scheduler", "memmgr"])
def test_streams_complete_without_a_control_plane(
    suspended: str, cluster: Cluster, undisturbed: list[Answer]
) -> None:
    """Without a scheduler, streams finish at the draining worker."""
    process = psutil.Process(cluster.pids()[suspended])
    try:
        # Without a scheduler a stream that has not begun would be refused.
        answers, resumed = drained(cluster, ["worker-0"], 20, process.suspend, all_begun=True)
    finally:
        process.resume()
    check_answers(answers, undisturbed)
    assert suspended == "memmgr" or not resumed


def test_all_workers_may_drain_together(cluster: Cluster, undisturbed: list[Answer]) -> None:
    answers, _ = drained(cluster, ["worker-0", "worker-1"], 20)
    check_answers(answers, undisturbed)


def test_the_other_worker_may_die_meanwhile(cluster: Cluster, undisturbed: list[Answer]) -> None:
    killed: list[int] = []

    def kill_other() -> None:
        killed.append(cluster.kill("worker-1"))

    answers, _ = drained(cluster, ["worker-0"], 20, kill_other)
    check_answers(answers, undisturbed)
    cluster.wait_for_restart("worker-1", killed[0])


def test_the_event_logs_hold_the_invariants(cluster: Cluster, logs: Path) -> None:
    """Includes the logs of drained engines, which replay."""
    cluster.eventually(lambda: all(not row["running"] for row in cluster.workers()))
    assert cluster.metric(SHIPPED) > 0, "no stream moved with its KV"
    audited = audit_logs(logs)
    assert audited.findings.violations == [] and audited.differing == []
    assert audited.findings.checks["I5"] > OUTPUT_TOKENS and audited.findings.checks["I15"]


def test_a_worker_stops_soon_if_its_gateway_dies(cluster: Cluster) -> None:
    pids = cluster.pids()
    with pytest.raises(httpx.HTTPError):
        drained(cluster, ["worker-0"], 20, lambda: cluster.kill("gateway"))
    for name in ("gateway", "worker-0"):
        cluster.wait_for_restart(name, pids[name])
    both_serve(cluster)
