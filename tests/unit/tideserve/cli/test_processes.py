"""Dead processes are named by checks of a local cluster."""

from typing import Any

import pytest

from tideserve.cli.processes import process_faults

STATE: dict[str, Any] = {
    "pid": 1,
    "programs": ["etcd", "gateway", "worker-0", "worker-1"],
    "pids": {"etcd": 2, "gateway": 3, "worker-0": 4, "worker-1": 5},
}


def lives(*dead: int) -> Any:
    return lambda pid: pid > 0 and pid not in dead


def test_living_processes_have_no_faults() -> None:
    assert process_faults(STATE, {"worker-0", "worker-1"}, lives()) == []
    assert process_faults(STATE, None, lives()) == [], "the workers are unknown"


@pytest.mark.parametrize("noticed", [False, True])
def test_a_dead_worker_is_named_before_and_after_it_was_noticed(noticed: bool) -> None:
    pids = {name: pid for name, pid in STATE["pids"].items() if not noticed or name != "worker-1"}
    (fault,) = process_faults(STATE | {"pids": pids}, {"worker-0", "worker-1"}, lives(5))
    assert fault.startswith("worker-1 is dead; ")
    assert "tideserve logs worker-1" in fault


def test_a_worker_that_is_not_registered_is_named() -> None:
    (fault,) = process_faults(STATE, {"worker-0"}, lives())
    assert fault.startswith("worker-1 (process 5) runs but is not registered: ")


def test_a_killed_command_is_the_only_reported_fault() -> None:
    (fault,) = process_faults(STATE, None, lives(1, 4))
    assert "(process 1) has ended" in fault
