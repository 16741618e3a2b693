"""A round-robin queue over owners, so that a single owner cannot starve the others."""

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class FairLine(Generic[T]):
    """FIFO queue per owner, served round-robin across owners.

    A new owner joins behind all waiting owners. So for each earlier entry of its own owner, an
    entry waits for at most a single entry of every other owner.
    """

    def __init__(self, owned_max: int) -> None:
        """`owned_max`: maximum number of queued entries per owner."""
        self._owned_max = owned_max
        # Owners in round-robin order; each owner's entries in arrival order (dict as ordered set).
        self._waiting: dict[str, dict[T, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Queued entries of all owners."""
        return self._count

    def join(self, owner: str, item: T) -> bool:
        """Queue an entry, unless it is queued already; False if its owner is at `owned_max`."""
        line = self._waiting.get(owner, {})
        if item in line:
            return True
        if len(line) >= self._owned_max:
            return False
        self._waiting.setdefault(owner, line)[item] = None
        self._count += 1
        return True

    def leave(self, owner: str, item: T) -> bool:
        """Remove an entry; False if it is not queued."""
        line = self._waiting.get(owner, {})
        if item not in line:
            return False
        self._take(owner, line, item)
        return True

    def leave_all(self, item: T) -> None:
        """Remove an entry for all owners; no effect if it is not queued."""
        for owner, line in list(self._waiting.items()):
            if item in line:
                self._take(owner, line, item)

    def next(self, passed_over: Collection[str] = ()) -> T | None:
        """Remove and return the next entry; None if all waiting owners are `passed_over`."""
        turns = ((key, own) for key, own in self._waiting.items() if key not in passed_over)
        owner, line = next(turns, (None, None))
        if owner is None or line is None:
            return None
        item = next(iter(line))
        self._take(owner, line, item)
        if line:
            # Move the owner to the back: its turn is over.
            self._waiting[owner] = self._waiting.pop(owner)
        return item

    def _take(self, owner: str, line: dict[T, None], item: T) -> None:
        del line[item]
        self._count -= 1
        if not line:
            del self._waiting[owner]
