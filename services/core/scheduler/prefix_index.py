"""Which groups have which beginnings of prompts in their KV caches: an approximate index.

The scheduler sees no cache. It assumes that a group keeps what is sent there, least recently used
first out, within its blocks; workers correct that by the blocks that they have dropped. A prompt is
known here by its thin hashes, each of which stands for the whole prompt up to there.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from services.core.prefix.block_hash import ThinHashes

HASHES_MAX = 2**16
"""Most thin hashes that are kept of one group, however many blocks it has."""


@dataclass(slots=True)
class HeldPrefixes:
    """The thin hashes of one group, least recently used first, each with the blocks it stands for.

    `capacity` and the blocks are counted in KV blocks.
    """

    capacity: int
    blocks: int = 0
    by_age: OrderedDict[int, int] = field(default_factory=OrderedDict)

    def put(self, thin_hash: int, blocks: int) -> None:
        """Make this the most recently used one; it stands for so many blocks from now on."""
        self.blocks += blocks - self.by_age.pop(thin_hash, 0)
        self.by_age[thin_hash] = blocks

    def discard(self, thin_hash: int) -> bool:
        """Take one out; returns whether it was there."""
        blocks = self.by_age.pop(thin_hash, None)
        self.blocks -= blocks or 0
        return blocks is not None

    def evict(self) -> Iterator[int]:
        """Take out the least recently used ones until the rest fits; yields them."""
        while self.by_age and (self.blocks > self.capacity or len(self.by_age) > HASHES_MAX):
            thin_hash, blocks = self.by_age.popitem(last=False)
            self.blocks -= blocks
            yield thin_hash


@dataclass(slots=True)
class PrefixIndex:
    """Thin hashes by group, and groups by thin hash; lookups cost O(thin hashes of a prompt)."""

    _held: dict[str, HeldPrefixes] = field(default_factory=dict)
    # Dictionaries instead of sets, whose order differs from one process to the next.
    _holders: dict[int, dict[str, None]] = field(default_factory=dict)

    def join(self, group_id: str, capacity_blocks: int) -> None:
        """A group that is not in the index comes with an empty cache."""
        assert group_id not in self._held
        self._held[group_id] = HeldPrefixes(capacity_blocks)

    def leave(self, group_id: str) -> None:
        """Forget a group that is in the index."""
        for thin_hash in self._held.pop(group_id).by_age:
            self._no_holder(thin_hash, group_id)

    def resize(self, group_id: str, capacity_blocks: int) -> None:
        """A group has so many blocks now."""
        held = self._held[group_id]
        held.capacity = capacity_blocks
        self._evict(group_id, held)

    def fill(self, group_id: str, prefix: ThinHashes) -> None:
        """A group gets a prompt. The hash of the longest part is the first to go, as in caches:
        without the shorter part it is of no use.
        """
        held = self._held[group_id]
        for thin_hash in reversed(prefix.hashes):
            held.put(thin_hash, prefix.stride)
            self._holders.setdefault(thin_hash, {})[group_id] = None
        self._evict(group_id, held)

    def drop(self, group_id: str, thin_hashes: Iterable[int]) -> None:
        """A group no longer has these; those that are not known are ignored."""
        held = self._held[group_id]
        for thin_hash in thin_hashes:
            if held.discard(thin_hash):
                self._no_holder(thin_hash, group_id)

    def matched_blocks(self, group_id: str, prefix: ThinHashes) -> int:
        """Blocks at the beginning of a prompt that a group probably has."""
        by_age, place = self._held[group_id].by_age, len(prefix.hashes)
        while place and prefix.hashes[place - 1] not in by_age:
            place -= 1
        return place * prefix.stride

    def longest(self, prefix: ThinHashes) -> Iterator[str]:
        """Groups that probably have a beginning of a prompt, those with the longest part first.

        The one that got its part last comes first of equals.
        """
        seen: set[str] = set()
        for thin_hash in reversed(prefix.hashes):
            for group_id in reversed(self._holders.get(thin_hash, _NOBODY)):
                if group_id not in seen:
                    seen.add(group_id)
                    yield group_id

    def check_invariants(self) -> None:
        """Raise AssertionError if the two orders disagree, or a group has more than fits."""
        pairs = {(key, one) for one, held in self._held.items() for key in held.by_age}
        assert pairs == {(key, one) for key, groups in self._holders.items() for one in groups}
        assert all(self._holders.values()), "a hash without a holder is kept"
        for held in self._held.values():
            assert held.blocks == sum(held.by_age.values()) <= max(0, held.capacity)
            assert len(held.by_age) <= HASHES_MAX

    def _evict(self, group_id: str, held: HeldPrefixes) -> None:
        for thin_hash in held.evict():
            self._no_holder(thin_hash, group_id)

    def _no_holder(self, thin_hash: int, group_id: str) -> None:
        holders = self._holders[thin_hash]
        del holders[group_id]
        if not holders:
            del self._holders[thin_hash]


_NOBODY: dict[str, None] = {}
