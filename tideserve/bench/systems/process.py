"""A server process that ends with this one, with a log of its own."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from services.common.clock import monotonic_s
from services.common.lifecycle import die_with_parent
from tideserve.bench.errors import SystemUnavailable

STOP_TIMEOUT_S = 60.0
POLL_S = 0.2
TAIL_BYTES = 2000


class ServerProcess:
    """Started at once; `stop` ends it and everything in its session."""

    def __init__(
        self, command: Sequence[str], log_path: Path, environment: Mapping[str, str]
    ) -> None:
        self._log_path = log_path
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=log_path.parent,
                start_new_session=True,
                # A server is started while no other thread of this process runs.
                preexec_fn=partial(die_with_parent, signal.SIGTERM),  # noqa: PLW1509
            )

    @property
    def pid(self) -> int:
        """Its process id; that of a process below it is another."""
        return self._process.pid

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Poll `ready`; raises SystemUnavailable if the process ends or time runs out first."""
        deadline_s = monotonic_s() + timeout_s
        while not ready():
            if self._process.poll() is not None:
                raise SystemUnavailable(f"it ended with {self._process.returncode}: {self.tail()}")
            if monotonic_s() > deadline_s:
                raise SystemUnavailable(f"it is not ready after {timeout_s:.0f} s: {self.tail()}")
            try:
                self._process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                continue

    def tail(self) -> str:
        """The last lines of the log that are not empty."""
        text = self._log_path.read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-3:]) or "it said nothing"

    def freeze(self) -> None:
        """Suspend the whole session, so that it uses no processor."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on; no effect on a process that runs."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Ask it to end, and kill what is left of its session after a while."""
        self.thaw()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
