"""Random faults and floods for a given time: no request may be lost, and no memory may leak.

A few requests always run. Floods in between make groups merge and split automatically. Faults kill
or suspend a random worker, engine or control-plane process, one at a time. Each answer is compared
with its undisturbed answer, and the event logs are audited.
"""

import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import psutil

from benchmarks.audit_logs import Audited
from benchmarks.faults.cluster import (
    WHOLE_TIMEOUT_S,
    FaultCluster,
    Status,
    alive_but,
    await_true,
    is_stable,
    running_cluster,
)
from benchmarks.faults.load import Shape, SteadyLoad, undisturbed_answers
from benchmarks.faults.memory import ResidentMemory
from benchmarks.faults.outcomes import Tally, Undisturbed, request_rows
from benchmarks.faults.random_faults import drawn, strike
from benchmarks.scenarios.scenario import TrialVerdict
from benchmarks.systems.system import Deployment, Say
from services.common.clock import monotonic_s
from tideserve.cli.errors import SystemUnavailable

WORKERS_MIN = 3
"""With fewer workers, too little capacity is left while a worker is down."""
DISTINCT = 64
ALWAYS, FLOOD = 6, 64
"""Concurrent requests outside and inside a flood."""
FLOOD_S, FLOOD_PAUSE_S = 5.0, 20.0
FAULT_PAUSE_S = (1.0, 8.0)
REST_TIMEOUT_S = 60.0
OPTIONS = {"memmgr": {"split_dwell_s": 4.0}}


@dataclass(slots=True)
class RandomRun:
    """Record of a random run."""

    workers: int
    faults: Counter[str] = field(default_factory=Counter)
    floods: int = 0
    problems: list[str] = field(default_factory=list)
    duration_s: float = 0.0
    slowest_whole_s: float = 0.0
    memory: ResidentMemory = field(default_factory=lambda: ResidentMemory(5, growth_max=0.10))
    """Resident memory of the processes of each name, sampled after every fault."""
    groups_seen: Counter[int] = field(default_factory=Counter)
    """Number of polls that saw all workers serving, by number of groups."""
    tally: Tally = field(default_factory=Tally)


def run_random(
    deployment: Deployment, minutes: float, seed: int, say: Say, progress: Say
) -> TrialVerdict:
    """Start a cluster with event logs, inject random faults, and audit the logs.

    Raises:
        SystemUnavailable: if the cluster does not start, or a request fails before the first fault.
    """
    workers = max(deployment.workers, WORKERS_MIN)
    with running_cluster(deployment, workers, OPTIONS, say) as cluster:
        done = _disturbed(cluster, workers, minutes * 60, seed, progress)
        progress("replaying and auditing the event logs")
        verdict = judge(done, cluster.audit())
        cluster.keep_if(verdict.problems, "faults", say)
    return verdict


def judge(done: RandomRun, audited: Audited) -> TrialVerdict:
    """Figures, and a problem for every violated property."""
    problems = [*done.problems, *done.tally.problems(refusals=True), *done.memory.problems()]
    problems += audited.problems
    # Without a merge and a split, the run did not test change-overs.
    if done.workers not in done.groups_seen:
        problems.append("the groups were never seen split")
    if not any(count < done.workers for count in done.groups_seen):
        problems.append("the groups were never seen merged")
    faults, requests = dict(sorted(done.faults.items())), done.tally.counts()
    figures: dict[str, Any] = {
        "duration_s": done.duration_s,
        "faults": faults,
        "floods": done.floods,
        "slowest_whole_s": done.slowest_whole_s,
        "groups_seen": {str(count): seen for count, seen in sorted(done.groups_seen.items())},
        "requests": requests,
        "rss_bytes": done.memory.figures(),
        **audited.figures,
        "problems": problems,
    }
    rows = [
        ("faults / floods", f"{done.faults.total()} / {done.floods}"),
        ("of these", ", ".join(f"{name} {count}" for name, count in faults.items())),
        ("longest until all workers served", f"{done.slowest_whole_s:.1f} s"),
        *request_rows(requests),
        *done.memory.rows(),
        *audited.rows,
    ]
    return TrialVerdict(figures, rows, problems)


def _disturbed(
    cluster: FaultCluster, workers: int, duration_s: float, seed: int, say: Say
) -> RandomRun:
    """Inject faults for `duration_s`, and wait until the cluster is idle."""
    shape = Shape(ALWAYS, output_tokens=(48, 160), seed=seed, temperature=0.8, distinct=DISTINCT)
    requests = [shape.request(number) for number in range(DISTINCT)]
    say("an undisturbed run")
    # Record the undisturbed answers before the first fault, on the same cluster.
    wanted = undisturbed_answers(cluster.url, cluster.model, requests)
    done, began_s = RandomRun(workers), monotonic_s()
    ended = threading.Event()
    flood_shape = replace(shape, concurrency=FLOOD)
    floods = threading.Thread(target=_flood, args=(cluster, flood_shape, wanted, done, ended))
    floods.start()
    try:
        with SteadyLoad(cluster.url, cluster.model, shape, wanted) as load:
            _trouble(cluster, done, Random(seed), began_s + duration_s, say)
        say("waiting for the last requests")
    finally:
        ended.set()
        floods.join()
    # Without requests, any block in use is a leak.
    if not cluster.rests(REST_TIMEOUT_S):
        done.problems.append("blocks are in use in an idle cluster, or the workers are gone")
    done.duration_s = monotonic_s() - began_s
    done.tally.add(load.tally)
    return done


def _flood(
    cluster: FaultCluster,
    shape: Shape,
    wanted: Sequence[Undisturbed],
    done: RandomRun,
    ended: threading.Event,
) -> None:
    """Send floods with pauses until the run has ended."""
    while not ended.wait(FLOOD_PAUSE_S):
        with SteadyLoad(cluster.url, cluster.model, shape, wanted) as flood:
            ended.wait(FLOOD_S)
        done.tally.add(flood.tally)
        done.floods += 1


def _trouble(cluster: FaultCluster, done: RandomRun, rng: Random, until_s: float, say: Say) -> None:
    """Inject faults one at a time, each once all workers serve again; groups may be merged."""
    while monotonic_s() < until_s:
        time.sleep(rng.uniform(*FAULT_PAUSE_S))
        fault = drawn(rng)
        left_s = max(0.0, until_s - monotonic_s())
        say(f"{done.faults.total()} faults so far, {left_s:.0f} s left")
        try:
            struck = strike(fault, cluster.status(), cluster.pids, rng)
        except SystemUnavailable:
            continue  # a new memory manager, which reports the status, is being elected
        done.faults[fault.name] += 1
        began_s = monotonic_s()
        if not await_true(partial(is_whole, cluster, done, struck.killed), WHOLE_TIMEOUT_S):
            done.problems.append(f"workers down {WHOLE_TIMEOUT_S:.0f} s after {struck.description}")
            return
        done.slowest_whole_s = max(done.slowest_whole_s, monotonic_s() - began_s)
        for name, pid in cluster.pids.items():
            done.memory.note(name, _family(pid))


def is_whole(cluster: FaultCluster, done: RandomRun, killed: Collection[int]) -> bool:
    """Whether all workers serve; records the number of groups.

    A recently `killed` process may still exist and be in the records.
    """

    def whole(status: Status) -> bool:
        if not is_stable(status, cluster.workers, alive_but(killed)):
            return False
        done.groups_seen[len(status["groups"])] += 1
        return True

    return cluster.holds(whole)


def _family(pid: int) -> list[int]:
    """The process ids of a process and its descendants; only `pid` if it is gone."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return [pid]
