"""A leader's count of the KV blocks at every pipeline stage of its group.

The *leader* runs stage 0 and plans for all stages; the other stages are *followers*. Stage 0 is
counted by its block pool. For each follower the ledger tracks the capacity and the blocks in use
after the last planned microbatch; this is exact because stages apply microbatches in order.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.core.planner.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class Follower:
    """A stage after the first, at the start of a configuration.

    `used_blocks` are those in its block table after the last microbatch of its old configuration.
    `previous_stage` is its stage number in the leader's old configuration; None if it was not part
    of that and thus has no blocks of the leader's sequences yet.
    """

    capacity_blocks: int
    used_blocks: int = 0
    previous_stage: int | None = None


@dataclass(slots=True)
class BlockLedger:
    """Capacity, use and reservations of every stage; stage 0 is the leader's own.

    Blocks are reserved for a sequence at stages to which its K/V has yet to move: new requests
    cannot take them.
    """

    pool: BlockPool
    capacity: list[int] = field(default_factory=list)  # blocks of stages 1, 2, …
    used: list[int] = field(default_factory=list)  # blocks in use at stages 1, 2, …
    reserved: list[int] = field(default_factory=lambda: [0])  # blocks at stages 0, 1, …

    @property
    def stages(self) -> int:
        """Number of stages of the group."""
        return len(self.reserved)

    def configure(self, followers: Iterable[Follower]) -> None:
        """Reset to these stages after the leader's, without reservations.

        `used_blocks` includes blocks for which a `credit` follows.
        """
        followers = tuple(followers)
        self.capacity = [follower.capacity_blocks for follower in followers]
        self.used = [follower.used_blocks for follower in followers]
        self.reserved = [0] * (1 + len(followers))

    def capacity_of(self, stage: int) -> int:
        """Blocks of stage `stage` ≥ 1. Raises ValueError for any other stage number."""
        if not 1 <= stage < self.stages:
            raise ValueError(f"stage {stage} is not a follower stage (1 to {self.stages - 1})")
        return self.capacity[stage - 1]

    def set_capacity(self, stage: int, blocks: int) -> None:
        """Set the capacity of an existing stage ≥ 1."""
        self.capacity[stage - 1] = blocks

    def credit(self, stage: int, blocks: int) -> None:
        """Note that stage `stage` ≥ 1 freed `blocks` blocks of sequences of other leaders."""
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
        """Blocks of the smallest stage, which is the capacity of the group."""
        return min([self.pool.usable, *self.capacity])

    @property
    def least_room(self) -> int:
        """Free blocks at the fullest stage, including reserved ones, for growing sequences."""
        if not self.capacity:
            return self.pool.free_count
        return min(self.room(stage) for stage in range(self.stages))

    @property
    def free(self) -> int:
        """Free, unreserved blocks at the fullest stage, for the admission of requests."""
        if not self.capacity:
            return self.pool.free_count - self.reserved[0]
        return min([self.room(stage) - blocks for stage, blocks in enumerate(self.reserved)])

    def full_stages(self) -> frozenset[int]:
        """Stages without free blocks."""
        return frozenset(stage for stage in range(self.stages) if self.room(stage) <= 0)

    def take(self, blocks: int) -> None:
        """Count blocks that a sequence takes at every follower stage."""
        for index in range(len(self.used)):
            self.used[index] += blocks

    def release(self, blocks: int, absent: frozenset[int] = frozenset()) -> None:
        """Undo `take` for a sequence, and `reserve` at the stages in `absent`."""
        if not (self.capacity or absent):
            return  # a single worker: its pool is the only count
        for stage in range(self.stages):
            if stage in absent:
                self.reserved[stage] -= blocks
            elif stage:
                self.used[stage - 1] -= blocks

    def reserve(self, blocks: int, absent: frozenset[int]) -> None:
        """Reserve (or, if negative, stop reserving) blocks at the stages in `absent`."""
        for stage in absent:
            self.reserved[stage] += blocks

    def use_reserved(self, blocks: int, stage: int) -> None:
        """Turn reserved blocks at `stage` into used ones."""
        self.reserved[stage] -= blocks
        if stage:
            self.used[stage - 1] += blocks

    def check_invariants(self) -> None:
        """No count is negative; there is an entry for each stage."""
        assert len(self.capacity) == len(self.used) == self.stages - 1
        assert all(blocks >= 0 for blocks in (*self.used, *self.reserved))
