"""Compares the key that a request carries with the one that is wanted."""

import hashlib
import hmac

from starlette.types import Scope

from services.gateway.errors import Unauthorized


class KeyCheck:
    """One key, or none; looks at the Authorization header only, never at the URL."""

    def __init__(self, key: str | None, name: str) -> None:
        """`name`: of the key, for people: "API key"."""
        # Comparing digests takes the same time whatever is alike.
        self._digest = _digest(key.encode()) if key is not None else None
        self._name = name

    @property
    def needed(self) -> bool:
        """Whether there is a key at all."""
        return self._digest is not None

    def check(self, scope: Scope) -> None:
        """Raise Unauthorized unless the request carries the key, or none is wanted."""
        if self._digest is None:
            return
        headers = scope["headers"]
        given = next((value for name, value in headers if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        right = hmac.compare_digest(_digest(key.strip()), self._digest)
        if kind.lower() != b"bearer" or not right:
            raise Unauthorized(
                f"a valid {self._name} is needed; send 'Authorization: Bearer <key>'"
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
