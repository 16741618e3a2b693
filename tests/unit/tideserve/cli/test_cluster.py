"""Output on the death of a process: its last lines, if they explain it."""

import io
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tideserve.cli import cluster
from tideserve.cli.cluster import DEATHS_BEFORE_READY_MAX, ClusterProcesses
from tideserve.cli.errors import CommandError
from tideserve.cli.logs import show_logs
from tideserve.cli.process import Program, child_environment, tail_lines
from tideserve.cli.report import Report
from tideserve.cli.stop_signals import StopSignals

DEADLINE_S = 60.0
ROW = '{"level": "info", "message": "dropped 7 bytes in 3 us"}'


class OneProcess:
    """A cluster with a single process that runs `code`; `output` is what was printed."""

    def __init__(self, folder: Path, code: str) -> None:
        self._told = io.StringIO()
        self.log = folder / "worker-0.log"
        self.processes = ClusterProcesses(StopSignals(), Report(self._told), lambda: None)
        command = [sys.executable, "-c", code]
        self.processes.start(
            Program("worker-0", command, self.log, folder, child_environment({}), 1.0)
        )

    @property
    def output(self) -> str:
        return self._told.getvalue()

    def death(self) -> str:
        """The log line of its death, once there is one."""
        end_s = time.monotonic() + DEADLINE_S
        while not (lines := [line for line in self.output.splitlines() if "died" in line]):
            assert time.monotonic() < end_s, self.output
            self.processes.tick()
            time.sleep(0.01)
        return lines[0]

    def kill(self) -> None:
        """Send SIGKILL after its first output."""
        end_s = time.monotonic() + DEADLINE_S
        while not tail_lines(self.log, 1):
            assert time.monotonic() < end_s
            time.sleep(0.01)
        (pid,) = self.processes.pids.values()
        os.kill(pid, signal.SIGKILL)


def test_the_last_line_of_a_killed_process_is_not_its_cause(tmp_path: Path) -> None:
    running = OneProcess(tmp_path, f"import time; print({ROW!r}, flush=True); time.sleep(600)")
    running.processes.mark_ready()
    running.kill()
    assert running.death().endswith("worker-0 died (signal SIGKILL)")


def test_a_death_and_its_consequences_are_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = OneProcess(tmp_path, f"import time; print({ROW!r}, flush=True); time.sleep(600)")
    running.processes.mark_ready()
    running.kill()
    running.death()
    show_logs(tmp_path, "worker-0", 10, follow=False, raw=False)
    row, died, again = capsys.readouterr().out.splitlines()
    assert row.endswith("dropped 7 bytes in 3 us")
    assert died.endswith(" warning worker-0 died (signal SIGKILL)")
    assert again.endswith(" warning worker-0 will be restarted in 0.5 s")


def test_the_output_of_an_exited_process_is_quoted(tmp_path: Path) -> None:
    running = OneProcess(tmp_path, "import sys; sys.exit('the port is in use')")
    running.processes.mark_ready()
    assert running.death().endswith("(exit code 1); its last line: the port is in use")


def test_a_process_killed_at_every_start_names_the_signal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster, "BACKOFF_FIRST_S", 0.0)
    code = f"import os; print({ROW!r}, flush=True); os.kill(os.getpid(), 9)"
    killed = OneProcess(tmp_path, code)
    end_s = time.monotonic() + DEADLINE_S
    with pytest.raises(CommandError, match="worker-0 keeps dying: signal SIGKILL; see"):
        while time.monotonic() < end_s:
            killed.processes.tick()
            time.sleep(0.01)
    assert killed.output.count("died") == DEATHS_BEFORE_READY_MAX - 1
    assert "dropped" not in killed.output
