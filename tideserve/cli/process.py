"""The processes of a cluster: start, watch, stop. Not thread-safe: main thread only.

The main thread, because children ask the kernel to die with the thread that started them.
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

from services.common.clock import monotonic_s
from services.common.logging import JsonFormatter
from services.common.settings import PREFIX

TAIL_BYTES = 64 * 2**10
# Secrets of the operator: a service reads those that it needs from its configuration, and models
# are downloaded before any child starts.
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
    """How a process is started, any number of times."""

    name: str
    command: Sequence[str]
    log_path: Path
    folder: Path
    environment: Mapping[str, str]
    stop_grace_s: float


@dataclass(slots=True)
class ServiceProcess:
    """A process of the cluster, with a session of its own, so that no terminal signal reaches it.

    Whatever it started in that session is killed as soon as it has died.
    """

    program: Program
    _popen: subprocess.Popen[bytes] | None = None
    _log_start: int = 0
    _kill_at_s: float | None = field(default=None)

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
            OSError: if the program cannot be executed or the log not be written.
        """
        program = self.program
        with program.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._popen = subprocess.Popen(
                program.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=program.folder,
                env=program.environment,
                start_new_session=True,
            )
        self._kill_at_s = None

    def poll(self) -> int | None:
        """The return code, once, when the process has died; None while it runs or never ran."""
        if self._popen is None:
            return None
        pid = self._popen.pid
        # Without reaping: as long as the zombie is there, nobody else can have its group's id.
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        _kill_group(pid, signal.SIGKILL)
        return_code = self._popen.wait()
        self._popen = None
        return return_code

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the process, which drains; `press` kills it when its grace is over."""
        if self._popen is not None and self._kill_at_s is None:
            # Not Popen.send_signal: it may reap the process behind `poll`'s back.
            os.kill(self._popen.pid, signal.SIGTERM)
            self._kill_at_s = monotonic_s() + self.program.stop_grace_s

    def press(self, hurry: bool) -> bool:
        """Kill the process if its grace is over or `hurry`; returns whether that was needed now."""
        if self._popen is None or self._kill_at_s is None:
            return False
        if self._kill_at_s == KILLED or (not hurry and monotonic_s() < self._kill_at_s):
            return False
        _kill_group(self._popen.pid, signal.SIGKILL)
        self._kill_at_s = KILLED
        return True

    def note(self, message: str) -> None:
        """Add a warning to its log: what it could not say itself. A disk may be full."""
        line = logging.LogRecord(SUPERVISOR, logging.WARNING, "", 0, message, None, None)
        with contextlib.suppress(OSError), self.program.log_path.open("a") as log:
            log.write(JsonFormatter().format(line) + "\n")

    def last_lines(self, count: int) -> list[str]:
        """The last lines that the process wrote since it was started last."""
        return tail_lines(self.program.log_path, count, self._log_start)


def _kill_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        # Between fork and setsid, or everything in it is gone.
        return


def tail_lines(path: Path, count: int, start: int = 0) -> list[str]:
    """The last `count` lines of the file from offset `start` on; none if there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            # A log that was emptied meanwhile is shorter than where the process began in it.
            file.seek(max(start if start <= size else 0, size - TAIL_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a service: imports work in any folder, without the current one."""
    roots = []
    for package in ("services", "tideserve"):
        spec = find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            roots.append(str(Path(next(iter(spec.submodule_search_locations))).parent.absolute()))
    inherited = os.environ.get("PYTHONPATH")
    paths = dict.fromkeys(roots + ([inherited] if inherited else []))
    # Variables that are meant for one service would reach all of them and override their files.
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
    """How a service is started so that it ends with this process."""
    return [
        *(sys.executable, "-m", module, "--config", str(config)),
        *("--with-parent", str(os.getpid())),
    ]
