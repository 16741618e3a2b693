"""Failpoints: named places in the code where tests inject faults.

`hit("memmgr.commit.sent")` marks a place. It has no effect unless the option `failpoints` arms that
name, such as `memmgr.commit.sent=kill` or `engine.merge.kv_piece.leader=stop:12@3`: an action, its
seconds, and the number of the hit, counted in each process, at which it fires (by default the
first). A failpoint fires once per hits file, even if several processes pass the place or the killed
process restarts: the first process appends a line to the file before it acts.
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
"""The actions; `stop` and `stop-worker` take seconds.

note         no action by this process; the test that reads the hits file acts
hold         SIGSTOP to this process until the test that reads the hits file sends SIGCONT, for at
             most `HOLD_MAX_S`, so that the test can act exactly at this place
kill         SIGKILL to this process
kill-parent  SIGKILL to the servicer of this engine, which also ends the engine; in a servicer to
             itself
kill-worker  SIGKILL to servicer and engine; in a servicer to itself, which also ends its engine
stop         SIGSTOP to this process for some seconds
stop-worker  SIGSTOP to the servicer of this engine and to the engine
cut          close this engine's connections to the other members of its group, at this end only
cut-activations, cut-bulk   the same for the connections of one kind of traffic (lane)
"""
HOLD_MAX_S = 2.0


@dataclass(slots=True)
class _Armed:
    """A failpoint that has not fired yet."""

    name: str
    action: str
    seconds: float
    left: int  # hits until it fires


class _Process:
    """State of the failpoints of this process."""

    def __init__(self) -> None:
        self.armed: dict[str, _Armed] = {}
        self.file = Path()
        self.parent = 0
        self.cut: Callable[[bool, bool], None] | None = None
        self.helpers: list[subprocess.Popen[bytes]] = []


_process = _Process()
_armed = _process.armed


def hit(name: str) -> None:
    """Pass the failpoint `name`. May kill or suspend this process if it is armed."""
    # Do no more than a lookup, because `hit` is called on hot paths.
    if name in _armed:
        _count_hit(_armed[name])


def any_armed() -> bool:
    """Whether any failpoint is armed; if not, hot paths need not build names."""
    return bool(_armed)


def check(specs: Iterable[str], file: Path | None) -> None:
    """Raise ConfigError if a spec is invalid or the hits file is missing."""
    read = [_parse(spec) for spec in specs]
    if read and file is None:
        raise ConfigError("'failpoints' is given without 'failpoint_file'; add the file of hits")


def on_cut(cut: Callable[[bool, bool], None]) -> None:
    """Register `cut`, which failpoints call to disconnect this process from its peers.

    Its arguments: whether to cut connections for activations, and those for bulk transfers.
    """
    _process.cut = cut


def arm(specs: Sequence[str], file: Path | None, parent: int = 0) -> None:
    """Arm the failpoints of this process, replacing earlier ones.

    `file` gets a JSON line per failpoint that fires: name, action, pid and `monotonic_s` (a clock
    that all processes of a machine share). Failpoints already in the file are not armed again.
    `parent` is the servicer's process id, in an engine.
    """
    check(specs, file)
    _armed.clear()
    if not specs or file is None:
        return
    _process.file, _process.parent = file, parent
    # After a restart, do not fire again the failpoint that killed the process.
    past = {entry["name"] for entry in read_hits(file)}
    for failpoint in map(_parse, specs):
        if failpoint.name not in past:
            _armed[failpoint.name] = failpoint


def read_hits(file: Path) -> list[dict[str, Any]]:
    """The lines of failpoints that fired, in order; empty if there is no file."""
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def _parse(spec: str) -> _Armed:
    """Parse a failpoint of the option. Raises ConfigError."""
    match = _SPEC.fullmatch(spec)
    if match is None or match["action"] not in ACTIONS:
        raise ConfigError(
            f"'{spec}' is not a failpoint; write NAME=ACTION, NAME=ACTION:SECONDS or NAME=ACTION@N,"
            f" with an action of {', '.join(ACTIONS)}"
        )
    stops = match["action"] in (STOP, STOP_WORKER)
    if stops != (match["seconds"] is not None):
        raise ConfigError(f"'{spec}': only {STOP} and {STOP_WORKER} take seconds, and need them")
    return _Armed(
        match["name"], match["action"], float(match["seconds"] or 0), int(match["nth"] or 1)
    )


def _count_hit(failpoint: _Armed) -> None:
    """Count a hit; act at the configured hit, unless another process has recorded it."""
    failpoint.left -= 1
    if failpoint.left > 0:
        return
    _armed.pop(failpoint.name, None)
    if _record_hit(failpoint):
        _act(failpoint)


def _record_hit(failpoint: _Armed) -> bool:
    """Record the hit in the file; returns False if another process has recorded it already."""
    descriptor = os.open(_process.file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        # The lock makes check and append atomic between processes.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if any(past["name"] == failpoint.name for past in read_hits(_process.file)):
            return False
        line = {
            "name": failpoint.name,
            "action": failpoint.action,
            "pid": os.getpid(),
            "monotonic_s": monotonic_s(),
        }
        os.write(descriptor, json.dumps(line).encode() + b"\n")
        return True
    finally:
        os.close(descriptor)


def _act(failpoint: _Armed) -> None:
    own, parent = os.getpid(), _process.parent
    worker = (parent, own) if parent else (own,)
    match failpoint.action:
        case "kill":
            os.kill(own, signal.SIGKILL)
        case "kill-parent":
            os.kill(parent or own, signal.SIGKILL)
        case "kill-worker":
            _signal(worker, signal.SIGKILL)
        case "hold":
            _stop((own,), HOLD_MAX_S)
        case "stop":
            _stop((own,), failpoint.seconds)
        case "stop-worker":
            _stop(worker, failpoint.seconds)
        case cut if cut in CUTS and _process.cut is not None:
            _process.cut(*CUTS[cut])


def _stop(pids: Sequence[int], seconds: float) -> None:
    """Suspend the processes; a helper in its own session resumes them."""
    names = " ".join(map(str, pids))
    _process.helpers.append(
        subprocess.Popen(
            ["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {names}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A session of its own, so that signals to our process group do not end the helper.
            start_new_session=True,
        )
    )
    _signal(pids, signal.SIGSTOP)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)
