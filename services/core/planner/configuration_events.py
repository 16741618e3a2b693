"""Planner events of change-overs: effects of group changes on sequences, stages and blocks.

Anyone may read planner state. Only events mutate it, so replaying the log reproduces it. Ids are
sequence ids, see `sequence_names.py`.
"""

from dataclasses import dataclass

from services.core.planner.block_ledger import Follower
from services.core.planner.sequence import SequenceState
from services.core.prefix.cache_update import PrefixCacheUpdate


@dataclass(frozen=True, slots=True)
class ConfigurationEnded:
    """The current configuration ends; no microbatch is in flight. Answered by `BlocksFreed`.

    Frees the blocks of sequences that have not run yet, since only this leader knows of them, and
    of sequences that grew for a discarded microbatch. Drops all cached prefixes, since the layers
    change. From here on the stage table counts the used blocks of this stage, which the next leader
    may receive.
    """


@dataclass(frozen=True, slots=True)
class StagesConfigured:
    """The worker leads these follower stages from now on; no microbatch is in flight.

    The stages of the old configuration have received the ids that `ConfigurationEnded` released. A
    sequence without blocks at any new stage is held until it is placed there and resumed.
    """

    followers: tuple[Follower, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupDivided:
    """The loss of a worker ended the group that this worker led, or an unfinished split of it.

    `members` workers that can serve its requests survive, including this worker. `seq_ids` are
    the sequences that lost their KV; None: all that have no KV now. Answered by a refusal for each
    sequence that is returned to the scheduler; see `excess_lost_sequences`.
    """

    members: int
    seq_ids: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class CapacityReported:
    """Stage `stage` ≥ 1 has `blocks` blocks for all microbatches planned from now on."""

    stage: int
    blocks: int


@dataclass(frozen=True, slots=True)
class BlocksCredited:
    """Stage `stage` ≥ 1 freed `blocks` blocks of sequences that this planner does not own."""

    stage: int
    blocks: int


@dataclass(frozen=True, slots=True)
class ReleasedTaken:
    """Return the released sequences as `BlocksFreed` now, instead of in the next microbatch."""


@dataclass(frozen=True, slots=True)
class FlightDiscarded:
    """Discard all microbatches in flight: their tokens run again, their results are ignored."""


@dataclass(frozen=True, slots=True)
class SequenceAdopted:
    """Adopt a sequence of another leader, ordered by its age. Idempotent.

    At the stages in `absent` it has no blocks yet: they are reserved for it, see `SequencePlaced`.
    At the other stages it has blocks, and the stage table or the stage's count of used blocks
    includes them. A sequence without any blocks waits for admission.
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
    """Resume a held sequence; no effect otherwise, since a preemption has resumed it."""

    seq_id: str


@dataclass(frozen=True, slots=True)
class SequencePreempted:
    """Preempt a held or running sequence: free its KV, which is recomputed later."""

    seq_id: str


@dataclass(frozen=True, slots=True)
class SequenceReset:
    """Hold the sequence without its KV, which the stages that store it free by themselves.

    Its blocks stay in use until these stages report them free. Unlike `SequencePreempted`, the
    stages need not be those of this planner.
    """

    seq_id: str


@dataclass(frozen=True, slots=True)
class SequencePlaced:
    """Turn the blocks reserved for the sequence at `stage`, which has room, into used blocks.

    At the leader's own stage the table then has them; they may be written once earlier
    microbatches have run. A follower must allocate as many blocks in order: after the earlier
    microbatches and the releases of `ReleasedTaken`.
    """

    seq_id: str
    stage: int


@dataclass(frozen=True, slots=True)
class MicrobatchFollowed:
    """A follower applies a microbatch: free `released`, allocate each (sequence, blocks)."""

    released: tuple[str, ...]
    chunks: tuple[tuple[str, int], ...] = ()
    prefixes: PrefixCacheUpdate | None = None


@dataclass(frozen=True, slots=True)
class BlocksAdopted:
    """Extend the table of a sequence to `blocks` blocks, for KV that will arrive."""

    seq_id: str
    blocks: int


@dataclass(frozen=True, slots=True)
class BlocksReleased:
    """Free the blocks of a sequence."""

    seq_id: str


@dataclass(frozen=True, slots=True)
class BlocksRelocated:
    """Move blocks below `limit`, at most `most` of them; answered by `MoveBlocks`."""

    limit: int
    most: int | None = None


@dataclass(frozen=True, slots=True)
class PoolGrown:
    """The pool has `blocks` blocks now, without a limit."""

    blocks: int


@dataclass(frozen=True, slots=True)
class PoolLimited:
    """Block ids of `blocks` and above are not allocated any more."""

    blocks: int


@dataclass(frozen=True, slots=True)
class PoolShrunk:
    """The pool has only `blocks` blocks now."""

    blocks: int


@dataclass(frozen=True, slots=True)
class BatchYielded:
    """Preempt batch sequences until `stage` uses at most `blocks` blocks or none of them runs.

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
