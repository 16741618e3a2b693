"""Running requests move between real workers without changing their outputs.

Streams use every kind of sampling; they move at several tokens, while other parts of the cluster
are suspended or killed.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from signal import SIGTERM
from threading import Event, Thread
from time import sleep
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.audit_logs import audit_logs
from tests.support.cluster import Cluster
from tests.support.disturbed_streams import (
    ATTEMPTS,
    MOVED,
    OUTPUT_TOKENS,
    Answer,
    asked_to_move,
    both_serve,
    check_answers,
    disturbed,
    logged_cluster,
    run_all,
)
from tideserve.cli.move import move

MOVES = 1000
LONG_TOKENS = 800
"""Output tokens of streams that move several times."""
WARM_UP_MOVES = 1000
"""Moves before memory is measured: ended transfers are remembered for up to two minutes, and
allocators reach their peaks. The second 500 moves still grow what the third do not.
"""
GROWTH_BYTES = 1 << 10
"""Growth of each process per move, and of all processes of both workers together."""
REST_S = 25.0
"""Pause before memory is measured: lanes free buffers unused for 20 s."""
PAUSE_S = 0.2
"""Pause before requests move back."""


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


@pytest.mark.parametrize("at", [1, 40, 150])
def test_moves_change_no_output(at: int, cluster: Cluster, undisturbed: list[Answer]) -> None:
    orders: list[dict[str, Any]] = []
    answers, moved = disturbed(
        cluster, at, lambda: orders.append(asked_to_move(cluster, "worker-0", "worker-1"))
    )
    check_answers(answers, undisturbed)
    assert moved == orders[0]["moved"], orders


def test_requests_move_both_ways_concurrently(cluster: Cluster, undisturbed: list[Answer]) -> None:
    orders: list[dict[str, Any]] = []
    answers, moved = disturbed(
        cluster,
        40,
        lambda: orders.append(asked_to_move(cluster, "worker-0", "worker-1")),
        lambda: orders.append(asked_to_move(cluster, "worker-1", "worker-0")),
    )
    check_answers(answers, undisturbed)
    assert moved == sum(row["moved"] for row in orders), orders


def test_the_command_reports_why_no_request_moves(cluster: Cluster) -> None:
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


def test_the_target_may_leave_meanwhile(cluster: Cluster, undisturbed: list[Answer]) -> None:
    pids: list[int] = []
    answers, _ = disturbed(
        cluster,
        40,
        lambda: asked_to_move(cluster, "worker-0", "worker-1"),
        lambda: pids.append(cluster.kill("worker-1", SIGTERM)),
    )
    check_answers(answers, undisturbed)
    cluster.wait_for_restart("worker-1", pids[0])


def test_streams_move_without_a_scheduler(cluster: Cluster, undisturbed: list[Answer]) -> None:
    process = psutil.Process(cluster.pids()["scheduler"])

    def suspend_and_move() -> None:
        process.suspend()
        asked_to_move(cluster, "worker-0", "worker-1")

    for _ in range(ATTEMPTS):
        try:
            # Without a scheduler a stream that has not begun would be refused.
            answers, moved = disturbed(cluster, 60, suspend_and_move, all_begun=True)
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
    assert cluster.metric(MOVED) > 0, "no stream moved"
    audited = audit_logs(logs)
    assert audited.findings.violations == [] and audited.differing == []
    assert audited.findings.checks["I5"] > OUTPUT_TOKENS and audited.findings.checks["I15"]


def test_the_gateway_may_die_meanwhile(cluster: Cluster, undisturbed: list[Answer]) -> None:
    """Its streams break; both workers free all blocks, and later streams are unaffected."""
    pid = cluster.pids()["gateway"]

    def move_all() -> None:
        with suppress(httpx.HTTPError):
            asked_to_move(cluster, "worker-0", "worker-1")

    with pytest.raises(httpx.HTTPError):
        disturbed(cluster, 40, move_all, lambda: cluster.kill("gateway"))
    cluster.wait_for_restart("gateway", pid)
    cluster.eventually(lambda: cluster.get("/v1/models"))
    both_serve(cluster)
    cluster.eventually(lambda: all_blocks_free(cluster))
    check_answers(run_all(cluster), undisturbed)


def all_blocks_free(cluster: Cluster) -> bool:
    return all(row["kv_blocks_free"] == row["kv_blocks_total"] for row in cluster.workers())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_moves_between_two_workers(cluster: Cluster) -> None:
    """All blocks are free afterwards, and memory grows by less than `GROWTH_BYTES` a move."""
    both_serve(cluster)
    undisturbed = run_all(cluster, tokens=LONG_TOKENS)

    def move_to_and_fro(ended: Event) -> None:
        while not ended.wait(PAUSE_S):
            asked_to_move(cluster, "worker-0", "worker-1")
            asked_to_move(cluster, "worker-1", "worker-0")

    def move_streams(moves: int) -> float:
        """Repeat the streams until at least `moves` have moved; returns their number."""
        begun = cluster.metric(MOVED)
        while (moved := cluster.metric(MOVED) - begun) < moves:
            ended = Event()
            mover = Thread(target=move_to_and_fro, args=(ended,))
            mover.start()
            try:
                check_answers(run_all(cluster, tokens=LONG_TOKENS), undisturbed)
            finally:
                ended.set()
                mover.join(120)
        sleep(REST_S)
        return moved

    move_streams(WARM_UP_MOVES)
    watched = processes(cluster)
    before = private_bytes(watched)
    moved = move_streams(MOVES)
    assert processes(cluster) == watched, "a process was restarted"
    grown = {name: size - before[name] for name, size in private_bytes(watched).items()}
    each = {name: round(size / moved) for name, size in grown.items()}
    print(f"{moved:.0f} moves; bytes a move: {each}")
    workers = sum(size for name, size in grown.items() if name.startswith("worker-"))
    most = max(workers, *grown.values())
    assert most < GROWTH_BYTES * moved, f"{grown} bytes for {moved:.0f} moves"
    cluster.eventually(lambda: all_blocks_free(cluster))


def processes(cluster: Cluster) -> dict[str, psutil.Process]:
    """The processes of the services and of the workers, by name."""
    services = ("gateway", "scheduler", "memmgr")
    pids = {name: pid for name, pid in cluster.pids().items() if name in services}
    for row in cluster.workers():
        servicer, engine = row["pids"]
        pids |= {row["id"]: servicer, f"{row['id']} engine": engine}
    return {name: psutil.Process(pid) for name, pid in pids.items()}


def private_bytes(watched: Mapping[str, psutil.Process]) -> dict[str, int]:
    """Memory that no other process shares, by process; that of KV and parameters is shared."""
    held = {name: process.memory_info() for name, process in watched.items()}
    return {name: info.rss - info.shared for name, info in held.items()}
