"""Checks the file of API keys."""

import stat
from collections.abc import Iterator
from pathlib import Path

from services.common.errors import ConfigError
from services.gateway.keys.key_file import KeyEntry, read_keys
from tideserve.cli.doctor.finding import Check, Finding

CHECK = Check("keys")


def check_keys(path: Path, wants_admin: bool) -> list[Finding]:
    """Check the file at `path` by the gateway's rules.

    `wants_admin`: the admin port accepts admin keys of this file only.
    """
    try:
        entries = read_keys(path)
    except ConfigError as error:
        return [
            CHECK.failure(
                f"{error}; running gateways keep their old keys, and no gateway can start"
            )
        ]
    faults = [*_missing_keys(path, entries, wants_admin), *_replaceable(path)]
    return faults or [CHECK.fine(_summary(path, entries))]


def _missing_keys(path: Path, entries: list[KeyEntry], wants_admin: bool) -> Iterator[Finding]:
    if not entries:
        yield CHECK.failure(
            f"{path} has no keys, so all requests are rejected; create a key: tideserve key new"
            f" --owner NAME {path}"
        )
    elif wants_admin and not any(entry.admin for entry in entries):
        yield CHECK.warning(
            f"{path} has no admin key, so the admin port rejects all requests; create a key:"
            f" tideserve key new --owner NAME --admin {path}"
        )


def _replaceable(path: Path) -> Iterator[Finding]:
    """Warn if other users could replace the file."""
    folder = path.resolve().parent
    mode = folder.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        yield CHECK.warning(
            f"other users may write to the folder {folder} and so replace {path.name}; fix it with:"
            f" chmod go-w {folder}"
        )


def _summary(path: Path, entries: list[KeyEntry]) -> str:
    owners = len({entry.owner for entry in entries})
    admins = sum(entry.admin for entry in entries)
    return f"{path} is valid; keys: {len(entries)}, owners: {owners}, admin keys: {admins}"
