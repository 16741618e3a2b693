"""Authenticates requests by API key; a principal is the owner and the permissions of a key."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from services.common.errors import ConfigError
from services.core.quota.limits import Limit
from services.gateway.keys.key_file import KeyEntry, hash_of, read_keys
from services.gateway.keys.principal import ANYONE, Principal
from services.gateway.vocabulary.errors import Forbidden, Unauthorized

log = logging.getLogger(__name__)

READ_ATTEMPTS = 3

Stamp = tuple[int, int, int, int]


class KeySource:
    """The entries of a keys file, reloaded on change.

    `failing`: the current content is invalid or keeps changing, so the previous keys stay in force.
    """

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ConfigError."""
        self._path = path
        self._stamp, self.entries = _read(path)
        self.digest = _digest(self.entries)
        self._invalid_stamp: Stamp | None = None
        # Whether the file was read twice with `_stamp`. Two writes within a tick of the file
        # system's clock have the same stamp, so a single read could miss the second write.
        self._confirmed = False
        self.failing = False

    def poll(self) -> bool:
        """Reload the file if it has changed; return whether the entries differ. May block."""
        stamp = _stamp(self._path)
        if self._confirmed and stamp is not None and stamp == self._stamp:
            self.failing = False
            return False
        if self.failing and stamp == self._invalid_stamp:
            return False
        try:
            stamp, entries = _read(self._path)
        except ConfigError as error:
            # Log each invalid content once.
            self._invalid_stamp, self.failing = stamp, True
            log.error("the keys file cannot be loaded, the previous keys stay in force: %s", error)
            return False
        self._confirmed, self._stamp, self.failing = stamp == self._stamp, stamp, False
        if entries == self.entries:
            return False
        self.entries, self.digest = entries, _digest(entries)
        log.info("loaded %d keys from %s", len(self.entries), self._path)
        return True


def _read(path: Path) -> tuple[Stamp | None, list[KeyEntry]]:
    """A consistent snapshot of the entries, and its stamp. Raises ConfigError."""
    for _ in range(READ_ATTEMPTS):
        before = _stamp(path)
        try:
            entries = read_keys(path)
        except ConfigError:
            # Retry if the file was replaced: Kubernetes may swap a Secret during the read.
            if _stamp(path) == before:
                raise
            continue
        if _stamp(path) == before:
            return before, entries
    raise ConfigError(f"the keys file {path} keeps changing; wait until the write completes")


def _digest(entries: Iterable[KeyEntry]) -> str:
    """A digest of the entries that ignores their order and comments."""
    lines = sorted(entry.line() for entry in entries)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _stamp(path: Path) -> Stamp | None:
    """A value that changes with the content of the file; None if the file is not accessible."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode


POLL_S = 1.0
# 48 bits, which the 64-bit float of a metric represents exactly.
DIGEST_DIGITS = 12


class KeyRing:
    """Keys from the settings and from a keys file.

    Keys are looked up by their hash, so the duration of a lookup reveals nothing about other keys.
    """

    def __init__(
        self,
        api_key: str | None = None,
        admin_key: str | None = None,
        path: Path | None = None,
        on_change: Callable[["KeyRing"], None] = lambda ring: None,
    ) -> None:
        """`api_key`: for clients, without limits. `admin_key`: for the admin port only.

        `on_change` is called on every change of the keys, and once at the start.

        Raises:
            ConfigError: if the file is invalid.
        """
        self._source = KeySource(path) if path is not None else None
        self._api_key = None if api_key is None else hash_of(api_key)
        self._admin_key = None if admin_key is None else hash_of(admin_key)
        self._clients: dict[str, Principal] = {}
        self._by_id: dict[tuple[str, str], Principal] = {}
        self._operators: dict[str, Principal] = {}
        self._on_change = on_change
        self._apply()

    @property
    def key_required(self) -> bool:
        """Whether clients need a key."""
        return self._api_key is not None or self._source is not None

    @property
    def failing(self) -> bool:
        """Whether the current content of the file is invalid or keeps changing."""
        return self._source is not None and self._source.failing

    @property
    def digest(self) -> int:
        """48 bits of a SHA-256 of the file's keys in force; 0 without a file."""
        return int(self._source.digest[:DIGEST_DIGITS], 16) if self._source is not None else 0

    @property
    def has_file(self) -> bool:
        """Whether there is a keys file; only its keys can have limits."""
        return self._source is not None

    def limits_by_owner(self) -> dict[tuple[str, Limit], int]:
        """The limits of all owners that have any."""
        return {
            (principal.owner, limit): value
            for principal in self._clients.values()
            for limit, value in principal.limits.given().items()
        }

    def principal(self, authorization: str | None) -> Principal:
        """Authenticate a client by its "authorization" header; ANYONE if no key is required.

        Raises:
            Unauthorized: if the key is missing or unknown.
        """
        if not self.key_required:
            return ANYONE
        principal = self._clients.get(_hash_of_bearer(authorization))
        if principal is None:
            raise Unauthorized("a valid API key is required; send 'Authorization: Bearer <key>'")
        return principal

    def principal_of(self, owner: str, key_id: str) -> Principal:
        """The present permissions of the key `key_id` of `owner`, for work without its client.

        Raises:
            Unauthorized: if the key is no longer valid.
        """
        principal = self._by_id.get((owner, key_id))
        if principal is None:
            raise Unauthorized("the API key of this batch is no longer valid; use another key")
        return principal

    def operator(self, authorization: str | None) -> Principal:
        """Authenticate a caller of the admin port; ANYONE without admin key and keys file.

        Raises:
            Unauthorized: if the key is missing or unknown.
            Forbidden: if the key is not an admin key.
        """
        if self._admin_key is None and self._source is None:
            return ANYONE
        key_hash = _hash_of_bearer(authorization)
        principal = self._operators.get(key_hash)
        if principal is not None:
            return principal
        if key_hash in self._clients:
            raise Forbidden("this key is not an admin key; use an admin key")
        raise Unauthorized("a valid admin key is required; send 'Authorization: Bearer <key>'")

    async def run(self) -> None:
        """Reload the file on change until cancelled."""
        while self._source is not None:
            await asyncio.sleep(POLL_S)
            # In a thread: a file on a network volume may be slow.
            if await asyncio.to_thread(self._source.poll):
                self._apply()

    def _apply(self) -> None:
        """Put the current keys in force."""
        clients: dict[str, Principal] = {}
        if self._api_key is not None:
            clients[self._api_key] = ANYONE
        # The file overrides `api_key`, so that a key with limits keeps them.
        if self._source is not None:
            clients |= {entry.sha256: entry.principal() for entry in self._source.entries}
        operators = {
            key_hash: principal for key_hash, principal in clients.items() if principal.admin
        }
        if self._admin_key is not None:
            operators[self._admin_key] = Principal(admin=True)
        self._clients, self._operators = clients, operators
        known = clients.values() if self.key_required else (ANYONE,)
        self._by_id = {(principal.owner, principal.key_id): principal for principal in known}
        self._on_change(self)


def _hash_of_bearer(authorization: str | None) -> str:
    """The hash of the key in an "authorization" header; "" without a key."""
    scheme, _, key = (authorization or "").partition(" ")
    key = key.strip()
    return hash_of(key.encode("latin-1", "replace")) if scheme.lower() == "bearer" and key else ""
