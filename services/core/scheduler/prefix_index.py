"""An approximate index of the prompt prefixes in each group's KV cache, for the scheduler.

The scheduler does not see the caches. It assumes that a group caches every prompt sent to it and
evicts the least recently used blocks beyond its capacity; workers report their actual evictions.
A prompt is represented by thin hashes: the hashes of every `stride`-th KV block, each of which
identifies the whole prefix up to that block.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from services.core.prefix.block_hash import ThinHashes

HASHES_MAX = 2**16
"""Maximum number of thin hashes per group."""


@dataclass(slots=True)
class CachedPrefixes:
    """The thin hashes of a group in LRU order, each with the number of blocks it represents."""

    # Maximum of `blocks`, the KV blocks that all hashes represent.
    capacity: int
    blocks: int = 0
    # Blocks by thin hash, least recently used first.
    by_age: OrderedDict[int, int] = field(default_factory=OrderedDict)

    def put(self, thin_hash: int, blocks: int) -> None:
        """Insert a hash that represents `blocks`, or make it the most recently used."""
        self.blocks += blocks - self.by_age.pop(thin_hash, 0)
        self.by_age[thin_hash] = blocks

    def discard(self, thin_hash: int) -> bool:
        """Remove a hash; returns whether it was present."""
        blocks = self.by_age.pop(thin_hash, None)
        self.blocks -= blocks or 0
        return blocks is not None

    def evict(self) -> Iterator[int]:
        """Remove least recently used hashes until the rest fits, and yield them."""
        while self.by_age and (self.blocks > self.capacity or len(self.by_age) > HASHES_MAX):
            thin_hash, blocks = self.by_age.popitem(last=False)
            self.blocks -= blocks
            yield thin_hash


@dataclass(slots=True)
class PrefixIndex:
    """Thin hashes by group, and groups by thin hash; lookups are linear in a prompt's hashes."""

    _cached: dict[str, CachedPrefixes] = field(default_factory=dict)
    # Groups by thin hash, the latest insertion last. Dictionaries instead of sets, whose order
    # differs between processes: replay must be deterministic.
    _holders: dict[int, dict[str, None]] = field(default_factory=dict)

    def join(self, group_id: str, capacity_blocks: int) -> None:
        """Add a group that is not in the index, with an empty cache."""
        assert group_id not in self._cached
        self._cached[group_id] = CachedPrefixes(capacity_blocks)

    def leave(self, group_id: str) -> None:
        """Remove a group that is in the index."""
        for thin_hash in self._cached.pop(group_id).by_age:
            self._remove_holder(thin_hash, group_id)

    def resize(self, group_id: str, capacity_blocks: int) -> None:
        """Set the number of KV blocks of a group, evicting what no longer fits."""
        cached = self._cached[group_id]
        cached.capacity = capacity_blocks
        self._evict(group_id, cached)

    def insert(self, group_id: str, prefix: ThinHashes) -> None:
        """Record that a prompt was sent to a group."""
        cached = self._cached[group_id]
        # Insert the longest prefix first, so that it is evicted first: a block without its
        # predecessors is useless. Workers evict in the same order.
        for thin_hash in reversed(prefix.hashes):
            cached.put(thin_hash, prefix.stride)
            self._holders.setdefault(thin_hash, {})[group_id] = None
        self._evict(group_id, cached)

    def remove_hashes(self, group_id: str, thin_hashes: Iterable[int]) -> None:
        """Remove hashes that a group has evicted; hashes not in the index are ignored."""
        cached = self._cached[group_id]
        for thin_hash in thin_hashes:
            if cached.discard(thin_hash):
                self._remove_holder(thin_hash, group_id)

    def matched_blocks(self, group_id: str, prefix: ThinHashes) -> int:
        """Length in blocks of the longest prefix of a prompt that a group probably has cached."""
        by_age, length = self._cached[group_id].by_age, len(prefix.hashes)
        # Each hash identifies its whole prefix, so the last hash in the index decides.
        while length and prefix.hashes[length - 1] not in by_age:
            length -= 1
        return length * prefix.stride

    def by_longest_match(self, prefix: ThinHashes) -> Iterator[str]:
        """Groups that probably have a prefix of a prompt cached, the longest match first.

        Among equal matches, the group with the most recent insertion comes first.
        """
        seen: set[str] = set()
        for thin_hash in reversed(prefix.hashes):
            for group_id in reversed(self._holders.get(thin_hash, _NO_HOLDERS)):
                if group_id not in seen:
                    seen.add(group_id)
                    yield group_id

    def check_invariants(self) -> None:
        """Raise AssertionError if the two indexes disagree, or a group exceeds its capacity."""
        pairs = {(key, name) for name, cached in self._cached.items() for key in cached.by_age}
        assert pairs == {(key, name) for key, groups in self._holders.items() for name in groups}
        assert all(self._holders.values()), "a hash without a holder is kept"
        for cached in self._cached.values():
            assert cached.blocks == sum(cached.by_age.values()) <= max(0, cached.capacity)
            assert len(cached.by_age) <= HASHES_MAX

    def _evict(self, group_id: str, cached: CachedPrefixes) -> None:
        for thin_hash in cached.evict():
            self._remove_holder(thin_hash, group_id)

    def _remove_holder(self, thin_hash: int, group_id: str) -> None:
        holders = self._holders[thin_hash]
        del holders[group_id]
        if not holders:
            del self._holders[thin_hash]


_NO_HOLDERS: dict[str, None] = {}
