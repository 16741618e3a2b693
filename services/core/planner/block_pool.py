"""The free KV blocks of one worker (of one stage, in a pipeline)."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import lt


@dataclass(slots=True)
class BlockPool:
    """Hands out block ids 0 .. num_blocks - 1, each to one owner at a time, the lowest first.

    So the highest ids fall free by themselves and their memory can serve another purpose: after
    `limit`, none of them is handed out again, and `shrink` gives them up once all are free.
    """

    num_blocks: int
    _free: list[int] = field(init=False)  # a heap, of ids below the limit
    _taken: set[int] = field(init=False, default_factory=set)
    _limit: int = field(init=False)

    def __post_init__(self) -> None:
        self._free = list(range(self.num_blocks))
        self._limit = self.num_blocks

    @property
    def free_count(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    @property
    def taken_count(self) -> int:
        """Blocks that somebody owns, those above the limit included."""
        return len(self._taken)

    @property
    def usable(self) -> int:
        """Blocks below the limit, free or not."""
        return self._limit

    @property
    def lowest_free(self) -> int | None:
        """The block that the next allocation takes; None if there is none."""
        return self._free[0] if self._free else None

    @property
    def taken(self) -> frozenset[int]:
        """The blocks that somebody owns."""
        return frozenset(self._taken)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` blocks; the caller has checked `free_count`.

        Raises:
            IndexError: if fewer are free; nothing is taken then.
        """
        free = self._free
        if count > len(free):
            raise IndexError(f"{count} blocks wanted, {len(free)} free")
        taken = tuple([heappop(free) for _ in range(count)])
        self._taken.update(taken)
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back.

        Raises:
            KeyError: if a block was not taken (a double free).
        """
        for block in blocks:
            self._taken.remove(block)
            if block < self._limit:
                heappush(self._free, block)

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
        """Take no block with id `num_blocks` or above from now on; its present owner keeps it.

        Raises:
            ValueError: if there are not so many blocks.
        """
        if not 0 <= num_blocks <= self.num_blocks:
            raise ValueError(f"a limit of {num_blocks}, but there are {self.num_blocks} blocks")
        self._limit = num_blocks
        # Sorted, so a heap.
        self._free = [block for block in range(num_blocks) if block not in self._taken]

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
        """Every block is free, taken or withheld, none is two of these, none appears twice."""
        free = set(self._free)
        assert len(self._free) == len(free)
        assert free.isdisjoint(self._taken)
        assert free | self._taken >= set(range(self._limit)), "a usable block is lost"
        assert min(free, default=0) >= 0 and max(free, default=-1) < self._limit
        assert min(self._taken, default=0) >= 0
        assert max(self._taken, default=-1) < self.num_blocks
        # The children of place i of a heap are at 2i + 1 and 2i + 2.
        heap = self._free
        assert all(map(lt, heap, heap[1::2])) and all(map(lt, heap, heap[2::2])), (
            "the lowest is not first"
        )
