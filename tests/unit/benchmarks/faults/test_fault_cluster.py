"""When a cluster counts as stable again."""

import copy
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import Any

import psutil
import pytest

from benchmarks.faults import cluster
from benchmarks.faults.cluster import (
    StableWatch,
    await_stopped,
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


BOTH = ("worker-0", "worker-1")


def stable(
    status: dict[str, Any], dead: Iterable[int] = (), survivors: Sequence[str] = BOTH
) -> bool:
    return is_stable(status, survivors, lambda pid: pid not in set(dead))


def test_two_workers_that_serve_are_stable_apart_and_together() -> None:
    assert stable(STATUS)
    merged = copy.deepcopy(STATUS)
    merged["groups"] = [STATUS["groups"][0] | {"members": ["worker-0", "worker-1"]}]
    merged["workers"][1]["epoch"] = 7
    assert stable(merged)


@pytest.mark.parametrize("pid", [10, 11, 20, 21])
def test_a_dead_process_whose_lease_has_not_ended_is_not_stable(pid: int) -> None:
    assert not stable(STATUS, {pid})
    assert not stable(STATUS, {pid}, ["worker-0" if pid > 11 else "worker-1"])


def test_it_is_stable_without_the_worker_that_was_killed() -> None:
    """It is gone from the records; or its successor is there, and has a group or none yet."""
    gone = {name: rows[:1] for name, rows in STATUS.items()}
    assert stable(gone, survivors=["worker-0"])
    assert not stable(gone)
    back = STATUS | {"groups": STATUS["groups"][:1]}
    assert stable(back, survivors=["worker-0"])
    assert not stable(back)
    assert stable(STATUS, survivors=["worker-0"])
    assert not stable(back, survivors=["worker-1"])


def test_survivors_serve_alone_though_the_group_of_the_lost_one_is_in_the_records() -> None:
    def alone(status: dict[str, Any], dead: set[int]) -> bool:
        return serve_alone(status, {"worker-0"}, lambda pid: pid not in dead)

    assert alone(STATUS, {20, 21})
    assert not alone(STATUS, {10}), "it is dead itself"
    degraded = copy.deepcopy(STATUS)
    degraded["groups"][1]["degraded"] = True
    assert alone(degraded, {20, 21})
    degraded["groups"][0]["degraded"] = True
    assert not alone(degraded, {20, 21})
    merged = copy.deepcopy(STATUS)
    merged["groups"] = [STATUS["groups"][0] | {"members": ["worker-0", "worker-1"]}]
    assert not alone(merged, {20, 21}), "the lost one is in its group"
    assert not alone(STATUS | {"groups": []}, set())


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
def test_what_is_not_settled_is_not_stable(change: Callable[[dict[str, Any]], None]) -> None:
    status = copy.deepcopy(STATUS)
    change(status)
    assert not stable(status)


async def test_it_is_stable_only_since_it_was_unstable_last() -> None:
    """At first nobody has noticed the loss: that is no stable cluster."""
    looks = chain([True, True, False, True, False], repeat(True))
    looked: list[tuple[float, bool]] = []

    def look() -> bool:
        looked.append((monotonic_s(), next(looks)))
        return looked[-1][1]

    watch = StableWatch(look)
    await eventually(lambda: len(looked) > 6)
    since_s = watch.end()
    assert since_s is not None
    last_bad_s, first_good_s = looked[4][0], looked[5][0]
    assert last_bad_s < since_s <= first_good_s


async def test_the_last_look_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else may have seen first that it is stable, and ended the watch."""
    monkeypatch.setattr(cluster, "POLL_S", 60.0)
    looked: list[bool] = []

    def look() -> bool:
        looked.append(len(looked) > 0)
        return looked[-1]

    watch = StableWatch(look)
    await eventually(lambda: looked)
    assert watch.end() is not None and looked == [False, True]


async def test_what_is_unstable_in_the_end_was_never_stable() -> None:
    looks = chain([True], repeat(False))
    looked: list[bool] = []

    def look() -> bool:
        looked.append(next(looks))
        return looked[-1]

    watch = StableWatch(look)
    await eventually(lambda: len(looked) > 2)
    assert watch.end() is None


@pytest.mark.parametrize(
    ("blocks", "free"),
    [([(5, 5), (7, 7)], True), ([(5, 5), (6, 7)], False), ([(0, 0)], False), ([], False)],
)
def test_blocks_are_free_only_if_there_are_workers_that_have_some(
    blocks: Sequence[tuple[int, int]], free: bool
) -> None:
    rows = [{"kv_blocks_free": one, "kv_blocks_total": all_} for one, all_ in blocks]
    assert blocks_free({"workers": rows}) is free


def test_a_process_that_holds_is_waited_for_before_anything_is_done_to_others() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    # It stops itself a moment after it was told of, as a process with a failpoint does.
    holding = subprocess.Popen(["sh", "-c", "sleep 0.2; kill -STOP $$; exec sleep 60"])
    try:
        await_stopped([gone.pid, holding.pid])
        assert psutil.Process(holding.pid).status() == psutil.STATUS_STOPPED
    finally:
        holding.kill()
        holding.wait()


def test_a_process_that_does_not_hold_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "HOLD_MAX_S", 0.01)
    await_stopped([os.getpid()])
