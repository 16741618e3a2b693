"""The KV blocks of one worker (of one stage, in a pipeline)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import lt

from services.core.prefix.cached_blocks import CachedBlocks


@dataclass(slots=True)
class BlockPool:
    """Hands out block ids 0 .. num_blocks - 1. A block is *taken*, by one request or several that
    share it, or it is free: *empty*, or *cached* if it holds a known prefix that nobody uses now.

    Empty blocks are handed out first, the lowest before the others. So the highest ids fall free by
    themselves and their memory can serve another purpose: after `limit`, none of them is handed out
    again, and `shrink` gives them up once none is taken.
    """

    num_blocks: int
    cache: CachedBlocks = field(init=False, default_factory=CachedBlocks)
    _empty: list[int] = field(init=False)  # a heap, of ids below the limit
    _taken: dict[int, int] = field(init=False, default_factory=dict)  # how many requests use it
    _limit: int = field(init=False)

    def __post_init__(self) -> None:
        self._empty = list(range(self.num_blocks))
        self._limit = self.num_blocks

    @property
    def free_count(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return len(self._empty) + self.cache.idle_count

    @property
    def empty_count(self) -> int:
        """Blocks that can be taken without forgetting a prefix."""
        return len(self._empty)

    @property
    def taken_count(self) -> int:
        """Blocks that somebody uses, those above the limit included."""
        return len(self._taken)

    @property
    def usable(self) -> int:
        """Blocks below the limit, free or not."""
        return self._limit

    @property
    def next_free(self) -> int | None:
        """The block that the next allocation takes; None if there is none."""
        return self._empty[0] if self._empty else self.cache.oldest

    @property
    def users(self) -> Mapping[int, int]:
        """The blocks that somebody uses, with how many requests do; not to be changed."""
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

    def share(self, blocks: Iterable[int]) -> None:
        """Use blocks that hold a known prefix, whether others use them or nobody does."""
        for block in blocks:
            users = self._taken.get(block, 0)
            if not users:
                self.cache.reuse(block)
            self._taken[block] = users + 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back: those that nobody else uses are free. The first is reused first.

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
                self.cache.forget(block)
            elif not self.cache.make_idle(block):
                heappush(self._empty, block)

    def move(self, source: int) -> int:
        """Take another block for all who use `source`, which is empty then; returns it.

        Raises:
            IndexError: if none is free.
        """
        (target,) = self.allocate(1)
        self._taken[target] = self._taken[source]
        self._taken[source] = 1
        self.cache.relocate(source, target)
        self.release((source,))
        return target

    def evict(self) -> bytes:
        """Make the cached block empty that was used longest ago; returns the name it had.

        Raises:
            StopIteration: if no block is cached.
        """
        block, block_hash = self.cache.evict()
        heappush(self._empty, block)
        return block_hash

    def register(self, block: int, block_hash: bytes) -> None:
        """Name a block in use; another one that has the name loses it."""
        self.forget(block_hash)
        self.cache.register(block, block_hash)

    def forget(self, block_hash: bytes) -> None:
        """No block has this name any more; a cached one is empty then."""
        block = self.cache.block_of(block_hash)
        if block is None:
            return
        idle = self.cache.is_idle(block)
        self.cache.forget(block)
        if idle:
            heappush(self._empty, block)

    def drop_cache(self) -> None:
        """Forget every prefix: cached blocks are empty, and blocks in use are shared no further."""
        for block in self.cache.clear():
            heappush(self._empty, block)

    def grow(self, num_blocks: int) -> None:
        """Have `num_blocks` blocks, not fewer than now; it lifts the limit.

        Raises:
            ValueError: if there are more already.
        """
        if num_blocks < self.num_blocks:
            raise ValueError(f"{self.num_blocks} blocks cannot grow to {num_blocks}")
        self.num_blocks = num_blocks
        self.limit(num_blocks)

    def limit(self, num_blocks: int) -> None:
        """Take no block with id `num_blocks` or above from now on; who uses it now keeps it.

        Raises:
            ValueError: if there are not so many blocks.
        """
        if not 0 <= num_blocks <= self.num_blocks:
            raise ValueError(f"a limit of {num_blocks}, but there are {self.num_blocks} blocks")
        self._limit = num_blocks
        cache, taken = self.cache, self._taken
        cache.forget_from(num_blocks)
        # Sorted, so a heap.
        self._empty = [
            block for block in range(num_blocks) if block not in taken and not cache.is_idle(block)
        ]

    def shrink(self, num_blocks: int) -> None:
        """Have only `num_blocks` blocks, not more than now; a lower limit stays.

        Raises:
            ValueError: if a block that would go is taken, or there are fewer already.
        """
        if num_blocks > self.num_blocks:
            raise ValueError(f"{self.num_blocks} blocks cannot shrink to {num_blocks}")
        kept = max(self._taken, default=-1)
        if kept >= num_blocks:
            raise ValueError(f"block {kept} is taken; it cannot go")
        limit = min(self._limit, num_blocks)
        self.num_blocks = num_blocks
        self.limit(limit)

    def check_invariants(self) -> None:
        """Every block is empty, cached, taken or withheld; none is two of these."""
        self.cache.check_invariants()
        empty, taken = set(self._empty), self._taken.keys()
        idle = {block for block in range(self.num_blocks) if self.cache.is_idle(block)}
        assert len(idle) == self.cache.idle_count, "a cached block is none of the pool's"
        assert len(self._empty) == len(empty)
        assert empty.isdisjoint(taken) and empty.isdisjoint(idle) and idle.isdisjoint(taken)
        assert empty | idle | taken >= set(range(self._limit)), "a usable block is lost"
        assert all(users > 0 for users in self._taken.values())
        assert not any(block in self.cache for block in empty), "an empty block has a name"
        free = empty | idle
        assert min(free, default=0) >= 0 and max(free, default=-1) < self._limit
        assert min(taken, default=0) >= 0
        assert max(taken, default=-1) < self.num_blocks
        # The children of place i of a heap are at 2i + 1 and 2i + 2.
        heap = self._empty
        assert all(map(lt, heap, heap[1::2])) and all(map(lt, heap, heap[2::2])), (
            "the lowest is not first"
        )
