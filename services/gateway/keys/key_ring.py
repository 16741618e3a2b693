"""The keys of a gateway: finds the principal of a call, for every door."""

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
    """The entries of one file, which is read again when it changes.

    `failing`: while its present content is not usable; then the former keys stay in force.
    """

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


POLL_S = 1.0
# So many digits of a digest are exact in a float of 64 bits.
DIGEST_DIGITS = 12


class KeyRing:
    """Keys from the settings and from a file.

    A key is looked up by its hash, so the time of a look-up reveals nothing about other keys.
    """

    def __init__(
        self,
        api_key: str | None = None,
        admin_key: str | None = None,
        path: Path | None = None,
        changed: Callable[["KeyRing"], None] = lambda ring: None,
    ) -> None:
        """`api_key`: of clients, without limits; `admin_key`: of the admin port only; `changed` is
        called when there are other keys, and at first.

        Raises:
            ConfigError: if the file is not usable.
        """
        self._source = KeySource(path) if path is not None else None
        self._api_key = None if api_key is None else hash_of(api_key)
        self._admin_key = None if admin_key is None else hash_of(admin_key)
        self._clients: dict[str, Principal] = {}
        self._operators: dict[str, Principal] = {}
        self._changed = changed
        self._take_over()

    @property
    def needed(self) -> bool:
        """Whether clients need a key."""
        return self._api_key is not None or self._source is not None

    @property
    def failing(self) -> bool:
        """Whether the file has changed and is not usable now."""
        return self._source is not None and self._source.failing

    @property
    def digest(self) -> int:
        """48 bits of a SHA-256 of the keys of the file that are in force; 0 without a file."""
        return int(self._source.digest[:DIGEST_DIGITS], 16) if self._source is not None else 0

    @property
    def has_file(self) -> bool:
        """Whether there is a file of keys; only then can owners have limits."""
        return self._source is not None

    def limits_by_owner(self) -> dict[tuple[str, Limit], int]:
        """The limits of each owner that has some."""
        return {
            (one.owner, limit): value
            for one in self._clients.values()
            for limit, value in one.limits.given().items()
        }

    def principal(self, authorization: str | None) -> Principal:
        """A client's principal, by its header or metadata "authorization"; ANYONE without keys.

        Raises:
            Unauthorized: if there is no key, or nobody knows it.
        """
        if not self.needed:
            return ANYONE
        found = self._clients.get(_hash_of_bearer(authorization))
        if found is None:
            raise Unauthorized("a valid API key is needed; send 'Authorization: Bearer <key>'")
        return found

    def operator(self, authorization: str | None) -> Principal:
        """The caller of the admin port, which is open without an admin key and a file of keys.

        Raises:
            Unauthorized: if there is no key, or nobody knows it.
            Forbidden: if it is the key of a client.
        """
        if self._admin_key is None and self._source is None:
            return ANYONE
        digest = _hash_of_bearer(authorization)
        found = self._operators.get(digest)
        if found is not None:
            return found
        if digest in self._clients:
            raise Forbidden("this key is not for operators; use an admin key")
        raise Unauthorized("a valid admin key is needed; send 'Authorization: Bearer <key>'")

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while self._source is not None:
            await asyncio.sleep(POLL_S)
            # Reading a file on a network may be slow.
            if await asyncio.to_thread(self._source.poll):
                self._take_over()

    def _take_over(self) -> None:
        clients: dict[str, Principal] = {}
        if self._api_key is not None:
            clients[self._api_key] = ANYONE
        # A key that has limits in the file keeps them.
        if self._source is not None:
            clients |= {one.sha256: one.principal() for one in self._source.entries}
        operators = {digest: one for digest, one in clients.items() if one.admin}
        if self._admin_key is not None:
            operators[self._admin_key] = Principal(admin=True)
        self._clients, self._operators = clients, operators
        self._changed(self)


def _hash_of_bearer(authorization: str | None) -> str:
    """The hash of the key in the header; "" where there is none."""
    kind, _, key = (authorization or "").partition(" ")
    key = key.strip()
    return hash_of(key.encode("latin-1", "replace")) if kind.lower() == "bearer" and key else ""
