"""Updates of the prefix cache that the leader of a pipeline sends to its other stages.

All stages cache the same prefixes, each in its own blocks. Block ids differ between stages, so an
update names a block by its index in the block table of a sequence, or by its hash.
"""

from dataclasses import dataclass, field
from typing import NamedTuple


class NamedBlock(NamedTuple):
    """Register the block at index `place` of a sequence's block table under `block_hash`."""

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

    `forget`: clear the whole cache first. Blocks of sequences that ended are released after the
    blocks `named` are registered, so that these stay cached.
    """

    forget: bool = False
    named: tuple[NamedBlock, ...] = ()
    evicted: tuple[bytes, ...] = ()
    shared: tuple[SharedPrefix, ...] = ()


NO_PREFIX_UPDATE = PrefixCacheUpdate()


@dataclass(slots=True)
class PendingPrefixUpdate:
    """Accumulates, at the leader, the changes since the last microbatch."""

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
