"""A cluster that is disturbed: its status, changes of its groups, its logs."""

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
"""A worker that is started anew loads torch, on a machine that serves."""
POLL_S = 0.1
Status = Mapping[str, Any]
BY_HAND = {"overload_policy": "recompute", "memmgr": {"split_dwell_s": RESTORE_OFF_S}}
"""Options of a cluster that makes only the changes of groups that are asked for.

It does not merge by itself, and does not split when requests have ended.
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
        """`options` are more options of `tideserve up`; `folder` gets event logs and hits."""
        self.folder, self.hits = folder, folder / "hits.jsonl"
        services: dict[str, Any] = {"event_log": str(folder / "events")}
        if failpoints:
            services |= {"failpoints": failpoints, "failpoint_file": str(self.hits)}
        every = dict(deployment.options) | dict(options) | {"services": services}
        super().__init__("tideserve", (), replace(deployment, options=every, workers=workers))

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return self.urls[0]

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids by the names of its processes."""
        pids: Mapping[str, int] = self.state["pids"]
        return pids

    @property
    def workers(self) -> list[str]:
        """The names of its workers, of those that are down, too."""
        return [name for name in self.pids if name.startswith("worker-")]

    def status(self) -> Status:
        """See `read_status`. Raises SystemUnavailable."""
        return read_status(self.admin_url)

    def holds(self, condition: Callable[[Status], bool]) -> bool:
        """Whether the cluster reports a status that fulfils the condition."""
        try:
            return condition(self.status())
        except SystemUnavailable:
            return False

    def stable(self, workers: Collection[str], killed: Collection[int] = ()) -> bool:
        """See `is_stable`; processes that were `killed` a moment ago may still be there."""
        return self.holds(lambda status: is_stable(status, workers, alive_but(killed)))

    def merge(self) -> None:
        """Merge all groups; return once the merged group is stable. Raises SystemUnavailable."""
        try:
            change_groups(self.admin_url, MERGE_PATH, CHANGE_TIMEOUT_S)
        except ChangeFailed as error:
            raise SystemUnavailable(f"the groups do not merge: {error}") from error
        if not await_true(lambda: self.stable(self.workers), WHOLE_TIMEOUT_S):
            raise SystemUnavailable("the merged group does not settle")

    def rests(self, timeout_s: float) -> bool:
        """Wait until no request has a block; whether that is so in time."""
        return await_true(lambda: self.holds(blocks_free), timeout_s)

    def audit(
        self, killed: Collection[int] = (), stopped_until_s: Mapping[str, float] | None = None
    ) -> Audited:
        """See `audit_logs`."""
        return audit_logs(self.folder / "events", killed, stopped_until_s)

    def keep_logs(self, target: Path) -> Path:
        """Copy the event logs and the logs of the processes to `target`; returns it."""
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.folder, target)
        shutil.copytree(self.state["logs"], target / "logs")
        return target

    def keep_if(self, problems: Sequence[str], scenario: str, say: Say) -> None:
        """Keep the logs of a run in which something was wrong, and say where."""
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
    """A cluster with a folder of its own. Raises SystemUnavailable if it does not start."""
    with tempfile.TemporaryDirectory(prefix="tideserve-faults-") as folder:
        cluster = FaultCluster(deployment, workers, Path(folder), options, failpoints)
        try:
            cluster.start(say)
            yield cluster
        finally:
            cluster.stop()


def logs_folder(scenario: str, file: Path | None = None) -> Path:
    """The folder for kept logs, which is not made: beside `file`, else a temporary one."""
    if file is not None:
        return file.with_suffix(".logs")
    return Path(tempfile.gettempdir(), f"tideserve-{scenario}-{os.getpid()}.logs")


def await_true(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether the condition holds in time."""
    deadline_s = monotonic_s() + timeout_s
    while not condition():
        if monotonic_s() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def alive_but(killed: Collection[int]) -> Callable[[int], bool]:
    """Whether a process is there, and none of the `killed` ones."""
    return lambda pid: pid not in killed and psutil.pid_exists(pid)


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


def is_stable(
    status: Mapping[str, Any], survivors: Collection[str], is_alive: Callable[[int], bool]
) -> bool:
    """Whether all survivors serve, and no record is left of what was lost or is under way.

    A survivor serves if it is in one group, at that group's epoch. A worker that was started anew
    may have no group yet.
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
        worker["kv_blocks_free"] == worker["kv_blocks_total"] > 0 for worker in workers
    )
