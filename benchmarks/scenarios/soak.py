"""`soak`: random faults and floods for half an hour; no request is lost, and nothing leaks.

A few requests always run. Floods come in between, so that groups merge and are restored by
themselves. At random a worker, an engine or a part of the control plane dies or stands still, one
after the other. Each answer is compared with an undisturbed one, and the event logs are audited.
"""

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import psutil

from benchmarks.audit_logs import Audited, audit_logs
from benchmarks.faults.cluster import blocks_free, is_stable
from benchmarks.faults.kept_logs import keep_if_failed
from benchmarks.faults.random_faults import drawn, strike
from benchmarks.faults.streams import undisturbed_answers
from benchmarks.scenarios.scenario import LoadChoice, Trial, TrialVerdict
from benchmarks.steady_load import Shape, SteadyLoad, Tally
from benchmarks.systems.cluster_status import read_status
from benchmarks.systems.system import Deployment, Say
from benchmarks.systems.tideserve import Tideserve
from benchmarks.undisturbed import Undisturbed
from services.common.clock import monotonic_s
from tideserve.cli.errors import SystemUnavailable

FULL_MINUTES, QUICK_MINUTES = 30.0, 3.0
WORKERS_MIN = 3
"""With fewer, hardly anything is left while one is down."""
DISTINCT = 64
ALWAYS, FLOOD = 6, 64
"""Requests at once, beside a flood and in it."""
FLOOD_S, FLOOD_PAUSE_S = 5.0, 20.0
FAULT_PAUSE_S = (1.0, 8.0)
WHOLE_TIMEOUT_S = 120.0
"""A worker loads torch anew, on a machine that serves a flood."""
REST_TIMEOUT_S = 60.0
POLL_S = 0.2
RSS_GROWTH_MAX = 0.10
"""From the first to the last fifth of the time. Processes of different ages are compared."""


@dataclass(slots=True)
class Soaked:
    """What has happened. `rss_bytes`: of the processes of each name, after every fault."""

    workers: int
    faults: Counter[str] = field(default_factory=Counter)
    floods: int = 0
    problems: list[str] = field(default_factory=list)
    duration_s: float = 0.0
    slowest_whole_s: float = 0.0
    rss_bytes: dict[str, list[int]] = field(default_factory=dict)
    groups_seen: Counter[int] = field(default_factory=Counter)
    """How often a look found all workers serving in so many groups."""


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Start a cluster that keeps event logs, trouble it, and audit the logs."""
    minutes = choice.minutes or (QUICK_MINUTES if choice.quick else FULL_MINUTES)
    workers = max(deployment.workers, WORKERS_MIN)
    with tempfile.TemporaryDirectory(prefix="tideserve-soak-") as folder:
        logs = Path(folder) / "events"
        options = {
            "memmgr": {"split_dwell_s": 4.0},
            "services": {"event_log": str(logs)},
            "worker": {"profile_when_idle": False},
        }
        options = dict(deployment.options) | options
        system = Tideserve("tideserve", (), replace(deployment, options=options, workers=workers))
        try:
            system.start(say)
            done, tally = soak(system, workers, minutes * 60, choice.seed, progress)
            progress("replaying and auditing the event logs")
            verdict = judge(done, tally, audit_logs(logs))
            keep_if_failed("soak", verdict.problems, Path(folder), Path(system.state["logs"]), say)
        finally:
            system.stop()
    return verdict


def soak(
    system: Tideserve, workers: int, duration_s: float, seed: int, say: Say
) -> tuple[Soaked, Tally]:
    """Trouble the cluster for so long, and wait until it is at rest.

    Raises:
        SystemUnavailable: if a request fails before the first fault.
    """
    shape = Shape(ALWAYS, output_tokens=(48, 160), seed=seed, temperature=0.8, distinct=DISTINCT)
    requests = [shape.request(number) for number in range(DISTINCT)]
    say("an undisturbed run")
    wanted = undisturbed_answers(system.urls[0], system.model, requests)
    done, began_s = Soaked(workers), monotonic_s()
    with Floods(system, replace(shape, concurrency=FLOOD), wanted) as floods:
        with SteadyLoad(system.urls[0], system.model, shape, wanted) as load:
            _trouble(system, done, Random(seed), began_s + duration_s, say)
        say("waiting for the last requests")
    _await_rest(system, done)
    done.duration_s = monotonic_s() - began_s
    done.floods = floods.count
    floods.tally.add(load.tally)
    return done, floods.tally


class Floods:
    """Makes floods from a thread of this process, until it is left; use as a context manager."""

    def __init__(self, system: Tideserve, shape: Shape, wanted: Sequence[Undisturbed]) -> None:
        self.tally = Tally()
        self.count = 0
        self._system = system
        self._shape = shape
        self._wanted = wanted
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="floods", daemon=True)

    def __enter__(self) -> "Floods":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(FLOOD_PAUSE_S):
            url, model = self._system.urls[0], self._system.model
            with SteadyLoad(url, model, self._shape, self._wanted) as flood:
                self._ended.wait(FLOOD_S)
            self.tally.add(flood.tally)
            self.count += 1


def judge(done: Soaked, tally: Tally, audited: Audited) -> TrialVerdict:
    """Figures, and a problem for every property that did not hold."""
    problems = [*done.problems, *tally.problems(refusals=True), *_memory_problems(done)]
    problems += audited.problems
    if done.workers not in done.groups_seen:
        problems.append("the groups were never seen apart")
    if not any(count < done.workers for count in done.groups_seen):
        problems.append("no groups were seen merged")
    figures = {
        "duration_s": done.duration_s,
        "faults": dict(sorted(done.faults.items())),
        "floods": done.floods,
        "slowest_whole_s": done.slowest_whole_s,
        "groups_seen": {str(count): seen for count, seen in sorted(done.groups_seen.items())},
        "requests": tally.counts(),
        "rss_bytes": {name: _fifths(values) for name, values in done.rss_bytes.items()},
        "invariants_checked": audited.checks,
        "violations": audited.findings.broken,
        "problems": problems,
    }
    return TrialVerdict(figures, _rows(done, tally, audited), problems)


# --- trouble


def _trouble(system: Tideserve, done: Soaked, rng: Random, until_s: float, say: Say) -> None:
    """One fault after the other, each once all workers serve again."""
    while monotonic_s() < until_s:
        time.sleep(rng.uniform(*FAULT_PAUSE_S))
        fault = drawn(rng)
        left_s = until_s - monotonic_s()
        say(f"{sum(done.faults.values())} faults so far, {max(0.0, left_s):.0f} s left")
        try:
            struck = strike(fault, _status(system), system.state["pids"], rng)
        except SystemUnavailable:
            continue  # the memory manager, which tells the status, is elected anew
        done.faults[fault.name] += 1
        began_s = monotonic_s()
        while not _is_whole(system, done, struck.killed):
            if monotonic_s() - began_s > WHOLE_TIMEOUT_S:
                done.problems.append(f"not whole {WHOLE_TIMEOUT_S:.0f} s after {struck.told}")
                return
            time.sleep(POLL_S)
        done.slowest_whole_s = max(done.slowest_whole_s, monotonic_s() - began_s)
        _note_memory(system, done)


def _status(system: Tideserve) -> Mapping[str, Any]:
    return read_status(system.admin_url)


def _is_whole(system: Tideserve, done: Soaked, killed: Collection[int]) -> bool:
    """Whether all workers serve; the groups may be merged.

    A process that was `killed` a moment ago may still be there, and in the records.
    """
    try:
        status = _status(system)
    except SystemUnavailable:
        return False
    names = [name for name in system.state["pids"] if name.startswith("worker-")]
    whole = is_stable(status, names, lambda pid: pid not in killed and psutil.pid_exists(pid))
    if whole:
        done.groups_seen[len(status["groups"])] += 1
    return whole


def _note_memory(system: Tideserve, done: Soaked) -> None:
    for name, pid in system.state["pids"].items():
        try:
            process = psutil.Process(pid)
            every = [process, *process.children(recursive=True)]
            rss_bytes = sum(one.memory_info().rss for one in every)
        except psutil.NoSuchProcess:
            continue
        done.rss_bytes.setdefault(name, []).append(rss_bytes)


def _await_rest(system: Tideserve, done: Soaked) -> None:
    """Wait until no worker has a request; else that is a problem."""
    deadline_s = monotonic_s() + REST_TIMEOUT_S
    while not blocks_free(_status(system)):
        if monotonic_s() > deadline_s:
            done.problems.append("blocks are in use at rest, or the workers are gone")
            return
        time.sleep(POLL_S)


# --- judging


def _memory_problems(done: Soaked) -> list[str]:
    problems = []
    for name, values in done.rss_bytes.items():
        first, last = _fifths(values).values()
        if last > (1 + RSS_GROWTH_MAX) * first:
            problems.append(f"{name} grew from {first >> 20:,} to {last >> 20:,} MiB")
    return problems


def _fifths(values: list[int]) -> dict[str, int]:
    """Median of the first and of the last fifth of the looks, in bytes."""
    count = max(1, len(values) // 5)
    return {"first": int(median(values[:count])), "last": int(median(values[-count:]))}


def _rows(done: Soaked, tally: Tally, audited: Audited) -> list[tuple[str, str]]:
    ends = ("lost", "duplicated", "stuck", "different", "refused")
    rows = [
        ("faults / floods", f"{sum(done.faults.values())} / {done.floods}"),
        ("of these", ", ".join(f"{name} {n}" for name, n in sorted(done.faults.items()))),
        ("longest until all workers served", f"{done.slowest_whole_s:.1f} s"),
        (
            "requests sent / completed / hung up by their clients",
            f"{tally.sent:,} / {tally.completed:,} / {tally.hung_up:,}",
        ),
        ("otherwise", ", ".join(f"{name} {getattr(tally, name)}" for name in ends)),
    ]
    for name, values in done.rss_bytes.items():
        first, last = _fifths(values).values()
        text = f"{first >> 20:,} → {last >> 20:,} MiB"
        rows.append((f"resident memory of {name}, first and last fifth", text))
    checked = ", ".join(f"{one} {count:,}×" for one, count in audited.checks.items())
    return [*rows, ("invariants checked", checked), ("violations", str(audited.findings.broken))]


TRIAL = Trial(
    name="soak",
    summary="random faults and floods: no request is lost, memory stays flat",
    memory="64MiB",
    run=run,
    gpu_memory="256MiB",
    dtype="float64",
    timed=True,
)
