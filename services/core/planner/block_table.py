"""Which blocks each request has at one stage (block tables as in PagedAttention).

Block ids are local to a stage; the stages of a group agree on counts only. Every stage applies the
microbatches in order, so its counts are those that the leader had when it planned them. A table
outlives configurations: after a split it tells the new leader which blocks a request has.
"""

from collections.abc import Iterable
from typing import NamedTuple

from services.core.planner.block_pool import BlockPool


class Move(NamedTuple):
    """Copy the K/V of block `source` of a request to block `target`, in every layer."""

    request_id: str
    source: int
    target: int


class StageTable:
    """`tables` maps request id → block ids of `pool`; block j holds the j-th run of positions."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.tables: dict[str, tuple[int, ...]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.tables

    def __len__(self) -> int:
        return len(self.tables)

    def block_ids(self, request_id: str) -> tuple[int, ...]:
        """The blocks of a request; () if it is unknown."""
        return self.tables.get(request_id, ())

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The requests that have blocks."""
        return tuple(self.tables)

    def apply(self, released: Iterable[str], chunks: Iterable[tuple[str, int]]) -> None:
        """Follow a microbatch before it runs: release, then cover each chunk's block count.

        Raises:
            IndexError: if the pool has too few blocks, which the leader's ledger rules out.
        """
        for request_id in released:
            self.release(request_id)
        for request_id, count in chunks:
            self.adopt(request_id, count)

    def adopt(self, request_id: str, count: int) -> tuple[int, ...]:
        """Give a request `count` blocks in all, for K/V to come; those that it has stay.

        Raises:
            IndexError: if too few are free; nothing is taken then.
        """
        have = self.tables.get(request_id, ())
        if count > len(have):
            have = self.tables[request_id] = have + self.pool.allocate(count - len(have))
        return have

    def append(self, request_id: str) -> None:
        """Give a request one more block. Raises IndexError if none is free."""
        self.tables[request_id] = self.tables.get(request_id, ()) + self.pool.allocate(1)

    def release(self, request_id: str) -> None:
        """Free a request's blocks; unknown ids are ignored."""
        self.pool.release(self.tables.pop(request_id, ()))

    def relocate(self, limit: int, most: int | None = None) -> list[Move]:
        """Move blocks with id `limit` or above to free ones below: at most `most`, highest first.

        The table names the new blocks at once: K/V has to be copied before anything that was
        planned later runs, and after everything that was planned earlier has run. Fewer moves
        than needed when the free blocks below do not suffice.
        """
        above = [
            (block, request_id, place)
            for request_id, table in self.tables.items()
            for place, block in enumerate(table)
            if block >= limit
        ]
        above.sort(reverse=True)
        moves = []
        for block, request_id, place in above[:most]:
            lowest = self.pool.lowest_free
            if lowest is None or lowest >= limit:
                break
            (target,) = self.pool.allocate(1)
            table = self.tables[request_id]
            self.tables[request_id] = (*table[:place], target, *table[place + 1 :])
            self.pool.release((block,))
            moves.append(Move(request_id, block, target))
        return moves

    def highest_block(self, request_ids: Iterable[str]) -> int:
        """The highest block that one of these requests has; -1 if they have none."""
        tables = (self.tables.get(request_id, ()) for request_id in request_ids)
        return max((max(table) for table in tables if table), default=-1)

    def check_invariants(self) -> None:
        """No block has two owners and none is taken that no request has."""
        self.pool.check_invariants()
        owned = [block for table in self.tables.values() for block in table]
        assert len(owned) == len(set(owned)), "two requests share a block"
        assert all(self.tables.values()), "a request without blocks is listed"
        assert self.pool.taken == set(owned), "a block is taken by nobody or used untaken"
