"""Reads the keys file: a JSON object per line, with the SHA-256 of an API key and its permissions.

A key is a prefix, by which scanners recognise leaked secrets, and 32 random bytes, which cannot be
guessed from their hash; so the file needs no slow password hash. The file grants access, so only
its user may have write permission. Empty lines and lines that begin with # are ignored.
"""

import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.common.config import from_mapping
from services.common.errors import ConfigError
from services.core.quota.limits import QuotaLimits
from services.core.setting import number, option
from services.gateway.keys.principal import Principal

PREFIX = "tsk_"
KEY_BYTES = 32
FILE_BYTES_MAX = 64 * 2**20
ID_DIGITS = 12
LIMIT_MAX = 10**12
"""The largest value of a limit."""

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# Base-62 digits that encode any 32 bytes.
_KEY_DIGITS = 43
_HASH = re.compile(r"[0-9a-f]{64}")
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:/+-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """A line of the file. `owner`: the tenant, with one or more keys. `models` None: all models.

    `created` is informational.
    """

    owner: str = option()
    sha256: str = option()
    admin: bool = option(False)
    models: tuple[str, ...] | None = option(None)
    requests_per_minute: int | None = number(None, minimum=1, maximum=LIMIT_MAX)
    tokens_per_minute: int | None = number(None, minimum=1, maximum=LIMIT_MAX)
    concurrent: int | None = number(None, minimum=1, maximum=LIMIT_MAX)
    batch_tokens_queued: int | None = number(None, minimum=1, maximum=LIMIT_MAX)
    batch_counts: bool = option(False)
    created: str | None = option(None)

    def __post_init__(self) -> None:
        if not _OWNER.fullmatch(self.owner):
            raise ConfigError(
                "'owner' must be 1 to 64 letters, digits and ._@:/+-, and begin with a letter or"
                " digit"
            )
        # Never quote the field in the error: it may hold a key by mistake.
        if not _HASH.fullmatch(self.sha256):
            raise ConfigError("'sha256' must be 64 lower-case hexadecimal digits")
        if self.models is not None and not (
            self.models and all(isinstance(model, str) and model for model in self.models)
        ):
            raise ConfigError("'models' must be a list of names; omit it to allow all models")

    @property
    def key_id(self) -> str:
        """The public id of the key, for listings and logs."""
        return self.sha256[:ID_DIGITS]

    @property
    def limits(self) -> QuotaLimits:
        """The limits that all keys of the owner share."""
        return QuotaLimits(
            self.requests_per_minute,
            self.tokens_per_minute,
            self.concurrent,
            self.batch_tokens_queued,
            self.batch_counts,
        )

    def principal(self) -> Principal:
        """The principal of the key's bearer."""
        models = None if self.models is None else frozenset(self.models)
        return Principal(self.owner, self.admin, models, self.limits, self.key_id)

    def line(self) -> str:
        """The entry as a line of the file, without the newline."""
        values = {name: value for name, value in asdict(self).items() if value not in (None, False)}
        return json.dumps(values)


def new_key() -> str:
    """A new random key."""
    number, digits = secrets.randbits(8 * KEY_BYTES), []
    for _ in range(_KEY_DIGITS):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return PREFIX + "".join(digits)


def hash_of(key: str | bytes) -> str:
    """The SHA-256 of a key, in hexadecimal digits."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()


def read_keys(path: Path) -> list[KeyEntry]:
    """The entries of the file at `path`.

    Raises:
        ConfigError: if the file is unreadable, writable by others, or has an invalid line.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read the keys file {path}: {error.strerror}; correct the path or the"
            " permissions, or create the file with `tideserve key new`"
        ) from error
    check_mode(path, mode)
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"the keys file {path} is larger than {FILE_BYTES_MAX} bytes; shorten it")
    return parse_keys(content, str(path))


def check_mode(path: Path, mode: int) -> None:
    """Raise ConfigError if the file is writable by its group or by others."""
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"the keys file {path} is writable by other users (mode {mode:04o}), who could grant"
            f" access; run: chmod 600 {path}"
        )


def parse_keys(content: bytes, source: str) -> list[KeyEntry]:
    """Parse the content of a file; `source` names the file in errors.

    Raises:
        ConfigError: with the number of the invalid line.
    """
    try:
        lines = content.decode().split("\n")
    except UnicodeDecodeError:
        raise ConfigError(f"the keys file {source} is not valid UTF-8; correct it") from None
    entries: dict[int, KeyEntry] = {}
    for line_number, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            entries[line_number] = _parse_line(line, f"{source}, line {line_number}")
    _check_together(entries, source)
    return list(entries.values())


def _parse_line(line: str, place: str) -> KeyEntry:
    try:
        data = json.loads(line, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        # Omit the parser's error: it could quote a key.
        raise ConfigError(f"{place} is not a JSON object with unique keys; correct it") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{place} is not a JSON object; correct it")
    try:
        return from_mapping(KeyEntry, data, place)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if place in text else f"{place}: {text}") from None


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError
    return data


def _check_together(entries: Mapping[int, KeyEntry], source: str) -> None:
    """Check for duplicate keys and conflicting limits; `entries` by line. Raises ConfigError."""
    seen: dict[str, int] = {}
    owners: dict[str, tuple[int, QuotaLimits]] = {}
    for line_number, entry in entries.items():
        if entry.sha256 in seen:
            raise ConfigError(
                f"{source} has the same key in line {seen[entry.sha256]} and line {line_number};"
                " remove either line"
            )
        seen[entry.sha256] = line_number
        first, limits = owners.setdefault(entry.owner, (line_number, entry.limits))
        if limits != entry.limits:
            raise ConfigError(
                f"{source} has different limits for '{entry.owner}' in line {line_number} and line"
                f" {first}; the keys of an owner share their limits, so make them equal"
            )
