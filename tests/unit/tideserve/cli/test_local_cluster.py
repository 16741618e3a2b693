"""A server process is frozen on request, and ends with its children."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tideserve.cli.local_cluster import ServerProcess

PARENT = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
    "child.wait()\n"
)


def until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


def test_a_process_is_frozen_thawed_and_stopped_with_its_children(log: Path) -> None:
    server = ServerProcess([sys.executable, "-c", PARENT], log, {})
    server.wait_until(lambda: log.read_text().endswith("\n"), timeout_s=60)
    child = psutil.Process(int(log.read_text()))
    both = [child, psutil.Process(child.ppid())]

    def frozen() -> list[bool]:
        return [process.status() == psutil.STATUS_STOPPED for process in both]

    server.freeze()
    until(lambda: all(frozen()))
    server.thaw()
    until(lambda: not any(frozen()))
    server.freeze()
    server.stop()
    # The process that took the orphan over may reap it late.
    until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in both))
