"""Random faults, injected one at a time into a whole cluster."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import psutil


@dataclass(frozen=True, slots=True)
class RandomFault:
    """A fault of a process: a kill, or a suspension of `stops_s` seconds.

    whom: "worker" is its servicer and its engine, "engine" the latter alone; otherwise the
    service's name. `weight` is the relative probability.
    """

    whom: str
    stops_s: float = 0.0
    weight: int = 1

    @property
    def name(self) -> str:
        """For people."""
        return f"stop-{self.whom}-{self.stops_s:g}" if self.stops_s else f"kill-{self.whom}"


RANDOM_FAULTS = (
    RandomFault("worker", weight=3),
    RandomFault("engine", weight=3),
    RandomFault("worker", stops_s=3),
    RandomFault("worker", stops_s=12),
    RandomFault("engine", stops_s=12, weight=2),
    RandomFault("memmgr"),
    RandomFault("memmgr", stops_s=5),
    RandomFault("etcd", stops_s=5),
    RandomFault("etcd", stops_s=20),
)


@dataclass(frozen=True, slots=True)
class Struck:
    """A description of the victim, and the process ids that were killed."""

    description: str
    killed: frozenset[int]


def drawn(rng: Random) -> RandomFault:
    """A random fault, by weight."""
    return rng.choices(RANDOM_FAULTS, [fault.weight for fault in RANDOM_FAULTS])[0]


def strike(
    fault: RandomFault,
    status: Mapping[str, Any],
    services: Mapping[str, int],
    rng: Random,
    sleep: Callable[[float], None] = time.sleep,
) -> Struck:
    """Inject the fault and wait for its end.

    `status` lists the workers' processes, `services` maps the other services to process ids.
    """
    if fault.whom in ("worker", "engine"):
        worker = rng.choice(sorted(status["workers"], key=lambda row: str(row["id"])))
        pids, name = [int(pid) for pid in worker["pids"]], str(worker["id"])
        if fault.whom == "engine":
            # The engine is the child of its servicer.
            pids = [pid for pid in pids if parent_of(pid) in pids]
    else:
        pids, name = [services[fault.whom]], fault.whom
    _signal(pids, signal.SIGSTOP if fault.stops_s else signal.SIGKILL)
    if fault.stops_s:
        sleep(fault.stops_s)
        _signal(pids, signal.SIGCONT)
    # Suspended processes continue, so only killed processes are gone.
    return Struck(f"{fault.name}: {name}", frozenset(() if fault.stops_s else pids))


def parent_of(pid: int) -> int:
    """The parent process id; 0 if the process is gone."""
    try:
        return int(psutil.Process(pid).ppid())
    except psutil.NoSuchProcess:
        return 0


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
