"""A queue that serves owners (such as tenants) round-robin, so that none can starve the others."""

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class RoundRobinQueue(Generic[T]):
    """FIFO queue per owner, served round-robin across owners.

    A new owner joins behind all waiting owners. So an entry waits for the earlier entries of its
    owner, and for each of these for at most a single entry of every other owner.
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

    def join(self, owner: str, entry: T) -> bool:
        """Queue an entry, unless it is queued already; False if its owner is at `owned_max`."""
        queue = self._waiting.get(owner, {})
        if entry in queue:
            return True
        if len(queue) >= self._owned_max:
            return False
        self._waiting.setdefault(owner, queue)[entry] = None
        self._count += 1
        return True

    def leave(self, owner: str, entry: T) -> bool:
        """Remove an entry; False if it is not queued."""
        queue = self._waiting.get(owner, {})
        if entry not in queue:
            return False
        self._take(owner, queue, entry)
        return True

    def leave_all(self, entry: T) -> None:
        """Remove an entry for all owners; no effect if it is not queued."""
        for owner, queue in list(self._waiting.items()):
            if entry in queue:
                self._take(owner, queue, entry)

    def next(self, passed_over: Collection[str] = ()) -> T | None:
        """Remove and return the next entry; None if all waiting owners are `passed_over`."""
        turns = ((key, own) for key, own in self._waiting.items() if key not in passed_over)
        owner, queue = next(turns, (None, None))
        if owner is None or queue is None:
            return None
        entry = next(iter(queue))
        self._take(owner, queue, entry)
        if queue:
            # Move the owner behind all others, which are served before its next entry.
            self._waiting[owner] = self._waiting.pop(owner)
        return entry

    def _take(self, owner: str, queue: dict[T, None], entry: T) -> None:
        del queue[entry]
        self._count -= 1
        if not queue:
            del self._waiting[owner]
