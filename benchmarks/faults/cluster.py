"""The cluster of one cell: started with a failpoint armed, changed, and looked at."""

import json
import os
import signal
import threading
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults.matrix import FAULTS, PHASES, FaultCell
from benchmarks.group_changes import MERGE_PATH, SPLIT_PATH, ChangeFailed, change_groups
from benchmarks.systems.cluster_status import read_status
from benchmarks.systems.system import Deployment, Say
from benchmarks.systems.tideserve import RESTORE_OFF_S, Tideserve
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

CHANGE_TIMEOUT_S = 60.0
POLL_S = 0.1
WATCH_S = 0.005
ETCD_TIMEOUT_S = 5.0
PATHS = {"merge": MERGE_PATH, "split": SPLIT_PATH}


class FaultCluster:
    """A cluster of the cell's size; use it as a context manager."""

    def __init__(self, deployment: Deployment, cell: FaultCell, folder: Path) -> None:
        """`folder` gets the event logs and the file of hits."""
        self.cell = cell
        self.killed: list[int] = []  # by the bench itself
        self.events = folder / "events"
        self._hits = folder / "hits.jsonl"
        common = {
            "event_log": str(self.events),
            "failpoints": [cell.armed],
            "failpoint_file": str(self._hits),
        }
        self._over = threading.Event()
        self._workers: dict[str, frozenset[int]] = {}
        self._system = changed_by_hand(
            deployment, cell.size, common, classes=PHASES[cell.phase].batch > 0
        )

    def start(self, say: Say) -> None:
        """Return once it serves. Raises SystemUnavailable."""
        self._system.start(say)

    def stop(self) -> None:
        """End it."""
        self._over.set()
        self._system.stop()

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return self._system.urls[0]

    @property
    def model(self) -> str:
        """The name of its model."""
        return self._system.model

    @property
    def logs(self) -> Path:
        """The folder of its processes' logs, while it runs."""
        return Path(self._system.state["logs"])

    def change(self, kind: str) -> None:
        """Merge or split all groups, and wait. Raises SystemUnavailable."""
        try:
            change_groups(self._system.admin_url, PATHS[kind], CHANGE_TIMEOUT_S)
        except ChangeFailed as error:
            raise SystemUnavailable(f"the groups do not {kind}: {error}") from error

    def begin_change(self, kind: str) -> None:
        """Ask for a change and go on; a fault comes into it, so that its answer says nothing."""
        asked = (self._system.admin_url, PATHS[kind])
        threading.Thread(target=self._ask, args=asked, daemon=True).start()

    def _ask(self, url: str, path: str) -> None:
        """Ask until the fault comes: right after another change, a change is refused."""
        while not read_hits(self._hits):
            try:
                change_groups(url, path, 0.0)
            except ChangeFailed:
                if self._over.wait(POLL_S):
                    return
            else:
                return

    def await_hit_s(self, while_true: Callable[[], bool]) -> float | None:
        """When the failpoint was hit; None if it has not been once that is not true any more."""
        while True:
            goes_on = while_true()
            for one in read_hits(self._hits):
                return float(one["monotonic_s"])
            if not goes_on:
                return None
            time.sleep(WATCH_S)

    def act(self) -> float:
        """The bench's own part in the fault, if it has one; returns when the fault ends.

        The process that has hit the failpoint stands still until the fault has begun.
        """
        fault = FAULTS[self.cell.fault]
        held = [int(one["pid"]) for one in read_hits(self._hits) if one["action"] == HOLD]
        await_stopped(held)
        ends_s = monotonic_s() + fault.lasts_s
        match fault.by_hand:
            case "etcd-stop":
                pid = self._pid("etcd")
                os.kill(pid, signal.SIGSTOP)
                self._let_go()
                time.sleep(fault.lasts_s)
                os.kill(pid, signal.SIGCONT)
            case "etcd-compact":
                url = self._system.state["etcd_url"]
                forget_history(url)
                self._let_go()
                while monotonic_s() < ends_s:
                    forget_history(url)
            case "etcd-kill" | "gateway-kill" | "memmgr-kill" as kill:
                pid = self._pid(kill.removesuffix("-kill"))
                self.killed.append(pid)
                os.kill(pid, signal.SIGKILL)
                self._let_go()
        return max(monotonic_s(), ends_s)

    def _let_go(self) -> None:
        for one in read_hits(self._hits):
            os.kill(int(one["pid"]), signal.SIGCONT)

    def note_workers(self) -> None:
        """Remember the processes, of which the fault may end some. Raises SystemUnavailable."""
        rows = read_status(self._system.admin_url)["workers"]
        self._workers = {one["id"]: frozenset(one["pids"]) for one in rows}

    def survivors(self) -> frozenset[str]:
        """The workers that the fault does not end."""
        ends = FAULTS[self.cell.fault].action in (KILL, KILL_PARENT, KILL_WORKER)
        struck = {one["pid"] for one in read_hits(self._hits)} if ends else set()
        return frozenset(name for name, pids in self._workers.items() if not pids & struck)

    def stopped_until_s(self) -> dict[str, float]:
        """The workers that the fault has stopped, and until when."""
        fault = FAULTS[self.cell.fault]
        if fault.action not in (STOP, STOP_WORKER):
            return {}
        ends_s = {one["pid"]: one["monotonic_s"] + fault.lasts_s for one in read_hits(self._hits)}
        return {
            name: max(ends_s[pid] for pid in struck)
            for name, pids in self._workers.items()
            if (struck := pids & ends_s.keys())
        }

    def stable(self) -> bool:
        """Whether all survivors serve, and all records are settled."""
        return self._is_stable(self.survivors())

    def whole(self) -> bool:
        """Whether all workers serve, also those that were started anew."""
        return self._is_stable(self._workers)

    def _is_stable(self, workers: Collection[str]) -> bool:
        status = self._status()
        return status is not None and is_stable(status, workers, psutil.pid_exists)

    def blocks_free(self) -> bool:
        """Whether no request has a block."""
        status = self._status()
        return status is not None and blocks_free(status)

    def _pid(self, name: str) -> int:
        return int(self._system.state["pids"][name])

    def _status(self) -> Mapping[str, Any] | None:
        try:
            return read_status(self._system.admin_url)
        except SystemUnavailable:
            return None


def await_stopped(pids: Collection[int]) -> None:
    """Return when each of the processes stands still or is gone, in `HOLD_MAX_S` at the latest.

    A process that holds notes its hit first, and starts what ends the hold: a signal to go on that
    comes in between is lost, and it stands still for the whole of that time.
    """
    ends_s = monotonic_s() + HOLD_MAX_S
    while monotonic_s() < ends_s and any(map(_runs, pids)):
        time.sleep(WATCH_S / 5)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class StableWatch:
    """Looks again and again, so that a cluster that seems stable for a moment is not taken for it.

    Until others notice it, the loss of a worker changes nothing in the records.
    """

    def __init__(self, stable: Callable[[], bool]) -> None:
        self._stable = stable
        self._stop = threading.Event()
        self._since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="stable watch", daemon=True)
        self._thread.start()

    def end(self) -> float | None:
        """Since when it has been stable without a break, on the monotonic clock.

        It looks once more before: whoever has just seen that it is stable may have been first.
        """
        self._stop.set()
        self._thread.join()
        self._look()
        return self._since_s

    def _run(self) -> None:
        while not self._stop.is_set():
            self._look()
            self._stop.wait(POLL_S)

    def _look(self) -> None:
        looked_s = monotonic_s()
        if not self._stable():
            self._since_s = None
        elif self._since_s is None:
            self._since_s = looked_s


def changed_by_hand(
    deployment: Deployment, workers: int, services: Mapping[str, Any], classes: bool = False
) -> Tideserve:
    """A cluster, not started, that makes only the changes of groups that are asked for.

    It does not merge by itself, and does not split when the streams have ended. `services` are
    options of all of them. With `classes`, batch work makes way for the others.
    """
    scheduling = {"scheduling": "priority"} if classes else {}
    preempt = {"preempt": "always"} if classes else {}
    options: dict[str, Any] = {
        "overload_policy": "recompute",
        "memmgr": {"split_dwell_s": RESTORE_OFF_S},
        "services": dict(services),
        "scheduler": scheduling,
        "worker": {"profile_when_idle": False, **scheduling, **preempt},
    }
    options = dict(deployment.options) | options
    return Tideserve("tideserve", (), replace(deployment, options=options, workers=workers))


def is_stable(
    status: Mapping[str, Any], survivors: Collection[str], is_alive: Callable[[int], bool]
) -> bool:
    """Whether all survivors serve, and no record is left of what was lost or is under way.

    A survivor serves if it is in one group, at that group's epoch. A worker that was started anew
    may have no group yet.
    """
    workers = {
        one["id"]: one for one in status["workers"] if all(is_alive(pid) for pid in one["pids"])
    }
    epochs: dict[str, list[int]] = {}
    for group in status["groups"]:
        if group["changing"] or group["degraded"]:
            return False
        for name in group["members"]:
            epochs.setdefault(name, []).append(group["epoch"])
    if not epochs.keys() <= workers.keys():
        return False
    return all(
        name in workers
        and epochs.get(name) == [workers[name]["epoch"]]
        and not workers[name]["unsettled"]
        for name in survivors
    )


def serve_alone(
    status: Mapping[str, Any], survivors: Collection[str], is_alive: Callable[[int], bool]
) -> bool:
    """Whether all survivors serve in groups without a lost member, whatever other records are left.

    Until its lease ends, the group of a lost worker that was alone stays in the records.
    """
    theirs = [
        group for group in status["groups"] if not set(survivors).isdisjoint(group["members"])
    ]
    return is_stable({**status, "groups": theirs}, survivors, is_alive)


def blocks_free(status: Mapping[str, Any]) -> bool:
    """Whether there are workers, and none has a block in use."""
    workers = status["workers"]
    return bool(workers) and all(
        one["kv_blocks_free"] == one["kv_blocks_total"] > 0 for one in workers
    )


def forget_history(etcd_url: str) -> None:
    """Have etcd write something and forget all revisions before it. Raises SystemUnavailable.

    A watch that is open misses nothing. One that is about to begin where a listing stood, as after
    each change, is refused. So this shows something only if it is done again and again.
    """
    key, value = (b64encode(text).decode() for text in (b"/tideserve-bench", b""))
    found = _etcd(etcd_url, "kv/put", {"key": key, "value": value})
    _etcd(etcd_url, "kv/compaction", {"revision": found["header"]["revision"]})


def _etcd(url: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{url}/v3/{path}", data=json.dumps(body).encode())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ETCD_TIMEOUT_S) as response:
            answer: dict[str, Any] = json.load(response)
    except (OSError, ValueError) as error:
        raise SystemUnavailable(f"etcd at {url} does not answer {path}: {error}") from error
    return answer
