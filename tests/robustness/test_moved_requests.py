"""Running requests are moved between real workers: their streams show nothing of it.

Streams of every kind of sampling, at several moments, with other parts of the cluster suspended or
killed meanwhile.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.audit_logs import audit_logs
from services.gateway.admin.guard import ADMIN_HEADER
from tests.support.cluster import Cluster
from tests.support.disturbed_streams import (
    OUTPUT_TOKENS,
    Answer,
    both_serve,
    check_answers,
    logged_cluster,
    metric,
    run_all,
)
from tideserve.cli.move import move

MOVED = "tideserve_gateway_moved_streams_total"
PATH = "/tideserve/v1/requests/move"
MOVES = 1000
ATTEMPTS = 5
"""On a loaded machine the streams may end before they can move."""
REMEMBERED_BYTES = 16 << 10
"""Of the transfers of a move, at all processes of both workers."""


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


def asked_to_move(cluster: Cluster, source: str, target: str) -> dict[str, Any]:
    """Move all running requests; returns the answer, which may be an error."""
    answer: dict[str, Any] = httpx.post(
        f"{cluster.admin_url}{PATH}",
        params={"source": source, "target": target},
        headers={ADMIN_HEADER: "1"},
        timeout=120,
    ).json()
    return answer


def disturbed(
    cluster: Cluster, at: int, *actions: Callable[[], object]
) -> tuple[list[Answer], float]:
    """Run `actions` beside the streams at token `at`; returns the answers and the moves."""
    both_serve(cluster)
    moved, threads = metric(cluster, MOVED), list[Thread]()

    def note(tokens: int) -> None:
        if tokens >= at and not threads:
            threads.extend(Thread(target=action) for action in actions)
            for thread in threads:
                thread.start()

    answers = run_all(cluster, note)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return answers, metric(cluster, MOVED) - moved


@pytest.mark.parametrize("at", [1, 40, 150])
def test_no_answer_shows_that_requests_moved(
    at: int, cluster: Cluster, undisturbed: list[Answer]
) -> None:
    orders: list[dict[str, Any]] = []
    answers, moved = disturbed(
        cluster, at, lambda: orders.append(asked_to_move(cluster, "worker-0", "worker-1"))
    )
    check_answers(answers, undisturbed)
    assert moved == orders[0]["moved"], orders


def test_requests_move_both_ways_at_once(cluster: Cluster, undisturbed: list[Answer]) -> None:
    orders: list[dict[str, Any]] = []
    answers, moved = disturbed(
        cluster,
        40,
        lambda: orders.append(asked_to_move(cluster, "worker-0", "worker-1")),
        lambda: orders.append(asked_to_move(cluster, "worker-1", "worker-0")),
    )
    check_answers(answers, undisturbed)
    assert moved == sum(row["moved"] for row in orders), orders


def test_the_command_says_why_nothing_moves(cluster: Cluster) -> None:
    both_serve(cluster)
    with pytest.raises(Exception, match="no further request can move now"):
        move(cluster.admin_url, None, "worker-0", None, None)
    with pytest.raises(Exception, match="no group with worker 'worker-7' serves"):
        move(cluster.admin_url, None, "worker-7", None, None)


@pytest.mark.parametrize("killed", ["worker-0", "worker-1"])
def test_a_worker_may_die_meanwhile(
    killed: str, cluster: Cluster, undisturbed: list[Answer]
) -> None:
    pids: list[int] = []
    answers, _ = disturbed(
        cluster,
        40,
        lambda: asked_to_move(cluster, "worker-0", "worker-1"),
        lambda: pids.append(cluster.kill(killed)),
    )
    check_answers(answers, undisturbed)
    cluster.wait_for_restart(killed, pids[0])


def test_streams_move_without_a_scheduler(cluster: Cluster, undisturbed: list[Answer]) -> None:
    process = psutil.Process(cluster.pids()["scheduler"])

    def suspend_and_move() -> None:
        process.suspend()
        asked_to_move(cluster, "worker-0", "worker-1")

    for _ in range(ATTEMPTS):
        try:
            answers, moved = disturbed(cluster, 60, suspend_and_move)
        finally:
            process.resume()
        check_answers(answers, undisturbed)
        if moved:
            return
    pytest.fail("no stream moved")


def test_the_memory_manager_may_die_meanwhile(cluster: Cluster, undisturbed: list[Answer]) -> None:
    pid = cluster.pids()["memmgr"]
    answers, _ = disturbed(
        cluster,
        40,
        lambda: asked_to_move(cluster, "worker-0", "worker-1"),
        lambda: cluster.kill("memmgr"),
    )
    check_answers(answers, undisturbed)
    cluster.wait_for_restart("memmgr", pid)


def test_the_event_logs_hold_the_invariants(cluster: Cluster, logs: Path) -> None:
    cluster.eventually(lambda: all(not row["running"] for row in cluster.workers()))
    assert metric(cluster, MOVED) > 0, "no stream moved"
    audited = audit_logs(logs)
    assert audited.findings.violations == [] and audited.differing == []
    assert audited.findings.checks["I5"] > OUTPUT_TOKENS and audited.findings.checks["I15"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_moves_between_two_workers(cluster: Cluster, undisturbed: list[Answer]) -> None:
    """All blocks are free afterwards, and memory has not grown beyond what is remembered.

    Ended transfers are remembered, up to a bound; `test_ten_thousand_moves_in_a_row` leaves them
    out.
    """
    both_serve(cluster)
    begun, held = metric(cluster, MOVED), list[tuple[float, int]]()

    def engines_bytes() -> int:
        pids = [pid for row in cluster.workers() for pid in row["pids"]]
        return sum(psutil.Process(pid).memory_info().rss for pid in pids)

    def move_to_and_fro(ended: Event) -> None:
        while not ended.is_set():
            asked_to_move(cluster, "worker-0", "worker-1")
            asked_to_move(cluster, "worker-1", "worker-0")

    while (moved := metric(cluster, MOVED) - begun) < MOVES:
        if moved >= MOVES / 2 and not held:
            held.append((moved, engines_bytes()))
        ended = Event()
        mover = Thread(target=move_to_and_fro, args=(ended,))
        mover.start()
        try:
            answers = run_all(cluster)
        finally:
            ended.set()
            mover.join(120)
        check_answers(answers, undisturbed)
    ((moved_then, bytes_then),) = held
    assert engines_bytes() - bytes_then < REMEMBERED_BYTES * (moved - moved_then)
    cluster.eventually(
        lambda: all(row["kv_blocks_free"] == row["kv_blocks_total"] for row in cluster.workers())
    )
