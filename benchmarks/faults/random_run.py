"""Random faults and floods for a while; no request is lost, and nothing leaks.

A few requests always run. Floods come in between, so that groups merge and are restored by
themselves. At random a worker, an engine or a part of the control plane dies or stands still, one
after the other. Each answer is compared with an undisturbed one, and the event logs are audited.
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
"""With fewer, hardly anything is left while one is down."""
DISTINCT = 64
ALWAYS, FLOOD = 6, 64
"""Requests at once, beside a flood and in it."""
FLOOD_S, FLOOD_PAUSE_S = 5.0, 20.0
FAULT_PAUSE_S = (1.0, 8.0)
REST_TIMEOUT_S = 60.0
OPTIONS = {"memmgr": {"split_dwell_s": 4.0}}


@dataclass(slots=True)
class RandomRun:
    """What has happened."""

    workers: int
    faults: Counter[str] = field(default_factory=Counter)
    floods: int = 0
    problems: list[str] = field(default_factory=list)
    duration_s: float = 0.0
    slowest_whole_s: float = 0.0
    memory: ResidentMemory = field(default_factory=lambda: ResidentMemory(5, growth_max=0.10))
    """Of the processes of each name, after every fault."""
    groups_seen: Counter[int] = field(default_factory=Counter)
    """How often a look found all workers serving in so many groups."""
    tally: Tally = field(default_factory=Tally)


def run_random(
    deployment: Deployment, minutes: float, seed: int, say: Say, progress: Say
) -> TrialVerdict:
    """Start a cluster that keeps event logs, trouble it, and audit the logs.

    Raises:
        SystemUnavailable: if it does not start, or a request fails before the first fault.
    """
    workers = max(deployment.workers, WORKERS_MIN)
    with running_cluster(deployment, workers, OPTIONS, say) as cluster:
        done = _disturbed(cluster, workers, minutes * 60, seed, progress)
        progress("replaying and auditing the event logs")
        verdict = judge(done, cluster.audit())
        cluster.keep_if(verdict.problems, "faults", say)
    return verdict


def judge(done: RandomRun, audited: Audited) -> TrialVerdict:
    """Figures, and a problem for every property that did not hold."""
    problems = [*done.problems, *done.tally.problems(refusals=True), *done.memory.problems()]
    problems += audited.problems
    if done.workers not in done.groups_seen:
        problems.append("the groups were never seen apart")
    if not any(count < done.workers for count in done.groups_seen):
        problems.append("no groups were seen merged")
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
    """Trouble the cluster for so long, and wait until it is at rest."""
    shape = Shape(ALWAYS, output_tokens=(48, 160), seed=seed, temperature=0.8, distinct=DISTINCT)
    requests = [shape.request(number) for number in range(DISTINCT)]
    say("an undisturbed run")
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
    if not cluster.rests(REST_TIMEOUT_S):
        done.problems.append("blocks are in use at rest, or the workers are gone")
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
    """Make floods with pauses, until the run has ended."""
    while not ended.wait(FLOOD_PAUSE_S):
        with SteadyLoad(cluster.url, cluster.model, shape, wanted) as flood:
            ended.wait(FLOOD_S)
        done.tally.add(flood.tally)
        done.floods += 1


def _trouble(cluster: FaultCluster, done: RandomRun, rng: Random, until_s: float, say: Say) -> None:
    """One fault after the other, each once all workers serve again; the groups may be merged."""
    while monotonic_s() < until_s:
        time.sleep(rng.uniform(*FAULT_PAUSE_S))
        fault = drawn(rng)
        left_s = max(0.0, until_s - monotonic_s())
        say(f"{done.faults.total()} faults so far, {left_s:.0f} s left")
        try:
            struck = strike(fault, cluster.status(), cluster.pids, rng)
        except SystemUnavailable:
            continue  # the memory manager, which reports the status, is elected anew
        done.faults[fault.name] += 1
        began_s = monotonic_s()
        if not await_true(partial(is_whole, cluster, done, struck.killed), WHOLE_TIMEOUT_S):
            done.problems.append(f"not whole {WHOLE_TIMEOUT_S:.0f} s after {struck.told}")
            return
        done.slowest_whole_s = max(done.slowest_whole_s, monotonic_s() - began_s)
        for name, pid in cluster.pids.items():
            done.memory.note(name, _family(pid))


def is_whole(cluster: FaultCluster, done: RandomRun, killed: Collection[int]) -> bool:
    """Whether all workers serve; notes in how many groups.

    A process that was `killed` a moment ago may still be there, and in the records.
    """

    def whole(status: Status) -> bool:
        if not is_stable(status, cluster.workers, alive_but(killed)):
            return False
        done.groups_seen[len(status["groups"])] += 1
        return True

    return cluster.holds(whole)


def _family(pid: int) -> list[int]:
    """The process and its descendants; it alone if it is gone."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return [pid]
