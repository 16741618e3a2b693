"""The cluster of one cell: started with a failpoint armed, changed, and looked at."""

import json
import os
import signal
import threading
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from services.common.clock import monotonic_s
from services.common.failpoint import read_hits
from tideserve.bench.errors import SystemUnavailable
from tideserve.bench.faults.matrix import FAULTS, FaultCell
from tideserve.bench.group_changes import MERGE_PATH, SPLIT_PATH, ChangeFailed, change_groups
from tideserve.bench.systems.cluster_status import read_status
from tideserve.bench.systems.system import Deployment, Say
from tideserve.bench.systems.tideserve import Tideserve

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
        self.events = folder / "events"
        self._hits = folder / "hits.jsonl"
        common = {
            "event_log": str(self.events),
            "failpoints": [cell.armed],
            "failpoint_file": str(self._hits),
        }
        options: dict[str, Any] = {
            # The cluster makes only the changes that are asked for.
            "overload_policy": "recompute",
            "services": common,
            "worker": {"profile_when_idle": False},
        }
        options = dict(deployment.options) | options
        self._system = Tideserve(
            "tideserve", (), replace(deployment, options=options, workers=cell.size)
        )

    def start(self, say: Say) -> None:
        """Return once it serves. Raises SystemUnavailable."""
        self._system.start(say)

    def stop(self) -> None:
        """End it."""
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
        threading.Thread(target=self._ask, args=(kind,), daemon=True).start()

    def _ask(self, kind: str) -> None:
        """Ask until the fault comes: right after another change, a change is refused."""
        while not read_hits(self._hits):
            try:
                change_groups(self._system.admin_url, PATHS[kind], 0.0)
            except ChangeFailed:
                time.sleep(POLL_S)
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
        """The bench's own part in the fault, if it has one; returns when the fault ends."""
        fault = FAULTS[self.cell.fault]
        began_s = monotonic_s()
        match fault.by_hand:
            case "etcd-stop":
                pid = self._pid("etcd")
                os.kill(pid, signal.SIGSTOP)
                time.sleep(fault.lasts_s)
                os.kill(pid, signal.SIGCONT)
            case "etcd-compact":
                compact(self._system.state["etcd_url"])
            case "etcd-kill" | "gateway-kill" | "memmgr-kill" as kill:
                os.kill(self._pid(kill.removesuffix("-kill")), signal.SIGKILL)
        return max(monotonic_s(), began_s + fault.lasts_s)

    def stable(self) -> bool:
        """Whether all workers serve, and all records are settled."""
        status = self._status()
        return status is not None and is_stable(status, self.cell.size, psutil.pid_exists)

    def blocks_free(self) -> bool:
        """Whether no request has a block."""
        status = self._status()
        return status is not None and all(
            one["kv_blocks_free"] == one["kv_blocks_total"] > 0 for one in status["workers"]
        )

    def _pid(self, name: str) -> int:
        return int(self._system.state["pids"][name])

    def _status(self) -> Mapping[str, Any] | None:
        try:
            return read_status(self._system.admin_url)
        except SystemUnavailable:
            return None


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

    def await_stable(self, timeout_s: float) -> bool:
        """Wait until it is stable; False if it is not in time."""
        until_s = monotonic_s() + timeout_s
        while self._since_s is None and monotonic_s() < until_s:
            time.sleep(POLL_S)
        return self._since_s is not None

    def end(self) -> float | None:
        """Since when it has been stable without a break, on the monotonic clock."""
        self._stop.set()
        self._thread.join()
        return self._since_s

    def _run(self) -> None:
        while not self._stop.is_set():
            looked_s = monotonic_s()
            if not self._stable():
                self._since_s = None
            elif self._since_s is None:
                self._since_s = looked_s
            self._stop.wait(POLL_S)


def is_stable(status: Mapping[str, Any], size: int, is_alive: Callable[[int], bool]) -> bool:
    """Whether `size` living workers each are in one group that serves, at that group's epoch."""
    workers = {one["id"]: one for one in status["workers"]}
    members: Sequence[tuple[str, int]] = [
        (name, group["epoch"]) for group in status["groups"] for name in group["members"]
    ]
    if len(workers) != size or sorted(name for name, _ in members) != sorted(workers):
        return False
    if not all(is_alive(pid) for one in workers.values() for pid in one["pids"]):
        return False
    if any(group["changing"] or group["degraded"] for group in status["groups"]):
        return False
    return all(
        workers[name]["epoch"] == epoch and not workers[name].get("unsettled")
        for name, epoch in members
    )


def compact(etcd_url: str) -> None:
    """Have etcd forget all revisions but the present one. Raises SystemUnavailable."""
    found = _etcd(etcd_url, "kv/range", {"key": b64encode(b"/").decode()})
    revision = found["header"]["revision"]
    _etcd(etcd_url, "kv/compaction", {"revision": revision, "physical": True})


def _etcd(url: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{url}/v3/{path}", data=json.dumps(body).encode())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ETCD_TIMEOUT_S) as response:
            answer: dict[str, Any] = json.load(response)
    except (OSError, ValueError) as error:
        raise SystemUnavailable(f"etcd at {url} does not answer {path}: {error}") from error
    return answer
