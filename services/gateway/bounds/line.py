"""Counts what each guest may have at a time, and all guests together."""

import contextlib
from collections import Counter
from collections.abc import Iterator


class Line:
    """Calls in one state, counted by guest."""

    def __init__(self, each_max: int, all_max: int) -> None:
        self._each_max = each_max
        self._all_max = all_max
        self._of: Counter[str] = Counter()
        self._all = 0

    @property
    def total(self) -> int:
        """The count of all guests together."""
        return self._all

    def full(self, guest: str) -> bool:
        """Whether the guest may have no more; a guest that has none may always have one."""
        own = self._of.get(guest, 0)
        return own >= self._each_max or (own > 0 and self._all >= self._all_max)

    @contextlib.contextmanager
    def entered(self, guest: str, count: int = 1) -> Iterator[None]:
        """Count `count` calls in, even if they are too many, and out at the end."""
        self._of[guest] += count
        self._all += count
        try:
            yield
        finally:
            self._all -= count
            self._of[guest] -= count
            if not self._of[guest]:
                del self._of[guest]
