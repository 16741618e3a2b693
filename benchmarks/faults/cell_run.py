"""Runs one cell: an undisturbed run, then the same streams with the fault, then a look around."""

import tempfile
import time
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path

from benchmarks.audit_logs import Audited, audit_logs
from benchmarks.faults.cluster import POLL_S, FaultCluster, StableWatch
from benchmarks.faults.judge import CellSeen, CellVerdict, judge_cell
from benchmarks.faults.kept_logs import keep_logs
from benchmarks.faults.matrix import FAULTS, PHASES, FaultCell
from benchmarks.faults.streams import (
    STALL_S,
    Streams,
    sent,
    stream_requests,
    undisturbed_answers,
)
from benchmarks.systems.system import Deployment, Say
from benchmarks.undisturbed import Undisturbed
from services.common.clock import monotonic_s
from tideserve.load.workload import PlannedRequest

STREAMS = 40
"""More than must be running when the fault begins: some have ended by then."""
PROBES_PER_WORKER = 2
BEGIN_TIMEOUT_S = 60.0
WHOLE_TIMEOUT_S = 180.0
"""A worker that is started anew loads torch, which takes long on a busy machine."""
REST_TIMEOUT_S = 30.0


UndisturbedRuns = MutableMapping[int, list[Undisturbed]]
"""By seed, the answers of its streams in a run without a fault."""


def run_cell(
    deployment: Deployment,
    cell: FaultCell,
    seed: int,
    undisturbed: UndisturbedRuns,
    kept: Path,
    say: Say,
) -> CellVerdict:
    """Run a cell on a cluster of its own; below `kept` are the logs if anything was wrong.

    Streams whose seed is not in `undisturbed` run without a fault first, on the same cluster.

    Raises:
        SystemUnavailable: if the cluster does not even start, or fails without a fault.
    """
    with tempfile.TemporaryDirectory(prefix="tideserve-faults-") as folder:
        cluster = FaultCluster(deployment, cell, Path(folder))
        try:
            say(f"{cell.name}: starting a cluster")
            cluster.start(lambda _: None)
            seen = _run(cluster, seed, undisturbed, lambda text: say(f"{cell.name}: {text}"))
            verdict = judge_cell(seen)
            if verdict.problems or not verdict.hit:
                target = kept / cell.name.replace("/", "-")
                verdict.logs = keep_logs(Path(folder), cluster.logs, target)
        finally:
            cluster.stop()
    return verdict


def _run(cluster: FaultCluster, seed: int, undisturbed: UndisturbedRuns, say: Say) -> CellSeen:
    cell, phase = cluster.cell, PHASES[cluster.cell.phase]
    requests = stream_requests(STREAMS, seed, batch=phase.batch)
    cluster.note_workers()
    if seed not in undisturbed:
        say("an undisturbed run")
        online = stream_requests(STREAMS, seed)  # so that nothing is interrupted, nor rests
        undisturbed[seed] = undisturbed_answers(cluster.url, cluster.model, online)
    if phase.merged:
        cluster.change("merge")
        _await(cluster.whole, WHOLE_TIMEOUT_S)
    say("the streams begin")
    streams = Streams(cluster.url, cluster.model, requests, "disturbed", STALL_S)
    streams.start()
    if phase.change:
        _await(lambda: streams.begun == STREAMS or not streams.running, BEGIN_TIMEOUT_S)
        cluster.begin_change(phase.change)
    hit_s = cluster.await_hit_s(lambda: streams.running)
    seen = CellSeen(cell, hit_s, undisturbed[seed], ())
    if hit_s is None:
        seen.outcomes = streams.wait()
    else:
        _follow(cluster, seen, streams, requests, hit_s, say)
    say("auditing the event logs")
    _note_audit(seen, audit_logs(cluster.events, cluster.killed, cluster.stopped_until_s()))
    return seen


def _follow(
    cluster: FaultCluster,
    seen: CellSeen,
    streams: Streams,
    requests: Sequence[PlannedRequest],
    hit_s: float,
    say: Say,
) -> None:
    """Act, if that is left to the bench, and note what follows until the cluster is at rest."""
    say("the fault has begun")
    ends_s = max(cluster.act(), hit_s + FAULTS[seen.cell.fault].lasts_s)
    time.sleep(max(0.0, ends_s - monotonic_s()))
    watch = StableWatch(cluster.stable)
    seen.outcomes = streams.wait()
    ended_s = max(one.ended_s for one in seen.outcomes)
    seen.blocks_free_s = _blocks_free_s(cluster, ended_s)
    say("waiting for all workers")
    if _await(cluster.whole, WHOLE_TIMEOUT_S) is not None:
        seen.whole_s = max(0.0, monotonic_s() - ends_s)
        say("do all workers serve?")
        probes = requests[: PROBES_PER_WORKER * seen.cell.size]
        seen.probed = sent(cluster.url, cluster.model, probes, "probes")
        if _blocks_free_s(cluster, monotonic_s()) is None:
            seen.blocks_free_s = None
    stable_since_s = watch.end()
    seen.stable_s = None if stable_since_s is None else max(0.0, stable_since_s - ends_s)


def _blocks_free_s(cluster: FaultCluster, since_s: float) -> float | None:
    if _await(cluster.blocks_free, REST_TIMEOUT_S) is None:
        return None
    return monotonic_s() - since_s


def _await(condition: Callable[[], bool], timeout_s: float) -> float | None:
    """Seconds until it holds; None if it does not in time."""
    began_s = monotonic_s()
    while not condition():
        if monotonic_s() - began_s > timeout_s:
            return None
        time.sleep(POLL_S)
    return monotonic_s() - began_s


def _note_audit(seen: CellSeen, audited: Audited) -> None:
    """What the logs show: broken invariants, replays that decide otherwise, empty checks."""
    seen.broken = audited.problems
    seen.violations = audited.findings.broken + len(audited.differing) + len(audited.unchecked)
