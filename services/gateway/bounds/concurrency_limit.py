"""Concurrency limits for each client and for all clients together."""

import contextlib
from collections import Counter
from collections.abc import Iterator


class ConcurrencyLimit:
    """Counts calls by client. `limit_key` is the owner of the API key, else the client's address.

    `each_max` limits the calls of a client, `all_max` the calls of all clients together.
    """

    def __init__(self, each_max: int, all_max: int) -> None:
        self._each_max = each_max
        self._all_max = all_max
        self._of: Counter[str] = Counter()
        self._all = 0

    @property
    def total(self) -> int:
        """The count of all clients together."""
        return self._all

    def full(self, limit_key: str) -> bool:
        """Whether the client is at its limit. A client without calls may always start a call."""
        # Exempt the first call from `all_max`: else a few clients could exclude all others.
        own = self._of.get(limit_key, 0)
        return own >= self._each_max or (own > 0 and self._all >= self._all_max)

    @contextlib.contextmanager
    def entered(self, limit_key: str, count: int = 1) -> Iterator[None]:
        """Count `count` calls while the block runs, even beyond the limit."""
        self._of[limit_key] += count
        self._all += count
        try:
            yield
        finally:
            self._all -= count
            self._of[limit_key] -= count
            if not self._of[limit_key]:
                del self._of[limit_key]
