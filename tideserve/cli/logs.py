"""`tideserve logs`: prints or follows the logs of the services, formatted or raw."""

import contextlib
import heapq
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tideserve.cli.errors import CommandError
from tideserve.cli.process import tail_lines

FOLLOW_POLL_S = 0.25
LEVEL_WIDTH = 7
# Characters of a time in ISO 8601 up to milliseconds.
STAMP_CHARS = 23
# Start of a line in text format.
TEXT_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z [a-z]+ ")
OWN_KEYS = frozenset({"time", "level", "logger", "message", "exception"})
# Keys of etcd's logger, and their names in tideserve's logs.
ETCD_KEYS = {"ts": "time", "msg": "message", "caller": "logger"}


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line with its time; a line without a time has the time of its predecessor."""

    time: str
    name: str
    text: str


def show_logs(folder: Path, service: str | None, count: int, follow: bool, raw: bool) -> None:
    """Print the last `count` lines of a service, or of all; Ctrl-C ends following.

    Raises:
        CommandError: if there are no logs of that name.
    """
    paths = log_paths(folder, service)
    readers = [Reader(path, raw) for path in paths]
    width = max(len(path.stem) for path in paths) if service is None else 0
    _print(heapq.merge(*(reader.last(count) for reader in readers), key=_time), width)
    with contextlib.suppress(KeyboardInterrupt):
        while follow:
            time.sleep(FOLLOW_POLL_S)
            for path in log_paths(folder, service):
                if path not in paths:
                    paths.append(path)
                    readers.append(Reader(path, raw))
            _print(heapq.merge(*(reader.fresh() for reader in readers), key=_time), width)


def log_paths(folder: Path, service: str | None) -> list[Path]:
    """Logs in a cluster's folder of logs. Raises CommandError."""
    paths = sorted(folder.glob("*.log"))
    if not paths:
        raise CommandError(
            f"there are no logs in {folder}; pass the --port or the --cluster-dir of a cluster on"
            " this machine"
        )
    if service is None:
        return paths
    chosen = [path for path in paths if path.stem == service]
    if not chosen:
        names = ", ".join(path.stem for path in paths)
        raise CommandError(f"there is no log of '{service}'; choose from {names}")
    return chosen


class Reader:
    """Reads a log from its last lines on."""

    def __init__(self, path: Path, raw: bool) -> None:
        self._path = path
        self._raw = raw
        self._offset = 0
        self._rest = b""
        self._time = ""

    def last(self, count: int) -> list[LogLine]:
        """The last `count` lines; `fresh` continues after them."""
        self._offset = self._path.stat().st_size
        return [self._parsed(line) for line in tail_lines(self._path, count)] if count else []

    def fresh(self) -> list[LogLine]:
        """Complete lines appended since the last call."""
        with self._path.open("rb") as file:
            if file.seek(0, 2) < self._offset:
                # The log was rotated.
                self._offset, self._rest = 0, b""
            file.seek(self._offset)
            added = file.read()
        self._offset += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        return [self._parsed(line.decode(errors="replace")) for line in lines if line.strip()]

    def _parsed(self, line: str) -> LogLine:
        stamp, text = render(line)
        self._time = stamp or self._time
        return LogLine(self._time, self._path.stem, line if self._raw else text)


def render(line: str) -> tuple[str, str]:
    """Time of a line ("" if it has none) and the formatted line."""
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        stamped = TEXT_STAMP.match(line)
        return stamped.group(1) if stamped else "", line.rstrip()
    row = {ETCD_KEYS.get(key, key): value for key, value in row.items()}
    stamp = str(row.get("time", ""))[:STAMP_CHARS].rstrip("Z")
    level = str(row.get("level", "")).ljust(LEVEL_WIDTH)
    extra = [f"{key}={value}" for key, value in row.items() if key not in OWN_KEYS]
    text = " ".join([stamp, level, str(row.get("message", "")), *extra])
    exception = row.get("exception")
    return stamp, f"{text}\n{exception}" if exception else text


def _time(line: LogLine) -> str:
    return line.time


def _print(lines: Iterator[LogLine], width: int) -> None:
    for line in lines:
        prefix = f"{line.name.ljust(width)} | " if width else ""
        sys.stdout.write(prefix + line.text.replace("\n", f"\n{prefix}") + "\n")
    sys.stdout.flush()
