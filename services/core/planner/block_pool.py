"""Allocates the KV blocks of a worker (a stage, if it is part of a pipeline)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import lt

from services.core.prefix.cached_blocks import CachedBlocks


@dataclass(slots=True)
class BlockPool:
    """Allocates block ids 0 .. num_blocks - 1, with a reference count per block.

    A block is *taken* (by a sequence, or by several that share it), *empty*, or *cached*: free, but
    holding a known prefix.

    Allocation prefers empty blocks over cached ones, and the lowest id. So the highest ids become
    free over time and their memory can be reclaimed: `limit` excludes them from allocation, and
    `shrink` removes them once none is taken.
    """

    num_blocks: int
    cache: CachedBlocks = field(init=False, default_factory=CachedBlocks)
    _empty: list[int] = field(init=False)  # a heap of ids below the limit
    _taken: dict[int, int] = field(init=False, default_factory=dict)  # block id → reference count
    _limit: int = field(init=False)  # ids from here on are not allocated

    def __post_init__(self) -> None:
        self._empty = list(range(self.num_blocks))
        self._limit = self.num_blocks

    @property
    def free_count(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return len(self._empty) + self.cache.idle_count

    @property
    def empty_count(self) -> int:
        """Blocks that can be taken without evicting a prefix."""
        return len(self._empty)

    @property
    def taken_count(self) -> int:
        """Blocks in use, including those above the limit."""
        return len(self._taken)

    @property
    def usable(self) -> int:
        """Blocks below the limit, free or not."""
        return self._limit

    @property
    def next_free(self) -> int | None:
        """The block that the next allocation takes; None if no block is free."""
        return self._empty[0] if self._empty else self.cache.oldest

    @property
    def users(self) -> Mapping[int, int]:
        """Reference count of each block in use; read-only."""
        return self._taken

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` blocks; the caller has checked `free_count`.

        Raises:
            IndexError: if fewer are free; nothing is taken then.
        """
        if count > self.free_count:
            raise IndexError(f"{count} blocks wanted, {self.free_count} free")
        empty, cache = self._empty, self.cache
        taken = tuple([heappop(empty) if empty else cache.evict()[0] for _ in range(count)])
        self._taken.update(dict.fromkeys(taken, 1))
        return taken

    def borrow(self, counts: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """Free blocks to overwrite before the next call, in rows of `counts`; evicts as needed.

        Raises:
            IndexError: if fewer are free.
        """
        tables: list[tuple[int, ...]] = []
        try:
            for count in counts:
                tables.append(self.allocate(count))
        finally:
            for table in tables:
                self.release(table)
        return tuple(tables)

    def share(self, blocks: Iterable[int]) -> None:
        """Take a reference to each of these registered blocks, whether taken or cached."""
        for block in blocks:
            users = self._taken.get(block, 0)
            if not users:
                self.cache.reuse(block)
            self._taken[block] = users + 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a reference to each block; blocks without any become free, in LRU order.

        Raises:
            KeyError: if a block was not taken (a double free).
        """
        taken = self._taken
        for block in blocks:
            users = taken[block]
            if users > 1:
                taken[block] = users - 1
                continue
            del taken[block]
            if block >= self._limit:
                # A block above the limit must not be allocated: neither empty nor cached.
                self.cache.forget(block)
            elif not self.cache.make_idle(block):
                heappush(self._empty, block)

    def move(self, source: int) -> int:
        """Move the references and the registration of `source` to a new block, which is returned.

        Raises:
            IndexError: if no block is free.
        """
        (target,) = self.allocate(1)
        self._taken[target] = self._taken[source]
        self._taken[source] = 1
        self.cache.relocate(source, target)
        self.release((source,))
        return target

    def evict(self) -> bytes:
        """Evict the least recently used cached block, which becomes empty; returns its hash.

        Raises:
            StopIteration: if no block is cached.
        """
        block, block_hash = self.cache.evict()
        heappush(self._empty, block)
        return block_hash

    def register(self, block: int, block_hash: bytes) -> None:
        """Register a taken block under a hash, instead of any other block."""
        self.forget(block_hash)
        self.cache.register(block, block_hash)

    def forget(self, block_hash: bytes) -> None:
        """Unregister the block with this hash, if any; a cached block becomes empty."""
        block = self.cache.block_of(block_hash)
        if block is None:
            return
        idle = self.cache.is_idle(block)
        self.cache.forget(block)
        if idle:
            heappush(self._empty, block)

    def clear_cache(self) -> None:
        """Unregister every block: cached ones become empty, taken ones are not shared again."""
        for block in self.cache.clear():
            heappush(self._empty, block)

    def grow(self, num_blocks: int) -> None:
        """Grow to `num_blocks` blocks and lift the limit.

        Raises:
            ValueError: if the pool is larger already.
        """
        if num_blocks < self.num_blocks:
            raise ValueError(f"{self.num_blocks} blocks cannot grow to {num_blocks}")
        self.num_blocks = num_blocks
        self.limit(num_blocks)

    def limit(self, num_blocks: int) -> None:
        """Stop allocating blocks with ids of `num_blocks` or above; taken ones stay in use.

        Raises:
            ValueError: if the pool has fewer blocks.
        """
        if not 0 <= num_blocks <= self.num_blocks:
            raise ValueError(f"a limit of {num_blocks}, but there are {self.num_blocks} blocks")
        self._limit = num_blocks
        cache, taken = self.cache, self._taken
        cache.forget_from(num_blocks)
        # An ascending list is a valid heap.
        self._empty = [
            block for block in range(num_blocks) if block not in taken and not cache.is_idle(block)
        ]

    def shrink(self, num_blocks: int) -> None:
        """Remove the blocks with ids of `num_blocks` or above; a lower limit stays.

        Raises:
            ValueError: if a block to remove is taken, or the pool is smaller already.
        """
        if num_blocks > self.num_blocks:
            raise ValueError(f"{self.num_blocks} blocks cannot shrink to {num_blocks}")
        kept = max(self._taken, default=-1)
        if kept >= num_blocks:
            raise ValueError(f"block {kept} is taken; it cannot be removed")
        limit = min(self._limit, num_blocks)
        self.num_blocks = num_blocks
        self.limit(limit)

    def check_invariants(self) -> None:
        """Every block is in exactly one state: empty, cached, taken or withheld."""
        self.cache.check_invariants()
        empty, taken = set(self._empty), self._taken.keys()
        idle = {block for block in range(self.num_blocks) if self.cache.is_idle(block)}
        assert len(idle) == self.cache.idle_count, "a cached block is not in the pool"
        assert len(self._empty) == len(empty)
        assert empty.isdisjoint(taken) and empty.isdisjoint(idle) and idle.isdisjoint(taken)
        assert empty | idle | taken >= set(range(self._limit)), "a usable block is lost"
        assert all(users > 0 for users in self._taken.values())
        assert not any(block in self.cache for block in empty), "an empty block is registered"
        free = empty | idle
        assert min(free, default=0) >= 0 and max(free, default=-1) < self._limit
        assert min(taken, default=0) >= 0
        assert max(taken, default=-1) < self.num_blocks
        # In a heap, the children of index i are at 2i + 1 and 2i + 2.
        heap = self._empty
        assert all(map(lt, heap, heap[1::2])) and all(map(lt, heap, heap[2::2])), (
            "the lowest is not first"
        )
