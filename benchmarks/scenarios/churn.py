"""`churn`: many merges and splits under load lose, double or block no request and leak nothing.

The groups change by hand, one change after the other, while requests keep coming and some clients
hang up. Afterwards every process's event log is replayed and audited for invariants I1-I11.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import psutil

from benchmarks.audit_logs import Audited, audit_logs
from benchmarks.group_changes import MERGE_PATH, SPLIT_PATH, ChangeFailed, change_groups
from benchmarks.scenarios.scenario import LoadChoice, Trial, TrialVerdict
from benchmarks.steady_load import Shape, SteadyLoad, Tally
from benchmarks.systems.cluster_status import read_status
from benchmarks.systems.system import Deployment, Say
from benchmarks.systems.tideserve import Tideserve
from services.common.clock import monotonic_s

FULL_CYCLES, QUICK_CYCLES = 100, 10
CHANGE_TIMEOUT_S = 60.0
REST_TIMEOUT_S = 30.0
POLL_S = 0.2
PAUSE_S = 0.3
"""How long each configuration serves before the next change is asked for."""
RSS_GROWTH_MAX = 0.05
"""Allowed growth from the first to the last tenth of the cycles: allocators and logs vary."""
REQUEST_COUNTS = (
    *("sent", "completed", "hung_up", "refused", "lost", "duplicated", "stuck", "tokens"),
)


@dataclass(slots=True)
class Churned:
    """Results of the changes. `rss_bytes`: of each worker's processes after every cycle."""

    wanted: int
    merges: int = 0
    splits: int = 0
    refused: int = 0
    failure: str = ""
    duration_s: float = 0.0
    rss_bytes: dict[str, list[int]] = field(default_factory=dict)
    blocks: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Free blocks and all blocks at the end, by worker."""


def churn(
    url: str, admin_url: str, model: str, cycles: int, shape: Shape, say: Say
) -> tuple[Churned, Tally]:
    """Merge all groups and split them again `cycles` times under load; waits for rest at the end.

    Raises:
        SystemUnavailable: if the cluster does not tell its status.
    """
    done = Churned(cycles)
    started_s = monotonic_s()
    with SteadyLoad(url, model, shape) as load:
        time.sleep(PAUSE_S)
        try:
            for cycle in range(cycles):
                say(f"cycle {cycle + 1} of {cycles}, {load.tally.ended} requests have ended")
                done.refused += change_groups(admin_url, MERGE_PATH, CHANGE_TIMEOUT_S)
                done.merges += 1
                time.sleep(PAUSE_S)
                done.refused += change_groups(admin_url, SPLIT_PATH, CHANGE_TIMEOUT_S)
                done.splits += 1
                time.sleep(PAUSE_S)
                _note_memory(admin_url, done)
        except ChangeFailed as error:
            done.failure = f"change {done.merges + done.splits + 1} failed: {error}"
        say("waiting for the last requests")
    done.duration_s = monotonic_s() - started_s
    _await_rest(admin_url, done)
    return done, load.tally


def judge(done: Churned, tally: Tally, audited: Audited) -> TrialVerdict:
    """Figures, and a problem for every property that did not hold."""
    problems = [done.failure] if done.failure else []
    problems += tally.problems() + _memory_problems(done)
    problems += audited.problems
    figures = {
        "cycles": done.wanted,
        "merges": done.merges,
        "splits": done.splits,
        "changes_refused_at_first": done.refused,
        "duration_s": done.duration_s,
        "requests": {name: getattr(tally, name) for name in REQUEST_COUNTS},
        "rss_bytes": {name: _tenths(values) for name, values in done.rss_bytes.items()},
        "kv_blocks_free_and_total": done.blocks,
        "replayed": {
            name: {"events": one.events, "decisions": one.decisions}
            for name, one in audited.replayed.items()
        },
        "invariants_checked": audited.checks,
        "violations": audited.findings.broken,
        "problems": problems,
    }
    return TrialVerdict(figures, _rows(done, tally, audited), problems)


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Start a cluster that keeps event logs, change its groups, and audit the logs."""
    cycles = choice.cycles or (QUICK_CYCLES if choice.quick else FULL_CYCLES)
    with tempfile.TemporaryDirectory(prefix="tideserve-churn-") as folder:
        logs = Path(folder) / "events"
        log = {"event_log": str(logs)}
        options = {
            # The cluster makes only the changes that are asked for.
            "overload_policy": "recompute",
            "worker": {"profile_when_idle": False} | log,
            "memmgr": log,
            "scheduler": log,
            "gateway": log,
        }
        options = dict(deployment.options) | options
        system = Tideserve("tideserve", (), replace(deployment, options=options))
        try:
            system.start(say)
            shape = Shape(seed=choice.seed)
            done, tally = churn(
                system.urls[0], system.admin_url, system.model, cycles, shape, progress
            )
            progress("replaying and auditing the event logs")
            audited = audit_logs(logs)
        finally:
            system.stop()
    return judge(done, tally, audited)


# --- looking at the cluster


def _note_memory(url: str, done: Churned) -> None:
    for worker in read_status(url)["workers"]:
        rss_bytes = sum(psutil.Process(pid).memory_info().rss for pid in worker["pids"])
        done.rss_bytes.setdefault(worker["id"], []).append(rss_bytes)


def _await_rest(url: str, done: Churned) -> None:
    """Wait until no worker has a request, for a while, and note how many blocks are free."""
    deadline_s = monotonic_s() + REST_TIMEOUT_S
    while True:
        workers = read_status(url)["workers"]
        done.blocks = {
            one["id"]: (int(one["kv_blocks_free"]), int(one["kv_blocks_total"])) for one in workers
        }
        idle = bool(workers) and not any(one["running"] or one["waiting"] for one in workers)
        at_rest = idle and all(free == total > 0 for free, total in done.blocks.values())
        if at_rest or monotonic_s() > deadline_s:
            return
        time.sleep(POLL_S)


# --- judging


def _memory_problems(done: Churned) -> list[str]:
    problems = [
        f"{name} has {total - free} of {total} blocks in use at rest"
        for name, (free, total) in done.blocks.items()
        if free != total
    ]
    for name, values in done.rss_bytes.items():
        tenths = _tenths(values)
        if tenths["last"] > (1 + RSS_GROWTH_MAX) * tenths["first"]:
            problems.append(
                f"{name} grew from {_mebibytes(tenths['first'])} to {_mebibytes(tenths['last'])}"
            )
    return problems


def _tenths(values: Sequence[int]) -> dict[str, int]:
    """Median of the first and of the last tenth of the cycles, in bytes."""
    count = max(1, len(values) // 10)
    return {"first": int(median(values[:count])), "last": int(median(values[-count:]))}


def _mebibytes(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"


def _rows(done: Churned, tally: Tally, audited: Audited) -> list[tuple[str, str]]:
    rows = [
        ("merges / splits", f"{done.merges} / {done.splits} in {done.duration_s:,.0f} s"),
        ("refused at first and repeated", str(done.refused)),
        ("requests sent / completed", f"{tally.sent:,} / {tally.completed:,}"),
        ("hung up / refused", f"{tally.hung_up:,} / {tally.refused:,}"),
        ("lost / duplicated / stuck", f"{tally.lost} / {tally.duplicated} / {tally.stuck}"),
    ]
    for name, values in done.rss_bytes.items():
        tenths = _tenths(values)
        text = f"{_mebibytes(tenths['first'])} → {_mebibytes(tenths['last'])}"
        rows.append((f"resident memory of {name}, first and last tenth", text))
    rows += [
        (f"free blocks of {name} at rest", f"{free} of {total}")
        for name, (free, total) in done.blocks.items()
    ]
    decisions = sum(one.decisions for one in audited.replayed.values())
    same = not any(one.difference for one in audited.replayed.values())
    rows += [
        ("decisions replayed", f"{decisions:,}, {'identical' if same else 'not all alike'}"),
        (
            "invariants checked",
            ", ".join(f"{one} {count:,}×" for one, count in audited.checks.items()),
        ),
        ("violations", str(audited.findings.broken)),
    ]
    return rows


TRIAL = Trial(
    name="churn",
    summary="merges and splits in a row under load: requests, memory, invariants I1-I11",
    memory="32MiB",
    run=run,
    gpu_memory="256MiB",
    cycled=True,
)
