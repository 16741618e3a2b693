"""The free list of KV blocks of one worker (of one stage, in a pipeline)."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockPool:
    """Hands out block ids 0 .. num_blocks - 1, each to one owner at a time."""

    num_blocks: int
    _free: list[int] = field(init=False)
    _taken: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self._free = list(range(self.num_blocks - 1, -1, -1))

    @property
    def free_count(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` blocks; the caller has checked `free_count`.

        Raises:
            IndexError: if fewer are free; nothing is taken then.
        """
        if count > len(self._free):
            raise IndexError(f"{count} blocks wanted, {len(self._free)} free")
        taken = tuple([self._free.pop() for _ in range(count)])
        self._taken.update(taken)
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back.

        Raises:
            KeyError: if a block was not taken (a double free).
        """
        for block in blocks:
            self._taken.remove(block)
            self._free.append(block)

    def check_invariants(self) -> None:
        """Every block is free or taken, none is both, none appears twice."""
        assert len(self._free) == len(set(self._free))
        assert set(self._free).isdisjoint(self._taken)
        assert len(self._free) + len(self._taken) == self.num_blocks
