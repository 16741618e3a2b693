"""Blocks of one worker that hold the KV of a known prefix, by its hash.

A block is named when its KV is there, and keeps its name until it is taken for something else. A
named block that no request uses is *idle*: it counts as free, and the one that was used longest ago
is taken first.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from services.core.prefix.block_hash import thin_hash

DROPPED_MAX = 256
"""Most that are remembered, and that a report tells; what is older stays believed."""


@dataclass(slots=True)
class DroppedPrefixes:
    """The newest thin hashes that a cache has dropped, and how many since the start."""

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


@dataclass(slots=True)
class CachedBlocks:
    """Names of blocks, and which named blocks are idle.

    `dropped`: evicted hashes that the scheduler may know, since their blocks were named `reported`.
    """

    dropped: DroppedPrefixes = field(default_factory=DroppedPrefixes)
    _reported: set[int] = field(default_factory=set)
    _hash_of: dict[int, bytes] = field(default_factory=dict)
    _block_of: dict[bytes, int] = field(default_factory=dict)
    _idle: dict[int, None] = field(default_factory=dict)  # the first was used longest ago

    @property
    def idle_count(self) -> int:
        """Blocks that no request uses."""
        return len(self._idle)

    @property
    def oldest(self) -> int | None:
        """The idle block that is taken next; None if there is none."""
        return next(iter(self._idle), None)

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def find(self, hashes: Iterable[bytes]) -> Iterator[int]:
        """The blocks with these names, up to the first name that no block has."""
        block_of = self._block_of
        for one in hashes:
            block = block_of.get(one)
            if block is None:
                return
            yield block

    def is_idle(self, block: int) -> bool:
        """Whether no request uses the block, which has a name."""
        return block in self._idle

    def in_use(self, block_hash: bytes) -> bool:
        """Whether a block has this name and some request uses it."""
        block = self._block_of.get(block_hash)
        return block is not None and block not in self._idle

    def block_of(self, block_hash: bytes) -> int | None:
        """The block with this name; None if there is none."""
        return self._block_of.get(block_hash)

    def register(self, block: int, block_hash: bytes, reported: bool = False) -> bool:
        """Give a block in use its name; False if it has one, or another block has this one."""
        if block in self._hash_of or block_hash in self._block_of:
            return False
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block
        if reported:
            self._reported.add(block)
        return True

    def relocate(self, source: int, target: int) -> None:
        """The KV of a block in use, if it has a name, is in another one from now on."""
        block_hash = self._hash_of.pop(source, None)
        if block_hash is not None:
            self._hash_of[target] = block_hash
            self._block_of[block_hash] = target
            if source in self._reported:
                self._reported.remove(source)
                self._reported.add(target)

    def make_idle(self, block: int) -> bool:
        """Nobody uses the block any more; returns whether it has a name, and thus is idle now."""
        if block not in self._hash_of:
            return False
        self._idle[block] = None
        return True

    def reuse(self, block: int) -> None:
        """A request uses the idle block again."""
        del self._idle[block]

    def evict(self) -> tuple[int, bytes]:
        """Forget the oldest idle block, which is the caller's from now on; also its old name."""
        block = next(iter(self._idle))
        block_hash = self._hash_of[block]
        self.forget(block)
        return block, block_hash

    def forget(self, block: int) -> None:
        """Take the name of a block away, if it has one."""
        self._idle.pop(block, None)
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            if block in self._reported:
                self._reported.remove(block)
                self.dropped.note(thin_hash(block_hash))

    def forget_from(self, limit: int) -> None:
        """Forget the idle blocks from `limit` on."""
        for block in [block for block in self._idle if block >= limit]:
            self.forget(block)

    def clear(self) -> list[int]:
        """Forget all names; returns the blocks that were idle."""
        idle = list(self._idle)
        self._hash_of.clear()
        self._block_of.clear()
        self._idle.clear()
        self._reported.clear()
        return idle

    def check_invariants(self) -> None:
        """A name has one block, a block one name, and idle ones have a name."""
        assert self._block_of == {name: block for block, name in self._hash_of.items()}
        assert self._idle.keys() <= self._hash_of.keys()
        assert self._reported <= self._hash_of.keys()
