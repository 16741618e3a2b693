"""The keys file as it is now: read again when it changes, while the former keys stay in force."""

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

from services.common.errors import ConfigError
from services.gateway.keys.key_file import KeyEntry, read_keys

log = logging.getLogger(__name__)

READ_ATTEMPTS = 3

Stamp = tuple[int, int, int, int]


class KeySource:
    """The entries of one file; `failing` while its present content is not usable."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ConfigError."""
        self._path = path
        self._stamp, self.entries = _read(path)
        self.digest = _digest(self.entries)
        self._refused: Stamp | None = None
        # Two changes within a tick of the file system's clock have one stamp, so what has changed
        # is read twice.
        self._settled = False
        self.failing = False

    def poll(self) -> bool:
        """Read the file if it has changed; returns whether the entries differ. It may block."""
        stamp = _stamp(self._path)
        if self._settled and stamp is not None and stamp == self._stamp:
            self.failing = False
            return False
        if self.failing and stamp == self._refused:
            return False
        try:
            stamp, entries = _read(self._path)
        except ConfigError as error:
            # Logged once for each state of the file.
            self._refused, self.failing = stamp, True
            log.error("the keys stay as they were: %s", error)
            return False
        self._settled, self._stamp, self.failing = stamp == self._stamp, stamp, False
        if entries == self.entries:
            return False
        self.entries, self.digest = entries, _digest(entries)
        log.info("read %d keys from %s", len(self.entries), self._path)
        return True


def _read(path: Path) -> tuple[Stamp | None, list[KeyEntry]]:
    """The entries, all of one moment, and the stamp of that. Raises ConfigError."""
    for _ in range(READ_ATTEMPTS):
        before = _stamp(path)
        try:
            entries = read_keys(path)
        except ConfigError:
            # Kubernetes may swap a Secret while its file is being opened.
            if _stamp(path) == before:
                raise
            continue
        if _stamp(path) == before:
            return before, entries
    raise ConfigError(f"the keys file {path} changes while it is read; wait until it is whole")


def _digest(entries: Iterable[KeyEntry]) -> str:
    """A digest of the lines, whatever their order, without comments."""
    lines = sorted(entry.line() for entry in entries)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _stamp(path: Path) -> Stamp | None:
    """Changes when the file is written or replaced; None while there is no file."""
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_size, seen.st_ino, seen.st_mode
