"""Whether a gateway can use the file of keys, and which keys it accepts."""

import stat
from collections.abc import Iterator
from pathlib import Path

from services.common.errors import ConfigError
from services.gateway.keys.key_file import KeyEntry, read_keys
from tideserve.cli.doctor.finding import Check, Finding

CHECK = Check("keys")


def check_keys(path: Path, wants_admin: bool) -> list[Finding]:
    """What is wrong with the file at `path`, by the gateway's own rules.

    `wants_admin`: there is an admin port, and no key for it but admin keys of this file.
    """
    try:
        entries = read_keys(path)
    except ConfigError as error:
        return [CHECK.failure(f"{error}; gateways keep the keys they had, and none can start")]
    found = [*_lets_in(path, entries, wants_admin), *_replaceable(path)]
    return found or [CHECK.fine(_told(path, entries))]


def _lets_in(path: Path, entries: list[KeyEntry], wants_admin: bool) -> Iterator[Finding]:
    if not entries:
        yield CHECK.failure(
            f"{path} has no keys, so nobody is let in; make one: tideserve key new --owner NAME"
            f" {path}"
        )
    elif wants_admin and not any(entry.admin for entry in entries):
        yield CHECK.warning(
            f"{path} has no admin key, so nobody can see or change the cluster at its admin"
            f" port; make one: tideserve key new --owner NAME --admin {path}"
        )


def _replaceable(path: Path) -> Iterator[Finding]:
    """Whether others could put another file in its stead."""
    folder = path.resolve().parent
    mode = folder.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        yield CHECK.warning(
            f"others may write the folder {folder} and so put another file in the stead of"
            f" {path.name}; change that with: chmod go-w {folder}"
        )


def _told(path: Path, entries: list[KeyEntry]) -> str:
    owners = len({entry.owner for entry in entries})
    admins = sum(entry.admin for entry in entries)
    return f"{path} can be used; keys: {len(entries)}, owners: {owners}, admin keys: {admins}"
