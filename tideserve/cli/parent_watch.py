"""Detects that the parent process has ended or wants to stop.

A GNU make that receives SIGINT alone (`kill -INT <make>`) waits for its child without forwarding
the signal. /proc/<pid>/status reveals this state: make blocks SIGINT inside its handler.
"""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.5
# A forking process blocks signals only briefly; make in its handler blocks them to the end.
BLOCKED_POLLS_MIN = 4
SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh"})
MAKES = frozenset({"make", "gmake"})


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """The state of a process, from /proc."""

    command: str
    state: str
    parent_pid: int
    sigint_blocked: bool


def parse_status(text: str) -> ProcessStatus:
    """Read the text of /proc/<pid>/status."""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return ProcessStatus(
        command=fields["Name"].strip(),
        state=fields["State"].strip()[:1],
        parent_pid=int(fields["PPid"]),
        sigint_blocked=bool(int(fields["SigBlk"], 16) >> (signal.SIGINT - 1) & 1),
    )


def read_status(pid: int) -> ProcessStatus | None:
    """Status of a running process; None if it has ended or is a zombie."""
    try:
        status = parse_status(Path(f"/proc/{pid}/status").read_text())
    except (OSError, KeyError, ValueError):
        return None
    return None if status.state in "ZX" else status


class ParentWatch:
    """Watches the parent and, if the parent is a shell of make's recipe, make as well."""

    def __init__(self) -> None:
        """Record the current signal masks as normal, because a mask may be inherited."""
        self._parent_pid = os.getppid()
        self._blocked_at_start: dict[int, bool] = {}
        self._blocked_polls: Counter[int] = Counter()
        pid, status = self._parent_pid, read_status(self._parent_pid)
        while status is not None:
            self._blocked_at_start[pid] = status.sigint_blocked
            above = read_status(status.parent_pid)
            if status.command not in SHELLS or above is None:
                break
            if above.command not in SHELLS | MAKES:
                break
            pid, status = status.parent_pid, above

    def reason_to_stop(self) -> str | None:
        """Why this process should stop, or None; call it every `POLL_S`."""
        if os.getppid() != self._parent_pid:
            return "the process that started this one has ended"
        for pid, blocked_at_start in self._blocked_at_start.items():
            status = read_status(pid)
            if status is None:
                return f"the process {pid} that started this one has ended"
            blocked = status.sigint_blocked and not blocked_at_start
            self._blocked_polls[pid] = self._blocked_polls[pid] + 1 if blocked else 0
            if self._blocked_polls[pid] == BLOCKED_POLLS_MIN:
                return f"{status.command} was interrupted"
        return None

    def start(self, act: Callable[[str], None]) -> None:
        """Poll in a daemon thread, which calls `act` once with the reason."""

        def poll() -> None:
            pause = threading.Event()
            while (reason := self.reason_to_stop()) is None:
                pause.wait(POLL_S)
            act(reason)

        threading.Thread(target=poll, name="parent-watch", daemon=True).start()
