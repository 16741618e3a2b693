"""A cluster under fault injection: its status, changes of its groups, its logs."""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.audit_logs import Audited, audit_logs
from benchmarks.group_changes import MERGE_PATH, ChangeFailed, change_groups
from benchmarks.systems.cluster_status import read_status
from benchmarks.systems.system import Deployment, Say
from benchmarks.systems.tideserve import RESTORE_OFF_S, Tideserve
from services.common.clock import monotonic_s
from tideserve.cli.errors import SystemUnavailable

CHANGE_TIMEOUT_S, WHOLE_TIMEOUT_S = 60.0, 120.0
"""A restarted worker imports torch on a machine that is serving."""
POLL_S = 0.1
Status = Mapping[str, Any]
BY_HAND = {"overload_policy": "recompute", "memmgr": {"split_dwell_s": RESTORE_OFF_S}}
"""Options of a cluster that changes its groups only on request.

It neither merges by itself nor splits when requests have ended.
"""


class FaultCluster(Tideserve):
    """A cluster whose processes keep event logs."""

    def __init__(
        self,
        deployment: Deployment,
        workers: int,
        folder: Path,
        options: Mapping[str, Any],
        failpoints: Sequence[str] = (),
    ) -> None:
        """`options`: further options of `tideserve up`; `folder` receives event logs and hits."""
        self.folder, self.hits = folder, folder / "hits.jsonl"
        services: dict[str, Any] = {"event_log": str(folder / "events")}
        if failpoints:
            services |= {"failpoints": failpoints, "failpoint_file": str(self.hits)}
        every = dict(deployment.options) | dict(options) | {"services": services}
        super().__init__("tideserve", (), replace(deployment, options=every, workers=workers))

    @property
    def url(self) -> str:
        """The gateway's URL."""
        return self.urls[0]

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids by process name."""
        pids: Mapping[str, int] = self.state["pids"]
        return pids

    @property
    def workers(self) -> list[str]:
        """The names of all workers, including those that are down."""
        return [name for name in self.pids if name.startswith("worker-")]

    def status(self) -> Status:
        """See `read_status`. Raises SystemUnavailable."""
        return read_status(self.admin_url)

    def holds(self, condition: Callable[[Status], bool]) -> bool:
        """Whether the cluster reports a status that satisfies the condition."""
        try:
            return condition(self.status())
        except SystemUnavailable:
            return False

    def stable(self, workers: Collection[str], killed: Collection[int] = ()) -> bool:
        """See `is_stable`; recently `killed` processes may still exist."""
        return self.holds(lambda status: is_stable(status, workers, alive_but(killed)))

    def merge(self) -> None:
        """Merge all groups; return once the merged group is stable. Raises SystemUnavailable."""
        try:
            change_groups(self.admin_url, MERGE_PATH, CHANGE_TIMEOUT_S)
        except ChangeFailed as error:
            raise SystemUnavailable(f"merging the groups failed: {error}") from error
        if not await_true(lambda: self.stable(self.workers), WHOLE_TIMEOUT_S):
            raise SystemUnavailable("the merged group does not settle")

    def rests(self, timeout_s: float) -> bool:
        """Wait until no KV block is in use; returns whether that happened within `timeout_s`."""
        return await_true(lambda: self.holds(blocks_free), timeout_s)

    def audit(
        self, killed: Collection[int] = (), stopped_until_s: Mapping[str, float] | None = None
    ) -> Audited:
        """See `audit_logs`."""
        return audit_logs(self.folder / "events", killed, stopped_until_s)

    def keep_logs(self, target: Path) -> Path:
        """Copy the event logs and process logs to `target`, which is returned."""
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.folder, target)
        shutil.copytree(self.state["logs"], target / "logs")
        return target

    def keep_if(self, problems: Sequence[str], scenario: str, say: Say) -> None:
        """Keep the logs of a run with problems, and report the folder."""
        if problems:
            say(f"logs: {self.keep_logs(logs_folder(scenario))}")


@contextmanager
def running_cluster(
    deployment: Deployment,
    workers: int,
    options: Mapping[str, Any],
    say: Say,
    failpoints: Sequence[str] = (),
) -> Iterator[FaultCluster]:
    """A cluster with its own folder. Raises SystemUnavailable if it does not start."""
    with tempfile.TemporaryDirectory(prefix="tideserve-faults-") as folder:
        cluster = FaultCluster(deployment, workers, Path(folder), options, failpoints)
        try:
            cluster.start(say)
            yield cluster
        finally:
            cluster.stop()


def logs_folder(scenario: str, file: Path | None = None) -> Path:
    """The folder for kept logs, not created: beside `file`, else a temporary folder."""
    if file is not None:
        return file.with_suffix(".logs")
    return Path(tempfile.gettempdir(), f"tideserve-{scenario}-{os.getpid()}.logs")


def await_true(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether the condition becomes true within `timeout_s`."""
    deadline_s = monotonic_s() + timeout_s
    while not condition():
        if monotonic_s() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def alive_but(killed: Collection[int]) -> Callable[[int], bool]:
    """A check that a process exists and is not among `killed`."""
    return lambda pid: pid not in killed and psutil.pid_exists(pid)


class StableWatch:
    """Polls whether the cluster is stable, so that a momentarily stable cluster does not count.

    The records show the loss of a worker only once other processes notice it.
    """

    def __init__(self, stable: Callable[[], bool]) -> None:
        self._stable = stable
        self._stop = threading.Event()
        self._since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="stable watch", daemon=True)
        self._thread.start()

    def end(self) -> float | None:
        """Start of the current stable period on the monotonic clock; None if unstable.

        Polls once more first: the caller may have seen the stable state before the watch did.
        """
        self._stop.set()
        self._thread.join()
        self._poll()
        return self._since_s

    def _run(self) -> None:
        while not self._stop.is_set():
            self._poll()
            self._stop.wait(POLL_S)

    def _poll(self) -> None:
        looked_s = monotonic_s()
        if not self._stable():
            self._since_s = None
        elif self._since_s is None:
            self._since_s = looked_s


def is_stable(
    status: Mapping[str, Any], survivors: Collection[str], is_alive: Callable[[int], bool]
) -> bool:
    """Whether all survivors serve and no record of lost members or pending changes is left.

    A survivor serves if it belongs to a single group, at that group's epoch. A restarted worker may
    have no group yet.
    """
    workers = {
        worker["id"]: worker
        for worker in status["workers"]
        if all(is_alive(pid) for pid in worker["pids"])
    }
    epochs: dict[str, list[int]] = {}
    for group in status["groups"]:
        if group["changing"] or group["degraded"]:
            return False
        for name in group["members"]:
            epochs.setdefault(name, []).append(group["epoch"])
    # A record still has a member whose processes are gone.
    if not epochs.keys() <= workers.keys():
        return False
    return all(
        name in workers
        # A worker in two groups, or at an old epoch, has not finished its change-over.
        and epochs.get(name) == [workers[name]["epoch"]]
        and not workers[name]["unsettled"]
        for name in survivors
    )


def serve_alone(
    status: Mapping[str, Any], survivors: Collection[str], is_alive: Callable[[int], bool]
) -> bool:
    """Whether all survivors serve in groups without lost members, regardless of other records.

    The group of a lost single worker stays in the records until its lease expires.
    """
    theirs = [
        group for group in status["groups"] if not set(survivors).isdisjoint(group["members"])
    ]
    return is_stable({**status, "groups": theirs}, survivors, is_alive)


def blocks_free(status: Mapping[str, Any]) -> bool:
    """Whether there are workers and none has a KV block in use."""
    workers = status["workers"]
    return bool(workers) and all(
        worker["kv_blocks_free"] == worker["kv_blocks_total"] > 0 for worker in workers
    )
