"""Random faults: which processes they hit, and that all kinds come."""

import os
import signal
from random import Random
from typing import Any

import pytest

from benchmarks.faults import random_faults
from benchmarks.faults.random_faults import RANDOM_FAULTS, RandomFault, Struck, drawn, strike

STATUS: dict[str, Any] = {"workers": [{"id": "worker-0", "pids": [10, 11]}]}
SERVICES = {"etcd": 1, "memmgr": 2}


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


def test_what_is_stopped_goes_on(signals: list[tuple[int, int]]) -> None:
    slept: list[float] = []
    fault = RandomFault("etcd", stops_s=20)
    struck = strike(fault, STATUS, SERVICES, Random(0), slept.append)
    assert struck == Struck("stop-etcd-20: etcd", frozenset())
    assert slept == [20]
    assert signals == [(1, signal.SIGSTOP), (1, signal.SIGCONT)]


def test_a_process_that_is_gone_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_pid: int, _number: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", gone)
    strike(RandomFault("memmgr"), STATUS, SERVICES, Random(0))


def test_all_kinds_are_drawn() -> None:
    rng = Random(0)
    assert {drawn(rng).name for _ in range(500)} == {one.name for one in RANDOM_FAULTS}
