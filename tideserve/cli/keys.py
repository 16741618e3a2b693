"""`tideserve key`: changes to a file of keys, by one command at a time."""

import contextlib
import datetime
import fcntl
import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from services.common.errors import ConfigError
from services.core.quota.limits import QuotaLimits
from services.gateway.keys.key_file import (
    KeyEntry,
    check_mode,
    hash_of,
    new_key,
    parse_keys,
    read_keys,
)
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError, unusable

_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent")


def add_key(
    path: Path, owner: str, admin: bool, models: Sequence[str] | None, limits: QuotaLimits
) -> str:
    """Append a key to the file at `path`, made private if there is none; returns the key.

    Raises:
        CommandError: if the file or the owner's name is not usable, or the owner has other limits.
    """
    made = new_key()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with _told(), _opened(path, create=True) as descriptor:
        content = _read(descriptor)
        entries = parse_keys(content, str(path))
        if not limits:
            limits = next((one.limits for one in entries if one.owner == owner), limits)
        entry = KeyEntry(
            owner=owner,
            sha256=hash_of(made),
            admin=admin,
            models=None if models is None else tuple(models),
            created=now.replace("+00:00", "Z"),
            **asdict(limits),
        )
        line = ("" if content.endswith(b"\n") or not content else "\n") + entry.line() + "\n"
        # A line that could not be read back is not written.
        parse_keys(content + line.encode(), str(path))
        os.lseek(descriptor, 0, os.SEEK_END)
        _write(descriptor, line.encode())
    return made


def revoke_keys(path: Path, key_ids: Sequence[str], owner: str | None) -> int:
    """Comment out the lines of these keys and of the keys of `owner`; returns their number.

    In place and by one byte for each: a container may see this very file, and no moment shows half
    a line.

    Raises:
        CommandError: if the file is not usable, or there is no such key.
    """
    if not key_ids and owner is None:
        raise CommandError("tell which keys: their ids, or --owner", EXIT_UNUSABLE)
    with _told(), _opened(path, create=False) as descriptor:
        content = _read(descriptor)
        entries = parse_keys(content, str(path))
        for wanted in key_ids:
            if not any(entry.key_id == wanted for entry in entries):
                raise CommandError(f"there is no key {wanted} in {path}; see `tideserve key list`")
        gone = {one.sha256 for one in entries if one.key_id in key_ids or one.owner == owner}
        if not gone:
            raise CommandError(f"'{owner}' has no key in {path}; see `tideserve key list`")
        begin = 0
        for line in content.splitlines(keepends=True):
            if any(one.sha256 in gone for one in parse_keys(line, str(path))):
                os.pwrite(descriptor, b"#", begin)
            begin += len(line)
        os.fsync(descriptor)
    return len(gone)


def show_keys(path: Path, as_json: bool) -> None:
    """Print the entries of the file, without their hashes. Raises CommandError."""
    with _told():
        entries = read_keys(path)
    if as_json:
        rows = [{"id": one.key_id} | asdict(one) for one in entries]
        shown = [{name: row[name] for name in row if name != "sha256"} for row in rows]
        print(json.dumps(shown, indent=2))
        return
    table = Table(box=None, padding=(0, 1, 0, 0))
    for title in ("ID", "OWNER", "ADMIN", "MODELS", "REQ/MIN", "TOK/MIN", "AT ONCE"):
        wraps = title in ("OWNER", "MODELS")
        table.add_column(title, no_wrap=not wraps, overflow="fold")
    table.add_column("CREATED", no_wrap=True)
    for one in entries:
        limits = ["-" if (value := getattr(one, name)) is None else str(value) for name in _LIMITS]
        models = "all" if one.models is None else ", ".join(one.models)
        admin = "yes" if one.admin else "-"
        table.add_row(one.key_id, one.owner, admin, models, *limits, (one.created or "-")[:10])
    Console().print(table)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What is wrong with a file, as the command's error."""
    try:
        with unusable(ConfigError):
            yield
    except OSError as error:
        raise CommandError(
            f"cannot change {error.filename}: {error.strerror}; correct the path or the"
            " permissions",
            EXIT_UNUSABLE,
        ) from error


@contextlib.contextmanager
def _opened(path: Path, create: bool) -> Iterator[int]:
    """The file, locked against other commands. Raises OSError, ConfigError."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    while True:
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            held = os.fstat(descriptor)
            check_mode(path, stat.S_IMODE(held.st_mode))
            # Somebody may have replaced the file while we waited for it.
            if os.path.samestat(held, os.stat(path)):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _read(descriptor: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


def _write(descriptor: int, content: bytes) -> None:
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.fsync(descriptor)
