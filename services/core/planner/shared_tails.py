"""Tail blocks that an online and a batch sequence share from both ends (BROS §5.1).

The *tail* of a sequence is its last, partly filled KV block. When an online sequence needs a block
and none is free, it takes the tail of a batch sequence that decodes. The tail is *turned* before:
the entries of the batch sequence move to the end of the block in reverse order, position q to slot
`block_size - 1 - q % block_size`. The online sequence fills the block from slot 0, the batch
sequence from the end. When the fills meet, the batch sequence loses the block, and its tokens in
the block run again. It never fills the block alone: a full block is registered in the prefix cache,
where it must not change any more.

Unlike in BROS, only the tail of a batch sequence that decodes is shared, not each of its blocks,
and only on a single worker. A full turned block needs no special treatment: attention sums over all
entries of a block, in any order.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.core.planner.batch import TailTurn
from services.core.planner.block_table import StageTable
from services.core.planner.plan import Plan
from services.core.planner.sequence import Phase, Sequence


@dataclass(slots=True, eq=False)
class Tail:
    """A turned tail: block `place` of `batch`, and block `online_place` of `online`, if any."""

    batch: Sequence
    place: int
    online: Sequence | None = None
    online_place: int = 0


@dataclass(slots=True)
class SharedTails:
    """The turned tails of a worker."""

    block_size: int
    table: StageTable
    enabled: bool = False
    turned: dict[str, Tail] = field(default_factory=dict)  # by batch sequence
    shared_total: int = 0  # tails shared so far
    lost_tokens_total: int = 0  # tokens of batch sequences in tails that they lost
    _shared: dict[str, Tail] = field(default_factory=dict)  # by online sequence
    _turns: dict[str, int] = field(default_factory=dict)  # entries to turn, by batch sequence

    def share(self, online: Sequence, running: Iterable[Sequence]) -> bool:
        """Add the tail of a running batch sequence to the blocks of `online`; False without a tail.

        Chooses the tail with the most room, among equals that of the newest sequence.
        """
        if not self.enabled or online.seq_id in self._shared:
            return False
        donors = [(self._filled(batch), batch) for batch in running if self._may_share(batch)]
        if not donors:
            return False
        filled, batch = min(reversed(donors), key=lambda donor: donor[0])
        tail = self.turned.get(batch.seq_id)
        if tail is None or tail.place < batch.blocks - 1:
            tail = self.turned[batch.seq_id] = Tail(batch, batch.blocks - 1)
            self._turns[batch.seq_id] = filled
        tail.online, tail.online_place = online, online.blocks
        self._shared[online.seq_id] = tail
        self.table.share_block(online.seq_id, self._block(tail))
        online.blocks += 1
        self.shared_total += 1
        return True

    def most_room(self, running: Iterable[Sequence]) -> int:
        """Most free slots of a tail that an online sequence can share; 0 without such a tail."""
        room = [self.block_size - self._filled(seq) for seq in running if self._may_share(seq)]
        return max(room, default=0)

    def colliding(self, plan: Plan) -> list[Sequence]:
        """The batch sequences whose tail cannot hold the entries of both owners after `plan`."""
        if not self._shared:
            return []
        ends = {seq.seq_id: seq.computed + 1 for seq in plan.decodes}
        ends |= {seq.seq_id: start + tokens for seq, start, tokens, _ in plan.prefills}
        size, colliding = self.block_size, []
        for tail in self._shared.values():
            online, batch = tail.online, tail.batch
            assert online is not None
            # The first slot is reserved for the online sequence before it has an entry.
            begin = max(1, ends.get(online.seq_id, online.computed) - tail.online_place * size)
            end = ends.get(batch.seq_id, batch.computed) - tail.place * size
            if begin + end > size:
                colliding.append(batch)
        return colliding

    def lose(self, batch: Sequence) -> None:
        """Remove the shared tail from the blocks of `batch`: the tokens in it run again.

        `batch` has at least two blocks.
        """
        tail = self.turned[batch.seq_id]
        self.lost_tokens_total += batch.computed - tail.place * self.block_size
        self.leave(batch)
        self.table.truncate(batch.seq_id, tail.place)
        batch.blocks, batch.computed = tail.place, tail.place * self.block_size

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that loses its blocks, or its tail."""
        tail = self.turned.pop(sequence.seq_id, None)
        if tail is not None:
            self._turns.pop(sequence.seq_id, None)
            if tail.online is not None:
                del self._shared[tail.online.seq_id]
            return
        tail = self._shared.pop(sequence.seq_id, None)
        if tail is not None:
            tail.online = None

    def take_turns(self) -> tuple[TailTurn, ...]:
        """Remove and return the turns that must precede the next microbatch."""
        if not self._turns:
            return ()
        turns = [
            TailTurn(self._block(self.turned[seq_id]), filled)
            for seq_id, filled in self._turns.items()
        ]
        self._turns.clear()
        return tuple(turns)

    def turned_in(self, plan: Plan) -> frozenset[str]:
        """The batch sequences of `plan` whose next entry belongs into a turned tail."""
        if not self.turned:
            return frozenset()
        size, turned = self.block_size, self.turned
        return frozenset(
            seq.seq_id
            for seq in plan.decodes
            if (tail := turned.get(seq.seq_id)) is not None and seq.computed // size == tail.place
        )

    def shared_in(self, plan: Plan) -> frozenset[str]:
        """The online sequences of `plan` whose last entry is in a shared block."""
        if not self._shared:
            return frozenset()
        ends = [(seq, seq.computed) for seq in plan.decodes]
        ends += [(seq, start + tokens - 1) for seq, start, tokens, _ in plan.prefills]
        size, shared = self.block_size, self._shared
        return frozenset(
            seq.seq_id
            for seq, last in ends
            if (tail := shared.get(seq.seq_id)) is not None and last // size == tail.online_place
        )

    def check_invariants(self) -> None:
        """Tails are last blocks of batch sequences, and no slot belongs to two sequences."""
        users, size = self.table.pool.users, self.block_size
        assert self._turns.keys() <= self.turned.keys()
        shared = {tail.online.seq_id: tail for tail in self.turned.values() if tail.online}
        assert shared == self._shared
        for seq_id, tail in self.turned.items():
            batch, online = tail.batch, tail.online
            assert seq_id == batch.seq_id and not batch.online
            assert tail.place < len(self.table.block_ids(seq_id)), "a turned tail is gone"
            if online is None:
                continue
            block = self._block(tail)
            assert batch.blocks == tail.place + 1, "a shared block is not the tail"
            assert online.blocks == tail.online_place + 1 and online.online
            assert self.table.block_ids(online.seq_id)[tail.online_place] == block
            assert users[block] == 2, "a tail has two owners"
            assert block not in self.table.pool.cache, "a block in the prefix cache may change"
            begin = max(0, online.computed - tail.online_place * size)
            assert begin + batch.computed - tail.place * size <= size, "two owners of a slot"

    def _may_share(self, batch: Sequence) -> bool:
        """Whether an online sequence can take the tail of this running sequence."""
        if batch.online or batch.remaining != 1 or not batch.output_count:
            return False
        if not 0 < self._filled(batch) < self.block_size:
            return False
        return self.table.pool.users[self.table.block_ids(batch.seq_id)[-1]] == 1

    def _filled(self, batch: Sequence) -> int:
        return batch.computed - (batch.blocks - 1) * self.block_size

    def _block(self, tail: Tail) -> int:
        return self.table.tables[tail.batch.seq_id][tail.place]


def lacks_tail(sequence: Sequence, block_size: int) -> bool:
    """Whether a running sequence has lost its tail, so that it needs a block before it runs."""
    return (
        sequence.phase is Phase.RUNNING
        and sequence.remaining > 1
        and sequence.lacks_block(block_size)
    )
