"""Status of the parent process in /proc."""

import os

import pytest

from tideserve.cli import parent_watch
from tideserve.cli.parent_watch import (
    BLOCKED_POLLS_MIN,
    ParentWatch,
    ProcessStatus,
    parse_status,
    read_status,
)

STATUS = """Name:\tmake
State:\tS (sleeping)
Tgid:\t10
Pid:\t10
PPid:\t7
SigQ:\t0/96365
SigPnd:\t0000000000000000
SigBlk:\t{blocked}
SigIgn:\t0000000001001004
"""


def test_blocked_interrupts_are_detected() -> None:
    waiting = parse_status(STATUS.format(blocked="0000000000010000"))
    assert (waiting.command, waiting.state, waiting.parent_pid) == ("make", "S", 7)
    assert not waiting.sigint_blocked
    assert parse_status(STATUS.format(blocked="0000000000010002")).sigint_blocked


def test_only_a_living_process_has_a_status() -> None:
    own = read_status(os.getpid())
    assert own is not None
    assert own.parent_pid == os.getppid()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert read_status(child) is None, "a zombie"
    os.waitpid(child, 0)
    assert read_status(child) is None


def test_no_stop_is_requested_while_the_parent_lives() -> None:
    assert ParentWatch().reason_to_stop() is None


def test_only_a_lasting_block_of_interrupts_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forking parent blocks signals for a moment, which must not stop the command."""
    blocked = False

    def status(pid: int) -> ProcessStatus:
        return ProcessStatus("python", "S", 1, blocked)

    monkeypatch.setattr(parent_watch, "read_status", status)
    watch = ParentWatch()
    for _ in range(10):
        blocked = True
        assert [watch.reason_to_stop() for _ in range(BLOCKED_POLLS_MIN - 1)] == [None, None, None]
        blocked = False
        assert watch.reason_to_stop() is None
    blocked = True
    reasons = [watch.reason_to_stop() for _ in range(BLOCKED_POLLS_MIN)]
    assert reasons == [None, None, None, "python was interrupted"]
