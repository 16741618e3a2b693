"""Stability of a cluster after a fault."""

import copy
import os
import subprocess
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Any

import psutil
import pytest

from benchmarks.faults import cell_run, cluster
from benchmarks.faults.cell_run import await_stopped
from benchmarks.faults.cluster import (
    StableWatch,
    blocks_free,
    is_stable,
    serve_alone,
)
from services.common.clock import monotonic_s
from tests.support.waiting import eventually

STATUS: dict[str, Any] = {
    "workers": [
        {"id": "worker-0", "epoch": 7, "unsettled": False, "pids": [10, 11]},
        {"id": "worker-1", "epoch": 8, "unsettled": False, "pids": [20, 21]},
    ],
    "groups": [
        {"id": "g0", "epoch": 7, "members": ["worker-0"], "changing": False, "degraded": False},
        {"id": "g1", "epoch": 8, "members": ["worker-1"], "changing": False, "degraded": False},
    ],
}


BOTH, FIRST = ("worker-0", "worker-1"), ("worker-0",)
GONE = {name: rows[:1] for name, rows in STATUS.items()}
BACK = STATUS | {"groups": STATUS["groups"][:1]}
"""The successor of a lost worker is in the records, and has no group yet."""


def with_groups(*changes: dict[str, Any]) -> dict[str, Any]:
    groups = zip(STATUS["groups"], changes, strict=False)
    return STATUS | {"groups": [group | change for group, change in groups]}


MERGED = with_groups({"members": list(BOTH)})


def test_two_workers_that_serve_are_stable_apart_and_together() -> None:
    merged = copy.deepcopy(MERGED)
    merged["workers"][1]["epoch"] = 7
    for status in (STATUS, merged):
        assert is_stable(status, BOTH, lambda _: True)


@pytest.mark.parametrize("pid", [10, 11, 20, 21])
@pytest.mark.parametrize("survivors", [BOTH, FIRST, BOTH[1:]])
def test_a_dead_process_whose_lease_has_not_ended_is_not_stable(
    pid: int, survivors: Sequence[str]
) -> None:
    assert not is_stable(STATUS, survivors, lambda other: other != pid)


@pytest.mark.parametrize(
    ("status", "survivors", "stable"),
    [
        (GONE, FIRST, True),
        (GONE, BOTH, False),
        (BACK, FIRST, True),
        (BACK, BOTH, False),
        (BACK, BOTH[1:], False),
        (STATUS, FIRST, True),
    ],
)
def test_a_cluster_is_stable_without_the_killed_worker(
    status: dict[str, Any], survivors: Sequence[str], stable: bool
) -> None:
    assert is_stable(status, survivors, lambda _: True) is stable


@pytest.mark.parametrize(
    ("status", "dead", "alone"),
    [
        (STATUS, {20, 21}, True),
        (STATUS, {10}, False),
        (with_groups({}, {"degraded": True}), {20, 21}, True),
        (with_groups({"degraded": True}, {}), {20, 21}, False),
        (MERGED, {20, 21}, False),
        (STATUS | {"groups": []}, set(), False),
    ],
)
def test_survivors_serve_alone_despite_a_record_of_the_lost_group(
    status: dict[str, Any], dead: set[int], alone: bool
) -> None:
    assert serve_alone(status, FIRST, lambda pid: pid not in dead) is alone


@pytest.mark.parametrize(
    "change",
    [
        lambda status: status["workers"].pop(),
        lambda status: status["workers"].pop(0),
        lambda status: status["groups"].pop(),
        lambda status: status["groups"][1]["members"].append("worker-0"),
        lambda status: status["groups"][0]["members"].append("worker-9"),
        lambda status: status["groups"][0].update(changing=True),
        lambda status: status["groups"][0].update(degraded=True),
        lambda status: status["groups"][0].update(epoch=9),
        lambda status: status["workers"][0].update(unsettled=True),
    ],
)
def test_an_unsettled_cluster_is_not_stable(change: Callable[[dict[str, Any]], None]) -> None:
    status = copy.deepcopy(STATUS)
    change(status)
    assert not is_stable(status, BOTH, lambda _: True)


@pytest.mark.parametrize(
    ("first_looks", "later", "last_bad"),
    [((True, True, False, True, False), True, 4), ((True,), False, None)],
)
async def test_stability_counts_from_the_last_unstable_state(
    first_looks: Sequence[bool], later: bool, last_bad: int | None
) -> None:
    """A cluster that has not noticed the loss yet is not stable."""
    looks = chain(first_looks, repeat(later))
    looked: list[tuple[float, bool]] = []

    def look() -> bool:
        looked.append((monotonic_s(), next(looks)))
        return looked[-1][1]

    watch = StableWatch(look)
    await eventually(lambda: len(looked) > 6)
    since_s = watch.end()
    if last_bad is None:
        assert since_s is None
    else:
        assert since_s is not None
        assert looked[last_bad][0] < since_s <= looked[last_bad + 1][0]


async def test_the_last_observation_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another observer may have seen the stable state first and ended the watch."""
    monkeypatch.setattr(cluster, "POLL_S", 60.0)
    looked: list[bool] = []

    def look() -> bool:
        looked.append(len(looked) > 0)
        return looked[-1]

    watch = StableWatch(look)
    await eventually(lambda: looked)
    assert watch.end() is not None and looked == [False, True]


@pytest.mark.parametrize(
    ("blocks", "free"),
    [([(5, 5), (7, 7)], True), ([(5, 5), (6, 7)], False), ([(0, 0)], False), ([], False)],
)
def test_blocks_are_free_only_if_there_are_workers_that_have_some(
    blocks: Sequence[tuple[int, int]], free: bool
) -> None:
    rows = [{"kv_blocks_free": free, "kv_blocks_total": all_} for free, all_ in blocks]
    assert blocks_free({"workers": rows}) is free


def test_a_held_process_is_waited_for_before_other_faults() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    # It stops itself a moment after it was reported, as a process with a failpoint does.
    holding = subprocess.Popen(["sh", "-c", "sleep 0.2; kill -STOP $$; exec sleep 60"])
    try:
        await_stopped([gone.pid, holding.pid])
        assert psutil.Process(holding.pid).status() == psutil.STATUS_STOPPED
    finally:
        holding.kill()
        holding.wait()


def test_waiting_for_a_held_process_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cell_run, "HOLD_MAX_S", 0.01)
    await_stopped([os.getpid()])
