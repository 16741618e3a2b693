"""Block tables of the sequences at a pipeline stage, as in PagedAttention.

A single worker is the only stage of its group; otherwise the *leader* plans for all stages. Block
ids are local to a stage; the stages of a group agree on numbers of blocks only. Stages apply
microbatches in order, so their numbers equal those that the leader had when it planned them. The
tables outlive configurations: a worker that leads after a change of the group keeps using them.

Sequences may share full blocks at the beginning of their tables. Leaders count a block at another
stage once per sequence that uses it.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from services.core.planner.block_pool import BlockPool
from services.core.prefix.cache_update import NO_PREFIX_UPDATE, PrefixCacheUpdate


class BlockMove(NamedTuple):
    """Copy the K/V of block `source` of a sequence to block `target`, in every layer."""

    seq_id: str
    source: int
    target: int


class StageTable:
    """`tables` maps sequence id → block ids of `pool`; block j holds the j-th run of positions."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.tables: dict[str, tuple[int, ...]] = {}

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self.tables

    def __len__(self) -> int:
        return len(self.tables)

    def block_ids(self, seq_id: str) -> tuple[int, ...]:
        """Block ids of a sequence; () if it is unknown."""
        return self.tables.get(seq_id, ())

    @property
    def block_count(self) -> int:
        """Blocks as leaders count them: a shared block counts once per sequence."""
        return sum(map(len, self.tables.values()))

    def count_exclusive(self, seq_ids: Iterable[str]) -> int:
        """Number of distinct blocks that only these sequences use."""
        tables, users = self.tables, self.pool.users
        rows = [tables[seq_id] for seq_id in seq_ids if seq_id in tables]
        if not rows or self.block_count == len(users):  # nothing is shared
            return sum(map(len, rows))
        # A block is exclusive if these sequences hold all references to it.
        used = Counter(chain.from_iterable(rows))
        return sum(users[block] == count for block, count in used.items())

    @property
    def seq_ids(self) -> tuple[str, ...]:
        """Ids of the sequences with blocks."""
        return tuple(self.tables)

    def apply(
        self,
        released: Iterable[str],
        chunks: Iterable[tuple[str, int]],
        prefixes: PrefixCacheUpdate = NO_PREFIX_UPDATE,
    ) -> None:
        """Apply a microbatch before it runs: release blocks, then allocate for each chunk.

        Raises:
            IndexError: if the pool has too few blocks, contrary to the leader's ledger.
            ValueError: if a prefix to share is not cached here, contrary to the leader's cache.
        """
        # Register before the release, so that blocks released here stay cached. Evict before the
        # allocation, so that the allocation evicts no blocks that the leader keeps cached.
        if prefixes.forget:
            self.pool.clear_cache()
        for seq_id, place, block_hash in prefixes.named:
            table = self.tables.get(seq_id, ())
            if place < len(table):
                self.pool.register(table[place], block_hash)
        for seq_id in released:
            self.release(seq_id)
        for block_hash in prefixes.evicted:
            self.pool.forget(block_hash)
        for seq_id, hashes in prefixes.shared:
            blocks = tuple(self.pool.cache.find(hashes))
            if len(blocks) < len(hashes):
                raise ValueError(f"{seq_id} must share a prefix that is not cached here")
            self.share(seq_id, blocks)
        for seq_id, count in chunks:
            self.adopt(seq_id, count)

    def share(self, seq_id: str, blocks: tuple[int, ...]) -> None:
        """Start the table of a sequence with blocks that hold the KV of its first tokens."""
        assert seq_id not in self.tables, f"{seq_id} has blocks already"
        if blocks:
            self.pool.share(blocks)
            self.tables[seq_id] = blocks

    def extend(self, seq_id: str, blocks: tuple[int, ...]) -> None:
        """Share further blocks: `blocks` begins with those that the table has."""
        have = self.tables.get(seq_id, ())
        assert blocks[: len(have)] == have, f"{seq_id} has other blocks"
        self.pool.share(blocks[len(have) :])
        self.tables[seq_id] = blocks

    def replace(self, seq_id: str, place: int, block: int) -> None:
        """Share a registered block instead of the block at `place`, which is released."""
        have = self.tables[seq_id]
        self.pool.share((block,))
        self.tables[seq_id] = (*have[:place], block, *have[place + 1 :])
        self.pool.release((have[place],))

    def share_block(self, seq_id: str, block: int) -> None:
        """Extend the table of a sequence by a block that another sequence uses."""
        self.pool.share((block,))
        self.tables[seq_id] = (*self.tables.get(seq_id, ()), block)

    def truncate(self, seq_id: str, count: int) -> None:
        """Free all blocks from the `count`-th on; `count` is at least 1."""
        have = self.tables[seq_id]
        self.tables[seq_id] = have[:count]
        self.pool.release(reversed(have[count:]))

    def adopt(self, seq_id: str, count: int) -> tuple[int, ...]:
        """Extend the table of a sequence to `count` blocks.

        Raises:
            IndexError: if too few are free; nothing is taken then.
        """
        have = self.tables.get(seq_id, ())
        if count > len(have):
            have = self.tables[seq_id] = have + self.pool.allocate(count - len(have))
        return have

    def append(self, seq_id: str) -> None:
        """Extend the table of a sequence by a block. Raises IndexError if none is free."""
        self.tables[seq_id] = self.tables.get(seq_id, ()) + self.pool.allocate(1)

    def release(self, seq_id: str) -> None:
        """Free the blocks of a sequence; unknown ids are ignored."""
        # The last block is freed, and later evicted, first: a cached block is useless without its
        # predecessors.
        self.pool.release(reversed(self.tables.pop(seq_id, ())))

    def relocate(self, limit: int, most: int | None = None) -> list[BlockMove]:
        """Move at most `most` blocks with ids ≥ `limit` to free lower ones, highest first.

        The tables refer to the new blocks at once: the caller must copy the K/V after all
        microbatches planned earlier have run, and before any planned later runs. Returns fewer
        moves than needed if too few blocks below `limit` are free.
        """
        above: dict[int, list[str]] = {}
        for seq_id, table in self.tables.items():
            for block in table:
                if block >= limit:
                    above.setdefault(block, []).append(seq_id)
        moves = []
        for block in sorted(above, reverse=True)[:most]:
            target = self.pool.next_free
            if target is None or target >= limit:
                break
            self.pool.move(block)
            for seq_id in above[block]:
                table = self.tables[seq_id]
                self.tables[seq_id] = tuple([target if old == block else old for old in table])
            moves.append(BlockMove(above[block][0], block, target))
        return moves

    def highest_block(self, seq_ids: Iterable[str]) -> int:
        """Highest block id of these sequences; -1 if they have no blocks."""
        tables = (self.tables.get(seq_id, ()) for seq_id in seq_ids)
        return max((max(table) for table in tables if table), default=-1)

    def check_invariants(self) -> None:
        """The reference count of a block equals the number of tables with it."""
        self.pool.check_invariants()
        assert all(self.tables.values()), "a sequence without blocks has a table"
        for seq_id, table in self.tables.items():
            assert len(table) == len(set(table)), f"{seq_id} has a block twice"
        users = Counter(block for table in self.tables.values() for block in table)
        assert self.pool.users == users, "reference counts differ from the tables"
