import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest
from long_step import StepFailed, run_step

from tests.support.waiting import eventually

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def run(command: list[str], log: Path) -> None:
    """Run a step with an unused descriptor in place of the lock."""
    with log.with_suffix(".lock").open("w") as lock:
        run_step("Working", command, log, os.environ, lock.fileno(), "Try harder.")


def test_a_failed_step_shows_its_last_lines_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match=r"(?s)no route.*Working: failed.*Try harder"):
        run(["sh", "-c", "echo no route; exit 3"], tmp_path / "log")


def test_a_long_step_shows_its_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("long_step.LINE_INTERVAL_S", 0.05)
    name = "x" * 100
    run(["sh", "-c", f"echo Downloading {name}; echo WARNING: y; sleep 2"], tmp_path / "log")
    shown = capsys.readouterr().out
    assert shown.startswith("==> Working\n") and f"s  Downloading {name}\n" in shown
    assert "done in" in shown


async def test_the_child_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import os, sys; from pathlib import Path; from long_step import run_step;"
        "run_step('t', ['sh', '-c', 'echo $$ > $0; exec sleep 60', sys.argv[1]],"
        " Path(sys.argv[2]), os.environ, 2, '')"
    )
    command = [sys.executable, "-c", code, str(pid_file), str(tmp_path / "log")]
    parent = await asyncio.create_subprocess_exec(*command, cwd=SCRIPTS)
    child = int(await eventually(lambda: pid_file.exists() and pid_file.read_text().strip()))
    parent.kill()
    await parent.wait()
    await eventually(lambda: has_ended(child), deadline_s=30.0)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
