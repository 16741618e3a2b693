"""Starts, watches and stops the processes of a cluster. Main thread only.

Children request SIGKILL at the end of the thread that started them, so that must be the main
thread.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from services.common.clock import monotonic_s
from services.common.logging import JsonFormatter
from services.common.settings import PREFIX

TAIL_BYTES = 64 * 2**10
# Secrets of the operator. Services read their secrets from the configuration, and models are
# downloaded before any child starts.
NOT_INHERITED = frozenset(
    {
        "TIDESERVE_API_KEY",
        "TIDESERVE_ADMIN_KEY",
        "TIDESERVE_ETCD_PASSWORD",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
    }
)
KILLED = float("inf")
SUPERVISOR = "tideserve.up"


@dataclass(frozen=True, slots=True)
class Program:
    """The command and environment that start (and restart) a process."""

    name: str
    command: Sequence[str]
    log_path: Path
    folder: Path
    environment: Mapping[str, str]
    stop_grace_s: float


@dataclass(slots=True)
class ServiceProcess:
    """A process of the cluster, in its own session, so that no signal of the terminal reaches it.

    When the process has died, the rest of its session is killed.
    """

    program: Program
    _log: BinaryIO = field(init=False)
    _popen: subprocess.Popen[bytes] | None = None
    _log_start: int = 0
    _kill_at_s: float | None = field(default=None)

    def __post_init__(self) -> None:
        # Open it now: after a restart on a disk that became full or read-only, the log goes on.
        self._log = self.program.log_path.open("ab")

    @property
    def name(self) -> str:
        """Name of the process in the cluster."""
        return self.program.name

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._popen.pid if self._popen is not None else None

    def start(self) -> None:
        """Start the process; its output is appended to its log.

        Raises:
            OSError: if the program cannot be executed.
        """
        program = self.program
        self._log = _opened_again(program.log_path, self._log)
        self._log_start = self._log.seek(0, os.SEEK_END)
        self._popen = subprocess.Popen(
            program.command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=program.folder,
            env=program.environment,
            start_new_session=True,
        )
        self._kill_at_s = None

    def poll(self) -> int | None:
        """The exit code, returned once after the process has died; None otherwise."""
        if self._popen is None:
            return None
        pid = self._popen.pid
        # Do not reap yet: while the zombie exists, its group id cannot be reused.
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        _kill_group(pid, signal.SIGKILL)
        return_code = self._popen.wait()
        self._popen = None
        return return_code

    def ask_to_stop(self) -> None:
        """Send SIGTERM, so that the process drains; `enforce` kills it after its grace period."""
        if self._popen is not None and self._kill_at_s is None:
            # Not Popen.send_signal, which may reap the process before `poll` does.
            os.kill(self._popen.pid, signal.SIGTERM)
            self._kill_at_s = monotonic_s() + self.program.stop_grace_s

    def enforce(self, hurry: bool) -> bool:
        """Kill a stopping process after its grace period, or at once if `hurry`; True if killed."""
        if self._popen is None or self._kill_at_s is None:
            return False
        if self._kill_at_s == KILLED or (not hurry and monotonic_s() < self._kill_at_s):
            return False
        _kill_group(self._popen.pid, signal.SIGKILL)
        self._kill_at_s = KILLED
        return True

    def note(self, message: str) -> None:
        """Append a warning to the log of the process; ignored if the disk is full."""
        line = logging.LogRecord(SUPERVISOR, logging.WARNING, "", 0, message, None, None)
        with contextlib.suppress(OSError), self.program.log_path.open("a") as log:
            log.write(JsonFormatter().format(line) + "\n")

    def last_lines(self, count: int) -> list[str]:
        """The last lines of the process since its latest start."""
        return tail_lines(self.program.log_path, count, self._log_start)

    def close(self) -> None:
        """Close the log; the process cannot be started again."""
        self._log.close()


def _opened_again(path: Path, log: BinaryIO) -> BinaryIO:
    """The log at `path` if it can be opened, else `log`, which was opened earlier."""
    if os.fstat(log.fileno()).st_nlink == 0:
        # The file was deleted: free its space. In /dev/full, lines count as lost.
        with open("/dev/full", "ab") as full:
            os.dup2(full.fileno(), log.fileno(), inheritable=False)
    try:
        fresh = path.open("ab")
    except OSError:
        return log
    log.close()
    return fresh


def _kill_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        # The child is between fork and setsid, or the whole group has ended.
        return


def tail_lines(path: Path, count: int, start: int = 0) -> list[str]:
    """The last `count` lines of a file after offset `start`; empty without a file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            # A log that was truncated in the meantime is shorter than `start`.
            file.seek(max(start if start <= size else 0, size - TAIL_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a service, in which imports do not depend on the current folder."""
    roots = []
    for package in ("services", "tideserve"):
        spec = find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            roots.append(str(Path(next(iter(spec.submodule_search_locations))).parent.absolute()))
    inherited = os.environ.get("PYTHONPATH")
    paths = dict.fromkeys(roots + ([inherited] if inherited else []))
    # TIDESERVE_ variables would reach all services and override their configuration files.
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in NOT_INHERITED and not key.startswith(PREFIX)
    }
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        **extra,
    }


def service_command(module: str, config: Path) -> list[str]:
    """The command of a service that ends with this process."""
    return [
        *(sys.executable, "-m", module, "--config", str(config)),
        *("--with-parent", str(os.getpid())),
    ]
