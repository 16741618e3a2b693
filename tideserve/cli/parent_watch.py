"""Notice that the process which started us is gone or wants to stop, without its telling us.

GNU make that alone receives SIGINT (`kill -INT <make>`) waits for its child without passing the
signal on. It shows: inside the handler make has SIGINT blocked, as /proc/<pid>/status tells.
"""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.5
# A process that forks blocks its signals for a moment; make in its handler does so to the end.
BLOCKED_LOOKS = 4
SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh"})
MAKES = frozenset({"make", "gmake"})


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """What /proc tells about a process."""

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
    """Status of a living process; None once it is gone, a zombie included."""
    try:
        status = parse_status(Path(f"/proc/{pid}/status").read_text())
    except (OSError, KeyError, ValueError):
        return None
    return None if status.state in "ZX" else status


class ParentWatch:
    """Looks at the parent; if that is a shell which make started for one line, at make too."""

    def __init__(self) -> None:
        """Take the present state as the normal one: a mask may have been inherited."""
        self._parent_pid = os.getppid()
        self._blocked_at_start: dict[int, bool] = {}
        self._blocked_looks: Counter[int] = Counter()
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
        """Why this process should stop, None while there is no reason; ask every `POLL_S`."""
        if os.getppid() != self._parent_pid:
            return "the process that started this one has ended"
        for pid, blocked_at_start in self._blocked_at_start.items():
            status = read_status(pid)
            if status is None:
                return f"the process {pid} that started this one has ended"
            blocked = status.sigint_blocked and not blocked_at_start
            self._blocked_looks[pid] = self._blocked_looks[pid] + 1 if blocked else 0
            if self._blocked_looks[pid] == BLOCKED_LOOKS:
                return f"{status.command} was interrupted"
        return None

    def start(self, act: Callable[[str], None]) -> None:
        """Poll in a daemon thread and call `act` once, there, with the reason."""

        def poll() -> None:
            pause = threading.Event()
            while (reason := self.reason_to_stop()) is None:
                pause.wait(POLL_S)
            act(reason)

        threading.Thread(target=poll, name="parent-watch", daemon=True).start()
