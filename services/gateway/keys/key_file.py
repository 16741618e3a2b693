"""The file of keys: one JSON object a line, with the SHA-256 of a key and what it allows.

A key is a prefix, by which scanners for leaked secrets know it, and 32 random bytes. So much chance
cannot be guessed from its hash, and the file needs no slow one. It says which clients are let in,
so only its owner may write it. Empty lines and lines that begin with # are ignored.
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
"""The highest limit that a key may have."""

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# Digits of base 62 that hold any 32 bytes.
_KEY_DIGITS = 43
_HASH = re.compile(r"[0-9a-f]{64}")
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:/+-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """One line. `models` None: all of them. `created` is for people."""

    owner: str = option()
    sha256: str = option()
    admin: bool = option(False)
    models: tuple[str, ...] | None = option(None)
    requests_per_minute: int | None = number(None, minimum=1, maximum=LIMIT_MAX)
    tokens_per_minute: int | None = number(None, minimum=1, maximum=LIMIT_MAX)
    concurrent: int | None = number(None, minimum=1, maximum=LIMIT_MAX)
    created: str | None = option(None)

    def __post_init__(self) -> None:
        if not _OWNER.fullmatch(self.owner):
            raise ConfigError(
                "'owner' must be 1 to 64 letters, digits and ._@:/+-, and begin with one of the"
                " first two"
            )
        # The field may hold a key by mistake, so it is not quoted.
        if not _HASH.fullmatch(self.sha256):
            raise ConfigError("'sha256' must be 64 hexadecimal digits, in small letters")
        if self.models is not None and not (
            self.models and all(isinstance(model, str) and model for model in self.models)
        ):
            raise ConfigError("'models' must be a list of names; leave it out to allow all")

    @property
    def key_id(self) -> str:
        """Names the key in lists and logs."""
        return self.sha256[:ID_DIGITS]

    @property
    def limits(self) -> QuotaLimits:
        """The limits of all keys of the owner together."""
        return QuotaLimits(self.requests_per_minute, self.tokens_per_minute, self.concurrent)

    def principal(self) -> Principal:
        """The principal of the key's bearer."""
        models = None if self.models is None else frozenset(self.models)
        return Principal(self.owner, self.admin, models, self.limits, self.key_id)

    def line(self) -> str:
        """The entry as it stands in a file, without the line's end."""
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
        ConfigError: if it cannot be read, others may write it, or a line of it is wrong.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read the keys file {path}: {error.strerror}; correct the path or the"
            " permissions, or make it with `tideserve key new`"
        ) from error
    check_mode(path, mode)
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"the keys file {path} is larger than {FILE_BYTES_MAX} bytes; shorten it")
    return parse_keys(content, str(path))


def check_mode(path: Path, mode: int) -> None:
    """Raise ConfigError if another user than the file's owner may write to it."""
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"others may write the keys file {path} (mode {mode:04o}) and let anybody in; change"
            f" that with: chmod 600 {path}"
        )


def parse_keys(content: bytes, source: str) -> list[KeyEntry]:
    """The entries in the text of a file; `source` names it in errors.

    Raises:
        ConfigError: names the line and what is wrong with it.
    """
    try:
        lines = content.decode().split("\n")
    except UnicodeDecodeError:
        raise ConfigError(f"the keys file {source} is not text in UTF-8; correct it") from None
    entries: dict[int, KeyEntry] = {}
    for place, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            entries[place] = _parse_line(line, f"{source}, line {place}")
    _check_together(entries, source)
    return list(entries.values())


def _parse_line(line: str, place: str) -> KeyEntry:
    try:
        data = json.loads(line, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        # The error is left out: it could quote a key.
        raise ConfigError(f"{place} is not a JSON object with each key once; correct it") from None
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
    """Check the lines against each other. Raises ConfigError."""
    seen: dict[str, int] = {}
    owners: dict[str, tuple[int, QuotaLimits]] = {}
    for place, entry in entries.items():
        if entry.sha256 in seen:
            raise ConfigError(
                f"{source} has the same key in line {seen[entry.sha256]} and line {place}; take"
                " one out"
            )
        seen[entry.sha256] = place
        first, limits = owners.setdefault(entry.owner, (place, entry.limits))
        if limits != entry.limits:
            raise ConfigError(
                f"{source} gives '{entry.owner}' other limits in line {place} than in line"
                f" {first}; the keys of an owner share their limits, so make them equal"
            )
