"""Logs the events and decisions of a state machine of `services.core`, for replay.

A debugging aid, off by default. The log contains token ids of prompts, so it is a private file
(mode 0600). It consists of JSON lines: the first has the configuration of the state machine, every
other line is a `[kind, type, value]` such as `["event", "Asked", {…}]`.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from services.common.clock import unix_s
from services.common.errors import ServiceError

SIZE_MAX_BYTES = 2**30
VERSION = 9

log = logging.getLogger(__name__)


class EventLogError(ServiceError):
    """The event log cannot be opened or read."""


class _Header(msgspec.Struct):
    version: int
    name: str
    config: msgspec.Raw


class _EntryLine(msgspec.Struct, array_like=True):
    kind: str
    type: str
    value: msgspec.Raw


class LogEntry(NamedTuple):
    """A decoded line; `kind` is "event", "command", or another kind that its writer defines."""

    kind: str
    value: Any


def type_name(value: Any) -> str:
    """The name of a value's type, by which readers choose its decoder."""
    return type(value).__name__


class EventLog:
    """Appends to a new file in `folder`, up to `size_max_bytes`.

    A full disk or a full log ends the log but not the service. Not thread-safe.
    """

    def __init__(
        self, folder: Path, name: str, config: Any, size_max_bytes: int = SIZE_MAX_BYTES
    ) -> None:
        """`config`: the settings from which the state machine was created. Raises EventLogError."""
        self.path = folder / f"{name}-{unix_s()}-{os.getpid()}.jsonl"
        self._left_bytes = size_max_bytes
        self._encoder = msgspec.json.Encoder()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Never append to a file of another process, nor follow a link.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor: int | None = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise EventLogError(
                f"cannot write the event log {self.path}: {error.strerror}; choose another folder"
                " for 'event_log'"
            ) from error
        log.warning("writing every event, including prompts, to %s", self.path)
        self._write([{"version": VERSION, "name": name, "config": config}])

    def append(
        self, kind: str, values: Iterable[Any], name_of: Callable[[Any], str] = type_name
    ) -> None:
        """Write a line per value; `name_of` returns the type name that readers decode by."""
        self._write([(kind, name_of(value), value) for value in values])

    def close(self) -> None:
        """Close the file; later entries are discarded."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, lines: list[Any]) -> None:
        """Write whole lines, usually with one system call, so that a kill leaves no partial line.

        A disk that fills up may leave one; the log then ends.
        """
        if self._descriptor is None or not lines:
            return
        data = self._encoder.encode_lines(lines)
        if len(data) > self._left_bytes:
            log.warning("the event log %s is full; later events are dropped", self.path)
            self.close()
            return
        self._left_bytes -= len(data)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            log.warning("the event log %s ends: %s", self.path, error.strerror)
            self.close()


def open_event_log(folder: Path | None, name: str, config: Any) -> EventLog | None:
    """The event log of a service if a folder is configured, else None. Raises EventLogError."""
    return None if folder is None else EventLog(folder, name, config)


def read_config(path: Path, cls: type[Any]) -> Any:
    """The configuration in the first line, as an instance of `cls`. Raises EventLogError."""
    try:
        with path.open("rb") as file:
            header = msgspec.json.decode(file.readline(), type=_Header)
        if header.version != VERSION:
            raise EventLogError(
                f"{path} is an event log of an unsupported version ({header.version})"
            )
        return msgspec.json.decode(header.config, type=cls)
    except (OSError, msgspec.MsgspecError) as error:
        raise EventLogError(f"cannot read the event log {path}: {error}") from error


def read_entries(path: Path, types: Mapping[str, type[Any]]) -> Iterator[LogEntry]:
    """The entries after the first line, decoded by `types`. Raises EventLogError.

    An incomplete last line, from a full disk, is ignored.
    """
    decoders = {name: msgspec.json.Decoder(cls) for name, cls in types.items()}
    outer = msgspec.json.Decoder(_EntryLine)
    try:
        with path.open("rb") as file:
            file.readline()
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                line = outer.decode(raw)
                yield LogEntry(line.kind, decoders[line.type].decode(line.value))
    except KeyError as error:
        raise EventLogError(f"{path} has an entry of unknown type {error}") from error
    except (OSError, msgspec.MsgspecError) as error:
        raise EventLogError(f"cannot read the event log {path}: {error}") from error
