"""A line in which owners take turns, however much each of them wants."""

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class FairLine(Generic[T]):
    """Items that wait; the next one is the oldest of the owner whose turn it is.

    A new owner enters behind all owners that wait. So for every item of its own owner before it, an
    item waits for at most one item of each other owner.
    """

    def __init__(self, owned_max: int) -> None:
        """`owned_max`: items of one owner that may wait."""
        self._owned_max = owned_max
        # Owners in the order of their turns; their items in the order in which they came.
        self._waiting: dict[str, dict[T, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Items of all owners."""
        return self._count

    def join(self, owner: str, item: T) -> bool:
        """Add an item unless it waits already; False if its owner has as many as it may have."""
        line = self._waiting.get(owner, {})
        if item in line:
            return True
        if len(line) >= self._owned_max:
            return False
        self._waiting.setdefault(owner, line)[item] = None
        self._count += 1
        return True

    def leave(self, owner: str, item: T) -> bool:
        """Take an item out; False if it does not wait."""
        line = self._waiting.get(owner, {})
        if item not in line:
            return False
        self._take(owner, line, item)
        return True

    def leave_all(self, item: T) -> None:
        """Take an item out for all owners; no effect if it does not wait."""
        for owner, line in list(self._waiting.items()):
            if item in line:
                self._take(owner, line, item)

    def next(self, passed_over: Collection[str] = ()) -> T | None:
        """Take out the item whose turn it is; None if all that wait are `passed_over`."""
        turns = ((one, own) for one, own in self._waiting.items() if one not in passed_over)
        owner, line = next(turns, (None, None))
        if owner is None or line is None:
            return None
        item = next(iter(line))
        self._take(owner, line, item)
        if line:
            self._waiting[owner] = self._waiting.pop(owner)
        return item

    def _take(self, owner: str, line: dict[T, None], item: T) -> None:
        del line[item]
        self._count -= 1
        if not line:
            del self._waiting[owner]
