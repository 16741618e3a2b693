"""Which blocks each request has at one stage (block tables as in PagedAttention).

Block ids are local to a stage; the stages of a group agree on counts only. Every stage applies the
microbatches in order, so its counts are those that the leader had when it planned them. A table
outlives configurations: after a split it tells the new leader which blocks a request has.

Requests may share full blocks at the beginning of their tables. Leaders count a block at another
stage once for each request that has it.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from services.core.planner.block_pool import BlockPool
from services.core.prefix.news import NO_PREFIX_UPDATE, PrefixNews


class Move(NamedTuple):
    """Copy the K/V of block `source` to block `target`, in every layer; `request_id` has it."""

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
    def block_count(self) -> int:
        """Blocks of all requests, as leaders count them: a shared one as often as it is shared."""
        return sum(map(len, self.tables.values()))

    def count_only(self, request_ids: Iterable[str]) -> int:
        """Blocks of these requests that no other request shares."""
        tables, users = self.tables, self.pool.users
        rows = [tables[one] for one in request_ids if one in tables]
        if not rows or self.block_count == len(users):  # nothing is shared
            return sum(map(len, rows))
        used = Counter(chain.from_iterable(rows))
        return sum(users[block] == count for block, count in used.items())

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The requests that have blocks."""
        return tuple(self.tables)

    def apply(
        self,
        released: Iterable[str],
        chunks: Iterable[tuple[str, int]],
        prefixes: PrefixNews = NO_PREFIX_UPDATE,
    ) -> None:
        """Follow a microbatch before it runs: release, then cover each chunk's block count.

        Raises:
            IndexError: if the pool has too few blocks, which the leader's ledger rules out.
            ValueError: if a request is to share a prefix that is not here, which the leader's order
                rules out.
        """
        if prefixes.forget:
            self.pool.drop_cache()
        for request_id, place, block_hash in prefixes.named:
            table = self.tables.get(request_id, ())
            if place < len(table):
                self.pool.register(table[place], block_hash)
        for request_id in released:
            self.release(request_id)
        for block_hash in prefixes.evicted:
            self.pool.forget(block_hash)
        for request_id, hashes in prefixes.shared:
            found = tuple(self.pool.cache.find(hashes))
            if len(found) < len(hashes):
                raise ValueError(f"{request_id} is to begin with a prefix that is not here")
            self.share(request_id, found)
        for request_id, count in chunks:
            self.adopt(request_id, count)

    def share(self, request_id: str, blocks: tuple[int, ...]) -> None:
        """Begin the table of a request with blocks that hold the KV of its first tokens."""
        assert request_id not in self.tables, f"{request_id} has blocks already"
        if blocks:
            self.pool.share(blocks)
            self.tables[request_id] = blocks

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
        """Free a request's blocks; unknown ids are ignored.

        The last go first, since a cached block is of no use without those before it.
        """
        self.pool.release(reversed(self.tables.pop(request_id, ())))

    def relocate(self, limit: int, most: int | None = None) -> list[Move]:
        """Move blocks with id `limit` or above to free ones below: at most `most`, highest first.

        The table names the new blocks at once: K/V has to be copied before anything that was
        planned later runs, and after everything that was planned earlier has run. Fewer moves
        than needed when the free blocks below do not suffice.
        """
        above: dict[int, list[str]] = {}
        for request_id, table in self.tables.items():
            for block in table:
                if block >= limit:
                    above.setdefault(block, []).append(request_id)
        moves = []
        for block in sorted(above, reverse=True)[:most]:
            target = self.pool.next_free
            if target is None or target >= limit:
                break
            self.pool.move(block)
            for request_id in above[block]:
                table = self.tables[request_id]
                self.tables[request_id] = tuple([target if one == block else one for one in table])
            moves.append(Move(above[block][0], block, target))
        return moves

    def highest_block(self, request_ids: Iterable[str]) -> int:
        """The highest block that one of these requests has; -1 if they have none."""
        tables = (self.tables.get(request_id, ()) for request_id in request_ids)
        return max((max(table) for table in tables if table), default=-1)

    def check_invariants(self) -> None:
        """A block has as many users as there are tables with it, in one place of each."""
        self.pool.check_invariants()
        assert all(self.tables.values()), "a request without blocks is listed"
        for request_id, table in self.tables.items():
            assert len(table) == len(set(table)), f"{request_id} has a block twice"
        users = Counter(block for table in self.tables.values() for block in table)
        assert self.pool.users == users, "a block is taken by nobody or used untaken"
