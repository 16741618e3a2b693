"""A member of a merged group is killed or suspended; all streams continue unchanged.

Survivors recompute their own requests; requests of a dead leader are resumed by the gateway.
"""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Thread, Timer
from urllib.error import HTTPError

import psutil
import pytest

from benchmarks.audit_logs import audit_logs
from tests.support.cluster import Cluster
from tests.support.disturbed_streams import (
    Answer,
    apart,
    check_answers,
    kill,
    logged_cluster,
    merge,
    run_all,
)

STOPPED_S = 12.0
"""Longer than the deadline of a stalled microbatch and than a member's allowed silence."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def cluster(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with logged_cluster(tmp_path_factory.mktemp("model"), logs) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Answer]:
    return run_all(cluster)


def stop(cluster: Cluster, name: str) -> None:
    """Suspend the engine of a worker for a while."""
    for process in psutil.Process(cluster.pids()[name]).children(recursive=True):
        process.suspend()
        Timer(STOPPED_S, process.resume).start()


@pytest.mark.parametrize("role", [0, 1], ids=["leader", "follower"])
@pytest.mark.parametrize("fault", ["worker", "engine", "stop"])
def test_losing_a_member_changes_no_output(
    fault: str, role: int, cluster: Cluster, undisturbed: list[Answer]
) -> None:
    name = merge(cluster)[role]
    before = cluster.pids()
    hit: list[str] = []

    def note(tokens: int) -> None:
        if tokens >= 60 and not hit:
            hit.append(name)
            if fault == "stop":
                stop(cluster, name)
            else:
                kill(cluster, name, engine=fault == "engine")

    check_answers(run_all(cluster, note), undisturbed)
    cluster.eventually(lambda: apart(cluster), deadline_s=120)
    assert hit, "nothing was disturbed"
    lived = {name for name, pid in cluster.pids().items() if before[name] == pid}
    died = {name} if fault != "stop" else set()
    assert lived == before.keys() - died, "no process ends because of another one"


def lost_its_groups(cluster: Cluster) -> bool:
    """Whether the gateway is not ready because the scheduler sees no group serving."""
    try:
        cluster.get("/ready")
    except HTTPError as error:
        assert error.code == 503
        missing = json.loads(error.read())["missing"]
        return any(cause.startswith("the scheduler sees 0 of") for cause in missing)
    return False


def test_without_etcd_no_request_is_sent_to_a_group_that_lost_a_member(
    cluster: Cluster, undisturbed: list[Answer]
) -> None:
    leader, follower = merge(cluster)
    line = "etcd does not respond: its requests are aborted"
    before = cluster.log(leader).count(line)
    aborted: list[bool] = []

    def await_the_gateway() -> None:
        """Resume etcd once the gateway reports that no group serves."""
        try:
            cluster.eventually(lambda: lost_its_groups(cluster), deadline_s=120)
            aborted.append(cluster.log(leader).count(line) > before)
        finally:
            cluster.kill("etcd", signal.SIGCONT)

    waiting = Thread(target=await_the_gateway)

    def note(tokens: int) -> None:
        if tokens >= 60 and waiting.ident is None:
            cluster.kill("etcd", signal.SIGSTOP)
            kill(cluster, follower, engine=False)
            waiting.start()

    check_answers(run_all(cluster, note), undisturbed)
    waiting.join()
    assert aborted == [True]
    cluster.eventually(lambda: apart(cluster), deadline_s=120)


def test_the_event_logs_hold_the_invariants(cluster: Cluster, logs: Path) -> None:
    cluster.eventually(lambda: all(not row["running"] for row in cluster.workers()))
    findings = audit_logs(logs).findings
    assert findings.violations == []
    assert findings.checks["I4"] > 0 and findings.checks["I5"] > 0
