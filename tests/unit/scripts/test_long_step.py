import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from long_step import StepFailed, run_step

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def run(command: list[str], log: Path) -> None:
    """Run a step with a descriptor of no meaning in place of the lock."""
    with log.with_suffix(".lock").open("w") as lock:
        run_step("Working", command, log, os.environ, lock.fileno(), "Try harder.")


def test_a_step_that_works_says_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["true"], tmp_path / "log")
    out = capsys.readouterr().out
    assert out.startswith("==> Working\n")
    assert "done in" in out


def test_a_step_that_fails_shows_its_last_lines_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match=r"(?s)no route.*Working: failed.*Try harder"):
        run(["sh", "-c", "echo no route; exit 3"], tmp_path / "log")


def test_a_long_step_shows_its_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("long_step.LINE_INTERVAL_S", 0.05)
    name = "x" * 100
    run(["sh", "-c", f"echo Downloading {name}; echo WARNING: y; sleep 2"], tmp_path / "log")
    assert f"s  Downloading {name}\n" in capsys.readouterr().out


def test_the_child_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import os, sys; from pathlib import Path; from long_step import run_step;"
        "run_step('t', ['sh', '-c', 'echo $$ > $0; exec sleep 60', sys.argv[1]],"
        " Path(sys.argv[2]), os.environ, 2, '')"
    )
    command = [sys.executable, "-c", code, str(pid_file), str(tmp_path / "log")]
    with subprocess.Popen(
        command, cwd=SCRIPTS, env={**os.environ, "PYTHONPATH": str(SCRIPTS)}
    ) as p:
        child = wait_for_number(pid_file)
        p.kill()
    assert ends_within(child, 30.0)


def wait_for_number(path: Path) -> int:
    """The number in `path` as soon as another process has written it."""
    deadline_s = time.monotonic() + 20.0
    while time.monotonic() < deadline_s:
        if path.exists() and (text := path.read_text().strip()):
            return int(text)
        time.sleep(0.02)
    raise AssertionError(f"{path} was not written")


def ends_within(pid: int, timeout_s: float) -> bool:
    """Whether the process is gone, or only waits for its exit status to be read, in time."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return False
