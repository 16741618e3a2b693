"""Updates of the prefix cache that a leader sends to its pipeline stages."""

from dataclasses import dataclass, field
from typing import NamedTuple


class NamedBlock(NamedTuple):
    """Register block `place` of a sequence's block table under `block_hash`."""

    seq_id: str
    place: int
    block_hash: bytes


class SharedPrefix(NamedTuple):
    """The block table of a new sequence begins with the blocks registered under these hashes."""

    seq_id: str
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PrefixCacheUpdate:
    """Changes that every stage applies before it runs a microbatch, in the order of the fields.

    `forget`: drop the whole cache first. Blocks that the microbatch releases are released after
    `named` blocks are registered.
    """

    forget: bool = False
    named: tuple[NamedBlock, ...] = ()
    evicted: tuple[bytes, ...] = ()
    shared: tuple[SharedPrefix, ...] = ()


NO_PREFIX_UPDATE = PrefixCacheUpdate()


@dataclass(slots=True)
class PendingPrefixUpdate:
    """Accumulates the changes since the last microbatch."""

    forget: bool = False
    named: list[NamedBlock] = field(default_factory=list)
    evicted: set[bytes] = field(default_factory=set)
    shared: list[SharedPrefix] = field(default_factory=list)

    def take(self) -> PrefixCacheUpdate | None:
        """Return and clear the accumulated changes; None without changes."""
        if not (self.forget or self.named or self.evicted or self.shared):
            return None
        # Sorted: the order of a set would differ between a run and the replay of its log.
        evicted = tuple(sorted(self.evicted))
        update = PrefixCacheUpdate(self.forget, tuple(self.named), evicted, tuple(self.shared))
        self.forget = False
        self.named.clear()
        self.evicted.clear()
        self.shared.clear()
        return update
