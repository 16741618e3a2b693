"""Run a long command with visible progress, and terminate it with this process.

Standard library only: this runs before anything is installed.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
# Interval of lines if the status line cannot be rewritten, as in a CI log.
LINE_INTERVAL_S = 10.0
STATUS_INTERVAL_S = 0.5
STATUS_WIDTH = 76
TAIL_LINES = 12
# Lines of pip that show no progress.
ASIDES = (
    *("WARNING", "DEPRECATION", "[notice]"),
    *("Attempting uninstall", "Found existing", "Uninstalling", "Successfully uninstalled"),
    "Successfully installed",
)

# Load libc here: a child must not load libraries between fork and exec.
_LIBC = ctypes.CDLL(None)


class StepFailed(Exception):
    """A step failed; the message names cause and remedy."""


def end_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends, even by SIGKILL."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit("The process that started the set-up has ended.")


def say(text: str) -> None:
    """Print a line unbuffered, so that logs show it in time."""
    print(text, flush=True)


def run_step(
    title: str,
    command: Sequence[str | Path],
    log: Path,
    environment: Mapping[str, str],
    keep_open: int,
    remedy: str,
) -> None:
    """Run `command` with its output in `log`, and display its last line.

    `keep_open` is a file descriptor that the child inherits: the lock, which a surviving grandchild
    thus keeps holding. Raises `StepFailed` with the end of the log and `remedy`.
    """
    say(f"==> {title}")
    started_s = time.monotonic()
    own_pid = os.getpid()
    with log.open("wb") as output:
        child = subprocess.Popen(
            [str(word) for word in command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(keep_open,),
            preexec_fn=lambda: end_with_parent(own_pid),  # noqa: PLW1509 - there are no threads
        )
    try:
        _watch(child, log, started_s)
    finally:
        if child.poll() is None:
            # An interrupt or an error here must not leave pip running.
            child.kill()
            child.wait()
    elapsed_s = time.monotonic() - started_s
    if child.returncode != 0:
        tail = log.read_text(errors="replace").strip().splitlines()[-TAIL_LINES:]
        shown = "\n".join(f"    {line}" for line in tail)
        raise StepFailed(f"{shown}\n{title}: failed after {elapsed_s:.0f} s.\n{remedy}")
    say(f"    done in {elapsed_s:.0f} s")


def _watch(child: subprocess.Popen[bytes], log: Path, started_s: float) -> None:
    """Display the elapsed time and the log's last line until `child` ends."""
    rewrites = sys.stdout.isatty()
    interval_s = STATUS_INTERVAL_S if rewrites else LINE_INTERVAL_S
    while True:
        try:
            child.wait(timeout=interval_s)
            break
        except subprocess.TimeoutExpired:
            text = f"{time.monotonic() - started_s:5.0f} s  {_last_line(log)}"
            if rewrites:
                print(f"\r{text[:STATUS_WIDTH]:<{STATUS_WIDTH}}", end="", flush=True)
            else:
                say(text)
    if rewrites:
        print(f"\r{'':<{STATUS_WIDTH}}\r", end="", flush=True)


def _last_line(log: Path) -> str:
    """The last progress line of the log; reads only the end of the log."""
    with log.open("rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, size_bytes - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
    progress = (line.strip() for line in reversed(lines))
    return next((line for line in progress if not line.startswith(ASIDES)), "starting")
