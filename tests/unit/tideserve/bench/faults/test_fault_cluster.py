"""When a cluster counts as stable again."""

import copy
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

import pytest

from tests.support.waiting import eventually
from tideserve.bench.faults.cluster import StableWatch, is_stable

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


def stable(status: dict[str, Any], dead: frozenset[int] = frozenset()) -> bool:
    return is_stable(status, 2, lambda pid: pid not in dead)


def test_two_workers_that_serve_are_stable_apart_and_together() -> None:
    assert stable(STATUS)
    merged = copy.deepcopy(STATUS)
    merged["groups"] = [STATUS["groups"][0] | {"members": ["worker-0", "worker-1"]}]
    merged["workers"][1]["epoch"] = 7
    assert stable(merged)


@pytest.mark.parametrize("pid", [10, 11, 20, 21])
def test_a_dead_process_whose_lease_has_not_ended_is_not_stable(pid: int) -> None:
    assert not stable(STATUS, frozenset({pid}))


@pytest.mark.parametrize(
    "change",
    [
        lambda status: status["workers"].pop(),
        lambda status: status["groups"].pop(),
        lambda status: status["groups"][1]["members"].append("worker-0"),
        lambda status: status["groups"][0].update(changing=True),
        lambda status: status["groups"][0].update(degraded=True),
        lambda status: status["groups"][0].update(epoch=9),
        lambda status: status["workers"][0].update(unsettled=True),
        lambda status: status["workers"].append(status["workers"][0] | {"id": "worker-2"}),
    ],
)
def test_what_is_not_settled_is_not_stable(change: Callable[[dict[str, Any]], None]) -> None:
    status = copy.deepcopy(STATUS)
    change(status)
    assert not stable(status)


async def test_it_is_stable_only_since_it_was_unstable_last() -> None:
    """At first nobody has noticed the loss: that is no stable cluster."""
    looks = chain([True, True, False, True, False], repeat(True))
    looked: list[bool] = []

    def look() -> bool:
        looked.append(next(looks))
        return looked[-1]

    watch = StableWatch(look)
    await eventually(lambda: len(looked) > 6)
    assert watch.await_stable(60)
    since_s = watch.end()
    assert since_s is not None
    again = StableWatch(lambda: False)
    assert not again.await_stable(0.0)
    assert again.end() is None
    assert looked.count(False) == 2
