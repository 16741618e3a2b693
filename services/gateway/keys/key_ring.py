"""The keys of a gateway: finds the principal of a call, for every door."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from services.core.quota.limits import Limit
from services.gateway.keys.key_file import hash_of
from services.gateway.keys.key_source import KeySource
from services.gateway.keys.principal import ANYONE, Principal
from services.gateway.vocabulary.errors import Forbidden, Unauthorized

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

    def limited(self) -> dict[tuple[str, Limit], int]:
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
