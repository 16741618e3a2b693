"""`tideserve key`: edits a file of API keys under a lock."""

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

_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent", "batch_tokens_queued")


def add_key(
    path: Path, owner: str, admin: bool, models: Sequence[str] | None, limits: QuotaLimits
) -> str:
    """Append a key to the file at `path`, which is created with mode 0600; returns the key.

    Raises:
        CommandError: if the file or the owner's name is invalid, or the owner has other limits.
    """
    made = new_key()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with _command_errors(), _opened(path, create=True) as descriptor:
        content = _read(descriptor)
        entries = parse_keys(content, str(path))
        if not limits:
            limits = next((known.limits for known in entries if known.owner == owner), limits)
        entry = KeyEntry(
            owner=owner,
            sha256=hash_of(made),
            admin=admin,
            models=None if models is None else tuple(models),
            created=now.replace("+00:00", "Z"),
            **asdict(limits),
        )
        line = ("" if content.endswith(b"\n") or not content else "\n") + entry.line() + "\n"
        # Never write a line that could not be read back.
        parse_keys(content + line.encode(), str(path))
        os.lseek(descriptor, 0, os.SEEK_END)
        _write(descriptor, line.encode())
    return made


def revoke_keys(path: Path, key_ids: Sequence[str], owner: str | None) -> int:
    """Comment out the lines of these keys and of the keys of `owner`; returns their number.

    Writes a single byte per key in place: a container may have mounted the file, and readers never
    see half a line.

    Raises:
        CommandError: if the file is invalid, or a key does not exist.
    """
    if not key_ids and owner is None:
        raise CommandError("name the keys to revoke: their ids, or --owner", EXIT_UNUSABLE)
    with _command_errors(), _opened(path, create=False) as descriptor:
        content = _read(descriptor)
        entries = parse_keys(content, str(path))
        for wanted in key_ids:
            if not any(entry.key_id == wanted for entry in entries):
                raise CommandError(f"there is no key {wanted} in {path}; see `tideserve key list`")
        revoked = {
            entry.sha256 for entry in entries if entry.key_id in key_ids or entry.owner == owner
        }
        if not revoked:
            raise CommandError(f"'{owner}' has no key in {path}; see `tideserve key list`")
        begin = 0
        for line in content.splitlines(keepends=True):
            if any(entry.sha256 in revoked for entry in parse_keys(line, str(path))):
                os.pwrite(descriptor, b"#", begin)
            begin += len(line)
        os.fsync(descriptor)
    return len(revoked)


def show_keys(path: Path, as_json: bool) -> None:
    """Print the entries of the file, without their hashes. Raises CommandError."""
    with _command_errors():
        entries = read_keys(path)
    if as_json:
        rows = [{"id": entry.key_id} | asdict(entry) for entry in entries]
        shown = [{name: row[name] for name in row if name != "sha256"} for row in rows]
        print(json.dumps(shown, indent=2))
        return
    table = Table(box=None, padding=(0, 1, 0, 0))
    limit_titles = ("REQ/MIN", "TOK/MIN", "AT ONCE", "BATCHES")
    for title in ("ID", "OWNER", "ADMIN", "MODELS", *limit_titles):
        wraps = title in ("OWNER", "MODELS")
        table.add_column(title, no_wrap=not wraps, overflow="fold")
    table.add_column("CREATED", no_wrap=True)
    for entry in entries:
        limits = [
            "-" if (value := getattr(entry, name)) is None else str(value) for name in _LIMITS
        ]
        models = "all" if entry.models is None else ", ".join(entry.models)
        admin = "yes" if entry.admin else "-"
        created = (entry.created or "-")[:10]
        table.add_row(entry.key_id, entry.owner, admin, models, *limits, created)
    Console().print(table)


@contextlib.contextmanager
def _command_errors() -> Iterator[None]:
    """Convert errors of the file into CommandError."""
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
            # The file may have been replaced while this process waited for the lock.
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
