"""Planner events of change-overs: effects of group changes on sequences, stages and blocks.

A *change-over* replaces the configuration of a group of workers: its pipeline *stages* (numbered
from 0), their layers, and the *leader*, which runs stage 0 and plans. Sequences are handed over to
the new leader, and their KV moves to the new stages. A *held* sequence is not planned.

The code of the change-over reads planner state, but mutates it only by these events, so replaying
the log reproduces it. Ids are sequence ids, see `sequence_ids.py`.
"""

from dataclasses import dataclass

from services.core.planner.block_ledger import Follower
from services.core.planner.sequence import SequenceState
from services.core.prefix.cache_update import PrefixCacheUpdate


@dataclass(frozen=True, slots=True)
class ConfigurationEnded:
    """The current configuration ends; no microbatch is in flight. Answered by `BlocksFreed`.

    Frees the blocks of sequences that have not run yet, since only this leader knows of them, and
    of sequences that grew for a discarded microbatch. Evicts all cached prefixes, since the layers
    change. Afterwards this worker's block table determines the number of its used blocks, which the
    frame `Joined` reports to the next leader.
    """


@dataclass(frozen=True, slots=True)
class StagesConfigured:
    """The worker leads these follower stages (none: alone) from now on; nothing is in flight.

    The stages of the old configuration have received the ids that `ConfigurationEnded` released. A
    sequence that lacks blocks at a new stage is held until `SequencePlaced` and `SequenceResumed`.
    """

    followers: tuple[Follower, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupDivided:
    """The loss of a worker ended the group that this worker led, or an unfinished split of it.

    `members`: number of surviving workers, including this worker, that can serve its requests.
    `seq_ids`: the sequences that lost their KV; None: all that have no KV now. Answered by a
    refusal for each sequence that returns to the scheduler; see `excess_lost_sequences`.
    """

    members: int
    seq_ids: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class CapacityReported:
    """Stage `stage` ≥ 1 has a capacity of `blocks` blocks for microbatches planned from now on."""

    stage: int
    blocks: int


@dataclass(frozen=True, slots=True)
class BlocksCredited:
    """Stage `stage` ≥ 1 freed `blocks` blocks of sequences that this planner does not own."""

    stage: int
    blocks: int


@dataclass(frozen=True, slots=True)
class ReleasedTaken:
    """Answer with the released sequences (`BlocksFreed`) now, not with the next microbatch."""


@dataclass(frozen=True, slots=True)
class FlightDiscarded:
    """Discard all microbatches in flight: their tokens run again, their results are ignored."""


@dataclass(frozen=True, slots=True)
class SequenceAdopted:
    """Adopt a sequence of another leader; its age decides its order here. Idempotent.

    At the stages in `absent` it has no blocks yet: they are reserved for it, see `SequencePlaced`.
    At the other stages it has blocks, which the count of used blocks includes already. A sequence
    without any blocks waits for admission.
    """

    state: SequenceState
    absent: frozenset[int] = frozenset()
    held: bool = True


@dataclass(frozen=True, slots=True)
class SequenceForgotten:
    """Another leader adopted the sequence. Its blocks stay in use until its KV has moved."""

    seq_id: str


@dataclass(frozen=True, slots=True)
class SequenceHeld:
    """Hold the sequence: it keeps its blocks and is not planned. Idempotent."""

    seq_id: str


@dataclass(frozen=True, slots=True)
class SequenceResumed:
    """Resume a held sequence; no effect if it is not held, since a preemption ends the hold."""

    seq_id: str


@dataclass(frozen=True, slots=True)
class SequencePreempted:
    """Preempt a held or running sequence: free its KV, which is recomputed later."""

    seq_id: str


@dataclass(frozen=True, slots=True)
class SequenceReset:
    """Hold the sequence without its KV, which the stages that store it free by themselves.

    Its blocks count as used until these stages report them free. Unlike with `SequencePreempted`,
    the stages need not be those of this planner.
    """

    seq_id: str


@dataclass(frozen=True, slots=True)
class SequencePlaced:
    """Turn the blocks reserved for the sequence at `stage`, which has room, into used blocks.

    The leader's own stage allocates them at once; their K/V may be written after the microbatches
    planned before have run. A follower must allocate as many blocks, after those microbatches and
    the releases of `ReleasedTaken`.
    """

    seq_id: str
    stage: int


@dataclass(frozen=True, slots=True)
class MicrobatchFollowed:
    """Apply a microbatch of the leader to this stage's block tables, before it runs.

    `chunks`: per sequence, the total number of blocks that it needs.
    """

    released: tuple[str, ...]
    chunks: tuple[tuple[str, int], ...] = ()
    prefixes: PrefixCacheUpdate | None = None


@dataclass(frozen=True, slots=True)
class BlocksAdopted:
    """Extend the table of a sequence at this stage to `blocks` blocks, for KV that will arrive."""

    seq_id: str
    blocks: int


@dataclass(frozen=True, slots=True)
class BlocksReleased:
    """Free the blocks of a sequence at this stage."""

    seq_id: str


@dataclass(frozen=True, slots=True)
class BlocksRelocated:
    """Move at most `most` blocks with ids ≥ `limit` to lower ids; answered by `MoveBlocks`."""

    limit: int
    most: int | None = None


@dataclass(frozen=True, slots=True)
class PoolGrown:
    """The pool has `blocks` blocks now, without a limit."""

    blocks: int


@dataclass(frozen=True, slots=True)
class PoolLimited:
    """Block ids from `blocks` on are not allocated any more; their memory will be reclaimed."""

    blocks: int


@dataclass(frozen=True, slots=True)
class PoolShrunk:
    """The pool has only `blocks` blocks now; none above is in use."""

    blocks: int


@dataclass(frozen=True, slots=True)
class BatchYielded:
    """Preempt sequences of batch work until `stage` uses at most `blocks` blocks or none runs.

    No effect under policies in which batch work does not yield.
    """

    stage: int
    blocks: int


SequenceEvent = (
    SequenceForgotten
    | SequenceAdopted
    | SequenceHeld
    | SequenceResumed
    | SequencePreempted
    | SequenceReset
    | SequencePlaced
)
StageEvent = (
    ConfigurationEnded
    | StagesConfigured
    | GroupDivided
    | CapacityReported
    | BlocksCredited
    | BatchYielded
    | ReleasedTaken
    | FlightDiscarded
)
# Events that shrink the pool, for which blocks move to lower ids.
MovingBlockEvent = BlocksRelocated | PoolLimited | PoolShrunk
BlockEvent = (
    MicrobatchFollowed
    | BlocksAdopted
    | BlocksReleased
    | BlocksRelocated
    | PoolGrown
    | PoolLimited
    | PoolShrunk
)
ConfigurationEvent = SequenceEvent | StageEvent | BlockEvent
