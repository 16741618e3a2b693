"""Whose lines run next: owners, and then the batches of an owner, take turns by tokens.

The one that was served least goes first. A newcomer begins at the level of the one that was served
least, so it neither waits nor catches up with what the others had before it came.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Levels(Generic[K]):
    """Tokens served, by key, above an arbitrary base."""

    served: dict[K, int] = field(default_factory=dict)

    def keep(self, keys: Sequence[K]) -> None:
        """Admit new keys at the least level, and forget all others."""
        present = {key: self.served[key] for key in keys if key in self.served}
        least = min(present.values(), default=0)
        self.served = {key: present.get(key, least) for key in keys}

    def serve(self, key: K, tokens: int) -> None:
        """Count tokens of a key; no effect if it was forgotten."""
        if key in self.served:
            self.served[key] += tokens


@dataclass(slots=True)
class BatchTurns:
    """The turns of owners and of their batches."""

    _owners: _Levels[str] = field(default_factory=_Levels)
    _batches: dict[str, _Levels[str]] = field(default_factory=dict)  # by owner

    def keep(self, batches: Mapping[str, Sequence[str]]) -> None:
        """Set the batches in progress by owner, oldest first."""
        self._owners.keep([owner for owner, ids in batches.items() if ids])
        self._batches = {
            owner: self._batches.get(owner) or _Levels() for owner, ids in batches.items() if ids
        }
        for owner, levels in self._batches.items():
            levels.keep(batches[owner])

    def order(self) -> list[tuple[str, str]]:
        """Owner and batch in the order of their turns: the first batch of each owner, ..., then
        the others of the first owner, and so on."""
        owners = sorted(self._owners.served, key=self._owners.served.__getitem__)
        ordered = {
            owner: sorted(levels.served, key=levels.served.__getitem__)
            for owner, levels in self._batches.items()
        }
        heads = [(owner, ordered[owner][0]) for owner in owners]
        return heads + [(owner, batch) for owner in owners for batch in ordered[owner][1:]]

    def serve(self, owner: str, batch: str, tokens: int) -> None:
        """Count tokens of a line that was claimed or has ended."""
        self._owners.serve(owner, tokens)
        if owner in self._batches:
            self._batches[owner].serve(batch, tokens)

    def check_invariants(self) -> None:
        """Every owner has a batch, and no level is negative."""
        assert self._owners.served.keys() == self._batches.keys()
        assert all(levels.served for levels in self._batches.values())
        for levels in (self._owners, *self._batches.values()):
            assert all(served >= 0 for served in levels.served.values())
