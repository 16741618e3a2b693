"""Failpoints: arming, firing, and the record written before."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.common import failpoint
from services.common.errors import ConfigError

CHILD = """
import sys
from pathlib import Path
from services.common import failpoint
failpoint.arm([sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3]))
for _ in range(3):
    failpoint.hit("a.b")
    print("passed", flush=True)
"""
HELD = """
import atexit, os
from services.common import failpoint
failpoint.HOLD_MAX_S = 600
atexit.register(lambda: [os.killpg(one.pid, 9) for one in failpoint._process.helpers])
"""
"""Prevents that another process resumes it."""


@pytest.fixture(autouse=True)
def unarmed() -> Iterator[None]:
    yield
    failpoint.arm((), None)


def passes(spec: str, file: Path, parent: int = 0) -> tuple[int, int]:
    """The exit code of a process that passes a.b three times, and its completed passes."""
    command = [sys.executable, "-c", CHILD, spec, str(file), str(parent)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=os.getcwd())
    return ended.returncode, ended.stdout.count("passed")


def names(file: Path) -> list[str]:
    return [hit["name"] for hit in failpoint.read_hits(file)]


def test_an_unarmed_failpoint_does_nothing(tmp_path: Path) -> None:
    file = tmp_path / "hits"
    failpoint.hit("a.b")
    assert not failpoint.any_armed()
    failpoint.arm(["a.b=note"], file)
    failpoint.hit("a.c")
    assert failpoint.any_armed()
    assert not file.exists()


def test_a_hit_is_recorded_once_with_time_and_process(tmp_path: Path) -> None:
    file = tmp_path / "hits"
    failpoint.arm(["a.b=note", "a.c=note"], file)
    for name in ("a.b", "a.b", "a.c"):
        failpoint.hit(name)
    first, second = failpoint.read_hits(file)
    assert (first["name"], first["action"], first["pid"]) == ("a.b", "note", os.getpid())
    assert second["name"] == "a.c"
    assert first["monotonic_s"] <= second["monotonic_s"]


def test_a_failpoint_fires_at_the_configured_hit(tmp_path: Path) -> None:
    file = tmp_path / "hits"
    failpoint.arm(["a.b=note@3"], file)
    failpoint.hit("a.b")
    failpoint.hit("a.b")
    assert names(file) == []
    failpoint.hit("a.b")
    assert names(file) == ["a.b"]


def test_a_kill_is_recorded_first_and_happens_in_a_single_process(tmp_path: Path) -> None:
    file = tmp_path / "hits"
    assert passes("a.b=kill@2", file) == (-signal.SIGKILL, 1)
    assert names(file) == ["a.b"]
    assert passes("a.b=kill@2", file) == (0, 3), "the restarted process is not killed again"
    assert names(file) == ["a.b"]


def test_only_the_first_of_two_armed_processes_dies(tmp_path: Path) -> None:
    file = tmp_path / "hits"
    failpoint.arm(["a.b=kill"], file)
    assert passes("a.b=kill", file) == (-signal.SIGKILL, 0)
    failpoint.hit("a.b")
    assert names(file) == ["a.b"]


@pytest.mark.parametrize(
    ("action", "own", "parents"), [("kill-worker", -9, -9), ("kill-parent", 0, -9), ("kill", -9, 0)]
)
def test_an_engine_can_kill_its_servicer(
    tmp_path: Path, action: str, own: int, parents: int
) -> None:
    servicer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert passes(f"a.b={action}", tmp_path / "hits", servicer.pid)[0] == own
        servicer.communicate(b"\n")
        assert servicer.returncode == parents
    finally:
        servicer.kill()


@pytest.mark.parametrize("action", ["stop", "stop-worker"])
def test_a_suspended_process_resumes_later(tmp_path: Path, action: str) -> None:
    assert passes(f"a.b={action}:0.2", tmp_path / "hits") == (0, 3)
    assert names(tmp_path / "hits") == ["a.b"]


def test_a_held_process_waits_for_the_reader_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "hits"
    command = [sys.executable, "-c", HELD + CHILD, "a.b=hold@2", str(file), "0"]
    held = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        while psutil.Process(held.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        assert [hit["pid"] for hit in failpoint.read_hits(file)] == [held.pid]
        held.send_signal(signal.SIGCONT)
        output, _ = held.communicate()
        assert (held.returncode, output.count("passed")) == (0, 3)
    finally:
        held.kill()
        held.wait()


@pytest.mark.parametrize(
    ("action", "lanes"),
    [("cut", (True, True)), ("cut-activations", (True, False)), ("cut-bulk", (False, True))],
)
def test_a_process_records_how_it_is_disconnected(
    action: str, lanes: tuple[bool, bool], tmp_path: Path
) -> None:
    done: list[tuple[bool, bool]] = []
    failpoint.on_cut(lambda activations, bulk: done.append((activations, bulk)))
    failpoint.arm([f"a.b={action}"], tmp_path / "hits")
    failpoint.hit("a.b")
    failpoint.hit("a.b")
    assert done == [lanes]


@pytest.mark.parametrize(
    "spec", ["a.b", "ab=kill", "a.b=explode", "a.b=kill@0", "a.b=stop", "a.b=kill:3", "=kill", ""]
)
def test_invalid_failpoints_are_refused(tmp_path: Path, spec: str) -> None:
    with pytest.raises(ConfigError, match=r"failpoint|take seconds"):
        failpoint.check([spec], tmp_path / "hits")


def test_a_hits_file_is_required() -> None:
    with pytest.raises(ConfigError, match="'failpoint_file'"):
        failpoint.check(["a.b=kill"], None)
