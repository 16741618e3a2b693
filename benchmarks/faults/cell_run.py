"""Run a cell: an undisturbed run, the same streams with the fault, checks of the idle cluster."""

import json
import os
import signal
import threading
import time
import urllib.request
from base64 import b64encode
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults.cluster import (
    BY_HAND,
    POLL_S,
    FaultCluster,
    StableWatch,
    await_true,
    running_cluster,
)
from benchmarks.faults.judge import CellSeen, CellVerdict, judge_cell
from benchmarks.faults.load import Streams, stream_requests, undisturbed_answers
from benchmarks.faults.matrix import (
    CALM_AT_ONCE,
    FAULTS,
    MOVE,
    MOVED_AT_ONCE,
    PHASES,
    FaultCell,
)
from benchmarks.faults.outcomes import Undisturbed
from benchmarks.group_changes import (
    MERGE_PATH,
    SPLIT_PATH,
    ChangeFailed,
    change_groups,
    move_requests,
)
from benchmarks.systems.system import Deployment, Say
from services.common.clock import monotonic_s
from services.common.failpoint import (
    HOLD,
    HOLD_MAX_S,
    KILL,
    KILL_PARENT,
    KILL_WORKER,
    STOP,
    STOP_WORKER,
    read_hits,
)
from tideserve.cli.errors import SystemUnavailable
from tideserve.load.workload import PlannedRequest

STREAMS = 40
"""More streams than must be running at the fault, since some end before it."""
PROBES_PER_WORKER = 2
BEGIN_TIMEOUT_S = 60.0
WHOLE_TIMEOUT_S = 180.0
"""A restarted worker imports torch, which is slow on a busy machine."""
REST_TIMEOUT_S = 30.0
WATCH_S = 0.005
ETCD_TIMEOUT_S = 5.0
PATHS = {"merge": MERGE_PATH, "split": SPLIT_PATH}
CLASSES: Mapping[str, Any] = {
    "scheduler": {"scheduling": "priority"},
    "worker": {"scheduling": "priority", "preempt": "always"},
}
"""Options under which batch work yields to online requests."""
UndisturbedRuns = MutableMapping[int, list[Undisturbed]]
"""Answers of an undisturbed run, by seed of its streams."""


def run_cell(
    deployment: Deployment,
    cell: FaultCell,
    seed: int,
    undisturbed: UndisturbedRuns,
    kept: Path,
    say: Say,
) -> CellVerdict:
    """Run a cell on its own cluster; if there were problems, keep the logs below `kept`.

    If `undisturbed` lacks the seed, its streams first run without the fault on the same cluster.

    Raises:
        SystemUnavailable: if the cluster does not start, or fails without a fault.
    """
    phase = PHASES[cell.phase]
    options = {**BY_HAND, **(CLASSES if phase.batch else {}), **phase.options}
    say(f"{cell.name}: starting a cluster")
    with running_cluster(
        deployment, cell.size, options, lambda _: None, failpoints=[cell.armed]
    ) as cluster:
        run = CellRun(cluster, cell, lambda text: say(f"{cell.name}: {text}"))
        verdict = judge_cell(run.seen(seed, undisturbed))
        if verdict.problems or not verdict.hit:
            verdict.logs = cluster.keep_logs(kept / cell.name.replace("/", "-"))
    return verdict


class CellRun:
    """Injects the fault of a cell into its cluster and observes the effects."""

    def __init__(self, cluster: FaultCluster, cell: FaultCell, say: Say) -> None:
        self._cluster = cluster
        self._cell = cell
        self._phase, self._fault = PHASES[cell.phase], FAULTS[cell.fault]
        self._say = say
        self._killed: list[int] = []  # killed by the benchmark itself
        self._over = threading.Event()
        self._pids = {str(row["id"]): frozenset(row["pids"]) for row in cluster.status()["workers"]}

    def seen(self, seed: int, undisturbed: UndisturbedRuns) -> CellSeen:
        """Run the cell and audit the logs."""
        cluster, phase = self._cluster, self._phase
        requests = stream_requests(STREAMS, seed, batch=phase.batch)
        if seed not in undisturbed:
            self._say("an undisturbed run")
            online = stream_requests(STREAMS, seed)  # batch work would be interrupted or parked
            at_once = CALM_AT_ONCE if phase.crowded else None
            undisturbed[seed] = undisturbed_answers(cluster.url, cluster.model, online, at_once)
        if phase.merged:
            cluster.merge()
        self._say("starting the streams")
        streams = Streams(cluster.url, cluster.model, requests, "disturbed")
        streams.start()
        if phase.change:
            await_true(lambda: streams.begun == STREAMS or not streams.running, BEGIN_TIMEOUT_S)
            threading.Thread(target=self._change, daemon=True).start()
        hit_s = self._await_hit_s(streams)
        seen = CellSeen(self._cell, hit_s, undisturbed[seed], ())
        if hit_s is None:
            seen.outcomes = streams.wait()
        else:
            self._follow(seen, streams, requests[: PROBES_PER_WORKER * self._cell.size], hit_s)
        self._over.set()
        self._say("auditing the event logs")
        audited = cluster.audit(self._killed, self._stopped_until_s())
        seen.broken, seen.violations = audited.problems, audited.violations
        # With their gateway, requests end at once: none arrives at another worker to be checked.
        if phase.checks and not (
            self._fault.kills_gateway or audited.findings.checks[phase.checks]
        ):
            seen.broken = [*seen.broken, f"no log entry checks {phase.checks}"]
        return seen

    def _follow(
        self,
        seen: CellSeen,
        streams: Streams,
        probes: Sequence[PlannedRequest],
        hit_s: float,
    ) -> None:
        """Inject the benchmark's part of the fault; record the effects until idle."""
        cluster = self._cluster
        self._say("the fault has begun")
        ends_s = max(self._act(), hit_s + self._fault.lasts_s)
        time.sleep(max(0.0, ends_s - monotonic_s()))
        # Watch while the streams still run: survivors must be stable without waiting for the load.
        watch = StableWatch(lambda: cluster.stable(self._survivors()))
        seen.outcomes = streams.wait()
        seen.blocks_free_s = self._blocks_free_s(max(outcome.ended_s for outcome in seen.outcomes))
        self._say("waiting for all workers")
        if await_true(lambda: cluster.stable(self._pids), WHOLE_TIMEOUT_S):
            seen.whole_s = max(0.0, monotonic_s() - ends_s)
            self._say("checking that all workers serve")
            # The probes also check that restarted workers serve.
            after = Streams(cluster.url, cluster.model, probes, "probes")
            after.start()
            seen.probed = after.wait()
            if self._blocks_free_s(monotonic_s()) is None:
                seen.blocks_free_s = None
        stable_since_s = watch.end()
        seen.stable_s = None if stable_since_s is None else max(0.0, stable_since_s - ends_s)

    def _blocks_free_s(self, since_s: float) -> float | None:
        return monotonic_s() - since_s if self._cluster.rests(REST_TIMEOUT_S) else None

    def _change(self) -> None:
        """Request the change of the phase until the failpoint is hit.

        The cluster refuses a change right after another change. Moves are repeated, since an order
        moves a few requests.
        """
        while not self._hits():
            try:
                if self._phase.change == MOVE:
                    source, target = self._cluster.workers[:2]
                    move_requests(self._cluster.admin_url, source, target, MOVED_AT_ONCE)
                else:
                    change_groups(self._cluster.admin_url, PATHS[self._phase.change], 0.0)
                    return
            except ChangeFailed:
                pass
            if self._over.wait(POLL_S):
                return

    def _hits(self) -> list[dict[str, Any]]:
        return read_hits(self._cluster.hits)

    def _await_hit_s(self, streams: Streams) -> float | None:
        """When the failpoint was hit; None if all streams ended before."""
        while True:
            running = streams.running
            for hit in self._hits():
                return float(hit["monotonic_s"])
            if not running:
                return None
            time.sleep(WATCH_S)

    def _act(self) -> float:
        """Inject the benchmark's part of the fault, if any; returns when the fault ends.

        The process that hit the failpoint is held until the fault has begun.
        """
        fault, pids = self._fault, self._cluster.pids
        await_stopped([int(hit["pid"]) for hit in self._hits() if hit["action"] == HOLD])
        ends_s = monotonic_s() + fault.lasts_s
        match fault.by_hand:
            # In each case, inject the fault before the held process continues, so that it meets the
            # fault.
            case "etcd-stop":
                os.kill(pids["etcd"], signal.SIGSTOP)
                self._let_go()
                time.sleep(fault.lasts_s)
                os.kill(pids["etcd"], signal.SIGCONT)
            case "etcd-compact":
                url = self._cluster.state["etcd_url"]
                forget_history(url)
                self._let_go()
                # A single compaction may miss the moment in which a watch is opened.
                while monotonic_s() < ends_s:
                    forget_history(url)
            case "etcd-kill" | "gateway-kill" | "memmgr-kill" | "scheduler-kill" as kill:
                pid = pids[kill.removesuffix("-kill")]
                self._killed.append(pid)
                os.kill(pid, signal.SIGKILL)
                self._let_go()
        return max(monotonic_s(), ends_s)

    def _let_go(self) -> None:
        for hit in self._hits():
            os.kill(int(hit["pid"]), signal.SIGCONT)

    def _survivors(self) -> list[str]:
        """The workers that survive the fault."""
        ends = self._fault.action in (KILL, KILL_PARENT, KILL_WORKER)
        struck = {hit["pid"] for hit in self._hits()} if ends else set()
        return [name for name, pids in self._pids.items() if not pids & struck]

    def _stopped_until_s(self) -> dict[str, float]:
        """The workers that the fault suspends, and the end of the suspension."""
        if self._fault.action not in (STOP, STOP_WORKER):
            return {}
        ends_s = {hit["pid"]: hit["monotonic_s"] + self._fault.lasts_s for hit in self._hits()}
        return {
            name: max(ends_s[pid] for pid in struck)
            for name, pids in self._pids.items()
            if (struck := pids & ends_s.keys())
        }


def await_stopped(pids: Collection[int]) -> None:
    """Return once each process is suspended or gone, after `HOLD_MAX_S` at the latest.

    A held process records its hit before it suspends itself: a SIGCONT sent in between is lost, and
    the process stays suspended for the whole hold.
    """
    ends_s = monotonic_s() + HOLD_MAX_S
    while monotonic_s() < ends_s and any(map(_runs, pids)):
        time.sleep(WATCH_S / 5)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def forget_history(etcd_url: str) -> None:
    """Write a key to etcd and compact all earlier revisions. Raises SystemUnavailable.

    An open watch misses nothing. A watch about to start from the revision of a listing, as after
    each change, is refused; hence compaction must be repeated to have an effect.
    """
    key, value = (b64encode(text).decode() for text in (b"/tideserve-bench", b""))
    response = _etcd(etcd_url, "kv/put", {"key": key, "value": value})
    _etcd(etcd_url, "kv/compaction", {"revision": response["header"]["revision"]})


def _etcd(url: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{url}/v3/{path}", data=json.dumps(body).encode())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ETCD_TIMEOUT_S) as response:
            answer: dict[str, Any] = json.load(response)
    except (OSError, ValueError) as error:
        raise SystemUnavailable(f"etcd at {url} does not answer {path}: {error}") from error
    return answer
