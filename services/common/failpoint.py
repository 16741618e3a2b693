"""Failpoints: places of the code where a fault begins at a chosen moment, for tests of recovery.

`hit("memmgr.commit.sent")` marks a place. It does nothing unless the configuration arms that name
(`failpoints`), such as `memmgr.commit.sent=kill` or `engine.merge.kv_piece.leader=stop:12@3`: the
action, then the number of the hit at which it happens. It happens once for each file of hits, also
if several processes pass the place, or the process that it killed is started again: the first one
writes a line to the file, then acts.
"""

import fcntl
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.clock import monotonic_s
from services.common.errors import ConfigError

_SPEC = re.compile(
    r"(?P<name>[a-z0-9_]+(?:\.[a-z0-9_]+)+)=(?P<action>[a-z-]+)(?::(?P<seconds>\d+(?:\.\d+)?))?"
    r"(?:@(?P<nth>[1-9]\d{0,8}))?"
)
NOTE, HOLD = "note", "hold"
KILL, KILL_PARENT, KILL_WORKER = "kill", "kill-parent", "kill-worker"
STOP, STOP_WORKER = "stop", "stop-worker"
CUT, CUT_ACTIVATIONS, CUT_BULK = "cut", "cut-activations", "cut-bulk"
CUTS = {CUT: (True, True), CUT_ACTIVATIONS: (True, False), CUT_BULK: (False, True)}
ACTIONS = (NOTE, HOLD, KILL, KILL_PARENT, KILL_WORKER, STOP, STOP_WORKER, *CUTS)
"""What may happen; `stop` and `stop-worker` take seconds.

note         nothing: whoever reads the file of hits acts
hold         SIGSTOP to this process until whoever reads the file has acted and sends SIGCONT, and
             for `HOLD_MAX_S` at most: what they do happens at this place, and not a little later
kill         SIGKILL to this process
kill-parent  SIGKILL to the servicer of this engine, with which the engine ends
kill-worker  SIGKILL to both; in a servicer to it alone, which takes its engine with it
stop         SIGSTOP to this process for some seconds
stop-worker  SIGSTOP to the servicer of this engine and to the engine
cut          this engine closes its connections to the other members, which alone notice it
cut-activations, cut-bulk   those of one lane
"""
HOLD_MAX_S = 2.0


@dataclass(slots=True)
class _Armed:
    name: str
    action: str
    seconds: float
    left: int  # hits until it happens


class _Process:
    """What the failpoints of this process need to know."""

    def __init__(self) -> None:
        self.armed: dict[str, _Armed] = {}
        self.file = Path()
        self.parent = 0
        self.cut: Callable[[bool, bool], None] | None = None
        self.helpers: list[subprocess.Popen[bytes]] = []


_process = _Process()
_armed = _process.armed


def hit(name: str) -> None:
    """Pass the place called `name`. May end or suspend this process, if that was armed."""
    if name in _armed:
        _pass(_armed[name])


def any_armed() -> bool:
    """Whether any is armed here, so that a name need not be put together if none is."""
    return bool(_armed)


def check(specs: Iterable[str], file: Path | None) -> None:
    """Raise ConfigError if these cannot be armed."""
    read = [_read(spec) for spec in specs]
    if read and file is None:
        raise ConfigError("'failpoints' is given without 'failpoint_file'; add the file of hits")


def on_cut(cut: Callable[[bool, bool], None]) -> None:
    """Have `cut` called where a failpoint cuts this process off; without it nothing happens.

    It is told whether the lane of activations is cut, and whether that of bulk transfers is.
    """
    _process.cut = cut


def arm(specs: Sequence[str], file: Path | None, parent: int = 0) -> None:
    """Arm the failpoints of this process, in place of those before.

    `file` gets a line of JSON for each hit: name, action, pid, and `monotonic_s`, which is the same
    clock in all processes of a machine. Failpoints that it has already are not armed. `parent` is
    the servicer's process id in an engine.
    """
    check(specs, file)
    _armed.clear()
    if not specs or file is None:
        return
    _process.file, _process.parent = file, parent
    past = {one["name"] for one in read_hits(file)}
    for one in map(_read, specs):
        if one.name not in past:
            _armed[one.name] = one


def read_hits(file: Path) -> list[dict[str, Any]]:
    """The hits so far, in their order; none without a file."""
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def _read(spec: str) -> _Armed:
    """Raises ConfigError."""
    found = _SPEC.fullmatch(spec)
    if found is None or found["action"] not in ACTIONS:
        raise ConfigError(
            f"'{spec}' is no failpoint; write NAME=ACTION, NAME=ACTION:SECONDS or NAME=ACTION@N"
            f" with one of {', '.join(ACTIONS)}"
        )
    stops = found["action"] in (STOP, STOP_WORKER)
    if stops != (found["seconds"] is not None):
        raise ConfigError(f"'{spec}': {STOP} and {STOP_WORKER} take seconds, and nothing else does")
    return _Armed(
        found["name"], found["action"], float(found["seconds"] or 0), int(found["nth"] or 1)
    )


def _pass(one: _Armed) -> None:
    one.left -= 1
    if one.left > 0:
        return
    _armed.pop(one.name, None)
    if _claim(one):
        _act(one)


def _claim(one: _Armed) -> bool:
    """Write the hit down, unless it has been written before."""
    descriptor = os.open(_process.file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if any(past["name"] == one.name for past in read_hits(_process.file)):
            return False
        line = {
            "name": one.name,
            "action": one.action,
            "pid": os.getpid(),
            "monotonic_s": monotonic_s(),
        }
        os.write(descriptor, json.dumps(line).encode() + b"\n")
        return True
    finally:
        os.close(descriptor)


def _act(one: _Armed) -> None:
    own, parent = os.getpid(), _process.parent
    worker = (parent, own) if parent else (own,)
    match one.action:
        case "kill":
            os.kill(own, signal.SIGKILL)
        case "kill-parent":
            os.kill(parent or own, signal.SIGKILL)
        case "kill-worker":
            _signal(worker, signal.SIGKILL)
        case "hold":
            _stop((own,), HOLD_MAX_S)
        case "stop":
            _stop((own,), one.seconds)
        case "stop-worker":
            _stop(worker, one.seconds)
        case cut if cut in CUTS and _process.cut is not None:
            _process.cut(*CUTS[cut])


def _stop(pids: Sequence[int], seconds: float) -> None:
    """Suspend them; a helper of another session lets them go on."""
    names = " ".join(map(str, pids))
    _process.helpers.append(
        subprocess.Popen(
            ["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {names}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    )
    _signal(pids, signal.SIGSTOP)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)
