"""Random faults: the processes that they hit, and the verdict on a run."""

import os
import signal
from collections import Counter
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.faults import random_faults
from benchmarks.faults.cluster import FaultCluster
from benchmarks.faults.outcomes import Tally
from benchmarks.faults.random_faults import RANDOM_FAULTS, RandomFault, Struck, drawn, strike
from benchmarks.faults.random_run import RandomRun, is_whole, judge
from tests.support.survived import FLAT, MIB, audited, memory

STATUS: dict[str, Any] = {"workers": [{"id": "worker-0", "pids": [10, 11]}]}
SERVICES = {"etcd": 1, "memmgr": 2}
GOOD = Tally(sent=10, completed=9, hung_up=1, tokens=80)


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(random_faults, "parent_of", {10: 5, 11: 10}.__getitem__)
    return sent


def test_a_worker_is_both_of_its_processes_and_its_engine_the_child(
    signals: list[tuple[int, int]],
) -> None:
    struck = strike(RandomFault("worker"), STATUS, SERVICES, Random(0))
    assert struck == Struck("kill-worker: worker-0", frozenset({10, 11}))
    assert signals == [(10, signal.SIGKILL), (11, signal.SIGKILL)]
    signals.clear()
    struck = strike(RandomFault("engine"), STATUS, SERVICES, Random(0))
    assert struck.killed == {11}
    assert signals == [(11, signal.SIGKILL)]


def test_a_stopped_process_goes_on(signals: list[tuple[int, int]]) -> None:
    slept: list[float] = []
    fault = RandomFault("etcd", stops_s=20)
    struck = strike(fault, STATUS, SERVICES, Random(0), slept.append)
    assert struck == Struck("stop-etcd-20: etcd", frozenset())
    assert slept == [20]
    assert signals == [(1, signal.SIGSTOP), (1, signal.SIGCONT)]


def test_a_fault_on_an_ended_process_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_pid: int, _number: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", gone)
    strike(RandomFault("memmgr"), STATUS, SERVICES, Random(0))


def test_all_fault_kinds_are_drawn() -> None:
    rng = Random(0)
    assert {drawn(rng).name for _ in range(500)} == {fault.name for fault in RANDOM_FAULTS}


def random_run(**changes: Any) -> RandomRun:
    tally = replace(GOOD, **changes.pop("tally", {}))
    faults, groups_seen = Counter({"kill-worker": 4}), Counter({1: 2, 3: 5})
    done = RandomRun(
        3, faults, 2, memory=memory("gateway", FLAT), groups_seen=groups_seen, tally=tally
    )
    return replace(done, **changes)


def test_a_valid_run_has_no_problem() -> None:
    verdict = judge(random_run(), audited())
    assert list(verdict.problems) == []
    assert verdict.figures["faults"] == {"kill-worker": 4}
    assert verdict.figures["rss_bytes"] == {"gateway": {"first": 100 * MIB, "last": 100 * MIB}}
    assert {"invariants_checked", "violations", "requests", "groups_seen"} <= set(verdict.figures)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tally": {"completed": 8, "lost": 1}}, "1 requests were lost"),
        ({"tally": {"completed": 8, "duplicated": 1}}, "1 requests were duplicated"),
        ({"tally": {"completed": 8, "stuck": 1}}, "1 requests were stuck"),
        ({"tally": {"completed": 8, "refused": 1}}, "1 requests were refused"),
        ({"tally": {"completed": 8, "different": 1}}, "1 requests were different"),
        ({"tally": {"completed": 8}}, "10 requests were sent, and 9 ended"),
        ({"groups_seen": Counter({3: 5})}, "the groups were never seen merged"),
        ({"groups_seen": Counter({1: 5})}, "the groups were never seen split"),
        (
            {"memory": memory("gateway", [*FLAT[:10], *[111 * MIB] * 10])},
            "gateway grew from 100.0 MiB to 111.0 MiB",
        ),
        ({"problems": ["not whole"]}, "not whole"),
    ],
)
def test_each_violated_property_is_a_problem(changes: Any, problem: str) -> None:
    assert judge(random_run(**changes), audited()).problems == [problem]


def test_a_killed_process_that_is_still_there_does_not_serve() -> None:
    """Otherwise the next fault would come before the first has an effect."""
    me = os.getpid()
    status = {
        "workers": [{"id": "worker-0", "pids": [me], "epoch": 3, "unsettled": False}],
        "groups": [{"members": ["worker-0"], "epoch": 3, "changing": False, "degraded": False}],
    }
    cluster: Any = SimpleNamespace(workers=["worker-0"], status=lambda: status)
    cluster.holds = lambda condition: FaultCluster.holds(cluster, condition)
    done = RandomRun(1)
    assert not is_whole(cluster, done, {me})
    assert not done.groups_seen
    assert is_whole(cluster, done, {me + 1}) and done.groups_seen == {1: 1}
