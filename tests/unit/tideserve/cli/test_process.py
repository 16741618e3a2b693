"""A process of a cluster: start, detected death, stop."""

import os
import sys
import time
from pathlib import Path

import pytest

from tideserve.cli.process import Program, ServiceProcess, child_environment, tail_lines

DEADLINE_S = 30.0


def child(folder: Path, code: str, grace_s: float = 30.0) -> ServiceProcess:
    command = [sys.executable, "-c", code]
    process = ServiceProcess(
        Program("x", command, folder / "x.log", folder, child_environment({}), stop_grace_s=grace_s)
    )
    process.start()
    return process


def wait(process: ServiceProcess, hurry: bool = False) -> int:
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        process.enforce(hurry)
        code = process.poll()
        if code is not None:
            return code
        time.sleep(0.01)
    raise AssertionError("it does not end")


def wait_for_output(folder: Path) -> list[str]:
    end_s = time.monotonic() + DEADLINE_S
    while not (lines := tail_lines(folder / "x.log", 10)):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return lines


def test_the_return_code_is_reported_once_with_lines_of_the_last_start(tmp_path: Path) -> None:
    process = child(tmp_path, "import sys; print('first'); sys.exit(3)")
    assert wait(process) == 3
    assert (process.poll(), process.pid) == (None, None)
    again = ServiceProcess(Program("x", ["/bin/true"], tmp_path / "x.log", tmp_path, {}, 1.0))
    assert again.poll() is None
    again.start()
    assert wait(again) == 0
    assert process.last_lines(5) == ["first"]
    assert again.last_lines(5) == []


def test_a_process_has_no_terminal_and_no_standard_input(tmp_path: Path) -> None:
    process = child(tmp_path, "import os, sys; print(os.getsid(0), repr(sys.stdin.read()))")
    pid = process.pid
    wait(process)
    assert process.last_lines(1) == [f"{pid} ''"]


def test_children_end_with_their_process(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)"
    )
    process = child(tmp_path, code)
    wait(process)
    grandchild = int(process.last_lines(1)[0])
    end_s = time.monotonic() + DEADLINE_S
    while alive(grandchild):
        assert time.monotonic() < end_s
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


DEAF = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('deaf')\ntime.sleep(600)"


@pytest.mark.parametrize(("grace_s", "hurry"), [(0.1, False), (600.0, True)])
def test_a_process_that_ignores_signals_is_killed_after_the_grace_period(
    tmp_path: Path, grace_s: float, hurry: bool
) -> None:
    process = child(tmp_path, DEAF, grace_s)
    wait_for_output(tmp_path)
    process.ask_to_stop()
    assert wait(process, hurry) == -9


def test_a_process_that_drains_is_not_killed(tmp_path: Path) -> None:
    code = (
        "import signal, sys\nsignal.signal(15, lambda *_: sys.exit(0))\nprint('up')\nsignal.pause()"
    )
    process = child(tmp_path, code)
    wait_for_output(tmp_path)
    process.ask_to_stop()
    assert wait(process) == 0


def test_log_tails_are_returned(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert tail_lines(path, 3) == []
    path.write_text("".join(f"{number}\n" for number in range(100_000)) + "\n")
    assert tail_lines(path, 2) == ["99998", "99999"]
    assert tail_lines(path, 2, start=path.stat().st_size + 5) == ["99998", "99999"]


@pytest.mark.parametrize(
    "name",
    [
        "TIDESERVE_API_KEY",
        "TIDESERVE_ADMIN_KEY",
        "TIDESERVE_ETCD_PASSWORD",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
    ],
)
def test_secrets_are_passed_only_to_their_service(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "secret")
    environment = child_environment({"OMP_NUM_THREADS": "3"})
    assert "secret" not in environment.values()
    assert environment["OMP_NUM_THREADS"] == "3"
    roots = environment["PYTHONPATH"].split(os.pathsep)
    assert any((Path(root) / "services" / "common").is_dir() for root in roots)
    assert any((Path(root) / "tideserve" / "worker").is_dir() for root in roots)


def test_options_of_single_services_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDESERVE__PORT", "1")
    monkeypatch.setenv("TIDESERVE_CACHE", "/c")
    environment = child_environment({"A": "b"})
    assert "TIDESERVE__PORT" not in environment
    assert (environment["TIDESERVE_CACHE"], environment["A"]) == ("/c", "b")


def started_again(folder: Path, code: str) -> ServiceProcess:
    """A process whose folder was renamed since its log was first opened."""
    logs, moved = folder / "logs", folder / "moved"
    logs.mkdir()
    program = Program(
        "x", [sys.executable, "-c", code], logs / "x.log", folder, child_environment({}), 1.0
    )
    process = ServiceProcess(program)
    process.start()
    wait(process)
    logs.rename(moved)
    return process


def test_logging_continues_if_the_log_cannot_be_reopened(tmp_path: Path) -> None:
    process = started_again(tmp_path, "print('line')")
    process.start()
    assert wait(process) == 0
    assert (tmp_path / "moved" / "x.log").read_text() == "line\nline\n"
    assert process.last_lines(1) == []
    (tmp_path / "moved").rename(tmp_path / "logs")
    process.start()
    assert wait(process) == 0
    assert process.last_lines(5) == ["line"]
    process.close()


LOST = """
import logging
from pathlib import Path
from services.common.logging import set_up_logging, stats
set_up_logging()
logging.warning("line")
Path("lost").write_text(str(stats.lost_lines))
"""


def test_lines_are_counted_as_lost_until_the_log_can_be_opened(tmp_path: Path) -> None:
    process = started_again(tmp_path, LOST)
    (tmp_path / "moved" / "x.log").unlink()
    process.start()
    assert wait(process) == 0
    assert (tmp_path / "lost").read_text() == "1"
    (tmp_path / "logs").mkdir()
    process.start()
    assert wait(process) == 0
    assert (tmp_path / "lost").read_text() == "0"
    assert len(process.last_lines(5)) == 1
    process.close()


def test_a_process_needs_its_log_at_first(tmp_path: Path) -> None:
    program = Program("x", ["/bin/true"], tmp_path / "missing" / "x.log", tmp_path, {}, 1.0)
    with pytest.raises(FileNotFoundError):
        ServiceProcess(program)
