"""Which prefixes a cache has dropped lately, for a scheduler that believes them to be there."""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

DROPPED_MAX = 256
"""Most that are remembered, and that a report tells; what is older stays believed."""


@dataclass(slots=True)
class DroppedPrefixes:
    """The newest thin hashes, and how many there have been since the start."""

    total: int = 0
    _newest: deque[int] = field(default_factory=lambda: deque(maxlen=DROPPED_MAX))

    def note(self, thin_hash: int) -> None:
        """A block with this thin hash is no longer there."""
        self.total += 1
        self._newest.append(thin_hash)

    def since(self, total: int) -> tuple[int, ...]:
        """The hashes since there were `total`, as far as they are remembered."""
        count = min(self.total - total, len(self._newest))
        return tuple(islice(self._newest, len(self._newest) - count, None)) if count else ()
