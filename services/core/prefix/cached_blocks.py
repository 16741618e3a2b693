"""Index of a worker's KV blocks by block hash, for the reuse of cached prefixes.

A block is registered under its hash once its KV is computed, and stays registered until it is
evicted. A registered block that no request uses is *idle*: it counts as free, and idle blocks are
evicted in LRU order.
"""

from collections import deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from services.core.prefix.block_hash import thin_hash

EVICTED_MAX = 256
"""Maximum number of evicted hashes kept; earlier evictions are never reported."""


@dataclass(slots=True)
class EvictedPrefixes:
    """The newest thin hashes evicted from a cache, and their number since the start."""

    total: int = 0
    _newest: deque[int] = field(default_factory=lambda: deque(maxlen=EVICTED_MAX))

    def note(self, thin_hash: int) -> None:
        """Note the eviction of the block with this thin hash."""
        self.total += 1
        self._newest.append(thin_hash)

    def since(self, total: int) -> tuple[int, ...]:
        """The kept ones of the hashes evicted after the first `total` evictions."""
        count = min(self.total - total, len(self._newest))
        return tuple(islice(self._newest, len(self._newest) - count, None)) if count else ()


@dataclass(slots=True)
class CachedBlocks:
    """Hashes of registered blocks, and the idle ones among these blocks.

    `evictions` lists those of blocks registered as `reported`: the scheduler may count on these
    blocks, since their hashes are among the thin hashes of prompts.
    """

    evictions: EvictedPrefixes = field(default_factory=EvictedPrefixes)
    _reported: set[int] = field(default_factory=set)  # blocks whose eviction is listed
    _hash_of: dict[int, bytes] = field(default_factory=dict)
    _block_of: dict[bytes, int] = field(default_factory=dict)  # the inverse of `_hash_of`
    _idle: dict[int, None] = field(default_factory=dict)  # LRU order, least recently used first
    # Hashes of the blocks with a copy in host memory; None without host memory.
    copies: Container[bytes] | None = None
    # Idle blocks without such a copy, in LRU order; those whose copy failed may be missing.
    unsaved: dict[int, None] = field(default_factory=dict)

    @property
    def idle_count(self) -> int:
        """Number of registered blocks that no request uses."""
        return len(self._idle)

    @property
    def oldest(self) -> int | None:
        """The idle block that is evicted next; None without idle blocks."""
        return next(iter(self._idle), None)

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def find(self, hashes: Iterable[bytes]) -> Iterator[int]:
        """The blocks with these hashes, up to the first miss."""
        block_of = self._block_of
        for block_hash in hashes:
            block = block_of.get(block_hash)
            if block is None:
                return
            yield block

    def is_idle(self, block: int) -> bool:
        """Whether the block is registered and no request uses it."""
        return block in self._idle

    def in_use(self, block_hash: bytes) -> bool:
        """Whether a block with this hash is registered and used by a request."""
        block = self._block_of.get(block_hash)
        return block is not None and block not in self._idle

    def block_of(self, block_hash: bytes) -> int | None:
        """The block registered under this hash; None on a miss."""
        return self._block_of.get(block_hash)

    def register(self, block: int, block_hash: bytes, reported: bool = False) -> bool:
        """Register a block in use; False if the block or the hash is registered already."""
        if block in self._hash_of or block_hash in self._block_of:
            return False
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block
        if reported:
            self._reported.add(block)
        return True

    def relocate(self, source: int, target: int) -> None:
        """Transfer the registration of a block in use, if any, to the block its KV was moved to."""
        block_hash = self._hash_of.pop(source, None)
        if block_hash is not None:
            self._hash_of[target] = block_hash
            self._block_of[block_hash] = target
            if source in self._reported:
                self._reported.remove(source)
                self._reported.add(target)

    def make_idle(self, block: int) -> bool:
        """Mark a block without users as idle; False if it is not registered."""
        if block not in self._hash_of:
            return False
        self._idle[block] = None
        if self.copies is not None and self._hash_of[block] not in self.copies:
            self.unsaved[block] = None
        return True

    def reuse(self, block: int) -> None:
        """Mark an idle block as used."""
        del self._idle[block]
        if self.unsaved:
            self.unsaved.pop(block, None)

    def evict(self) -> tuple[int, bytes]:
        """Evict the least recently used idle block; returns the block and its hash."""
        block = next(iter(self._idle))
        block_hash = self._hash_of[block]
        self.forget(block)
        return block, block_hash

    def forget(self, block: int) -> None:
        """Unregister a block; no effect if it is not registered."""
        self._idle.pop(block, None)
        if self.unsaved:
            self.unsaved.pop(block, None)
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            if block in self._reported:
                self._reported.remove(block)
                self.note_absent(block_hash)

    def note_absent(self, block_hash: bytes) -> None:
        """List the eviction of a reported block, unless the device or the host still has it."""
        if block_hash in self._block_of or (self.copies is not None and block_hash in self.copies):
            return
        self.evictions.note(thin_hash(block_hash))

    def is_reported(self, block: int) -> bool:
        """Whether the eviction of the block would be listed."""
        return block in self._reported

    def hash_of(self, block: int) -> bytes:
        """The hash of a registered block."""
        return self._hash_of[block]

    def forget_from(self, limit: int) -> None:
        """Unregister the idle blocks with ids of at least `limit`."""
        for block in [block for block in self._idle if block >= limit]:
            self.forget(block)

    def clear(self) -> list[int]:
        """Unregister all blocks; returns those that were idle."""
        idle = list(self._idle)
        self._hash_of.clear()
        self._block_of.clear()
        self._idle.clear()
        self.unsaved.clear()
        self._reported.clear()
        return idle

    def check_invariants(self) -> None:
        """Hashes and blocks form a bijection, and idle blocks are registered."""
        assert self._block_of == {key: block for block, key in self._hash_of.items()}
        assert self._idle.keys() <= self._hash_of.keys()
        assert self._reported <= self._hash_of.keys()
        assert self.unsaved.keys() <= self._idle.keys()
