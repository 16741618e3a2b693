"""How many blocks the stages of a group have, as its leader counts them.

The leader's own stage is its pool; of each other stage it knows the capacity and the blocks in use
as of the last microbatch that it planned: every stage applies microbatches in order.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.core.planner.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class Follower:
    """A stage after the first, when a configuration begins.

    `used_blocks` are those that its table has, when all of its last configuration has reached it.
    `previous_stage` is the number that the stage had in the leader's previous configuration; None if it was
    not in it and thus has no blocks for the leader's sequences yet.
    """

    capacity_blocks: int
    used_blocks: int = 0
    previous_stage: int | None = None


@dataclass(slots=True)
class BlockLedger:
    """Capacity, use and promises of every stage; stage 0 is the leader's own.

    Blocks are promised to a sequence at a stage to which its K/V has yet to move: new requests do
    not get them.
    """

    pool: BlockPool
    capacity: list[int] = field(default_factory=list)  # of stages 1, 2, …
    used: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=lambda: [0])  # of stages 0, 1, …

    @property
    def stages(self) -> int:
        """Stages of the group."""
        return len(self.reserved)

    def configure(self, followers: Iterable[Follower]) -> None:
        """Start anew with these stages after the leader's; nothing is promised.

        Each stage reports what it uses, so a `credit` that was on its way is not lost.
        """
        followers = tuple(followers)
        self.capacity = [follower.capacity_blocks for follower in followers]
        self.used = [follower.used_blocks for follower in followers]
        self.reserved = [0] * (1 + len(followers))

    def capacity_of(self, stage: int) -> int:
        """The blocks of stage `stage` ≥ 1. Raises ValueError for another one."""
        if not 1 <= stage < self.stages:
            raise ValueError(f"stage {stage} is none of the followers' (1 to {self.stages - 1})")
        return self.capacity[stage - 1]

    def set_capacity(self, stage: int, blocks: int) -> None:
        """Stage `stage` ≥ 1, which there is, has `blocks` blocks from now on."""
        self.capacity[stage - 1] = blocks

    def credit(self, stage: int, blocks: int) -> None:
        """Stage `stage` ≥ 1 has freed `blocks` blocks of sequences that this leader has not."""
        self.used[stage - 1] -= blocks

    def room(self, stage: int) -> int:
        """Unused blocks at `stage`; negative if the stage has shrunk below its use."""
        if stage == 0:
            return self.pool.free_count
        return self.capacity[stage - 1] - self.used[stage - 1]

    def used_at(self, stage: int) -> int:
        """Blocks in use at `stage`."""
        return self.pool.taken_count if stage == 0 else self.used[stage - 1]

    @property
    def least_capacity(self) -> int:
        """Blocks of the smallest stage: what the group has."""
        return min([self.pool.usable, *self.capacity])

    @property
    def least_room(self) -> int:
        """Blocks that every stage has: for a sequence that runs and grows."""
        if not self.capacity:
            return self.pool.free_count
        return min(self.room(stage) for stage in range(self.stages))

    @property
    def free(self) -> int:
        """Blocks that every stage has and has not promised: for requests that start."""
        if not self.capacity:
            return self.pool.free_count - self.reserved[0]
        return min([self.room(stage) - blocks for stage, blocks in enumerate(self.reserved)])

    def full_stages(self) -> frozenset[int]:
        """Stages without a block to take."""
        return frozenset(stage for stage in range(self.stages) if self.room(stage) <= 0)

    def take(self, blocks: int) -> None:
        """Count blocks that a sequence gets at every other stage."""
        for index in range(len(self.used)):
            self.used[index] += blocks

    def release(self, blocks: int, absent: frozenset[int] = frozenset()) -> None:
        """Take back `take`, or the promise at the stages in `absent`."""
        if not (self.capacity or absent):
            return
        for stage in range(self.stages):
            if stage in absent:
                self.reserved[stage] -= blocks
            elif stage:
                self.used[stage - 1] -= blocks

    def reserve(self, blocks: int, absent: frozenset[int]) -> None:
        """Count blocks that a sequence will need at the stages in `absent`."""
        for stage in absent:
            self.reserved[stage] += blocks

    def use_reserved(self, blocks: int, stage: int) -> None:
        """A promise at `stage` becomes use."""
        self.reserved[stage] -= blocks
        if stage:
            self.used[stage - 1] += blocks

    def check_invariants(self) -> None:
        """Nothing is negative; there is one entry for each stage."""
        assert len(self.capacity) == len(self.used) == self.stages - 1
        assert all(blocks >= 0 for blocks in (*self.used, *self.reserved))
