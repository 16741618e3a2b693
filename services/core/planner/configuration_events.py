"""Events of a planner beside those of requests: what a change of groups does to it and its blocks.

Reading a planner is free for everybody; only events change it, so a log of them repeats it.
"""

from dataclasses import dataclass

from services.core.planner.block_ledger import Follower
from services.core.planner.sequence import SequenceState
from services.core.prefix.news import PrefixNews


@dataclass(frozen=True, slots=True)
class ConfigurationEnded:
    """The present configuration ends; nothing is in flight. Answered by `BlocksFreed`.

    Blocks of sequences of which nothing has run are freed: only this leader knows of them. So are
    those of a sequence that grew for a microbatch that was discarded. All prefixes are forgotten,
    since other layers follow. From here on the table says how many own blocks are in use, and
    another leader may be told.
    """


@dataclass(frozen=True, slots=True)
class StagesConfigured:
    """The worker leads these stages after its own from now on; nothing is in flight.

    What `ConfigurationEnded` freed was handed to the stages of the old configuration before. A
    sequence without blocks at one of the new stages is held until it is placed there and resumed.
    """

    followers: tuple[Follower, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupDivided:
    """A loss has ended the group that this worker led, or a split of it that was not over.

    Of those that could serve its requests `members` live, with this one. Only `request_ids` have
    lost their KV by it; None: all that have none now. Answered by a refusal for each sequence that
    is given back; see `lost_share`.
    """

    members: int
    request_ids: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class CapacityReported:
    """Stage `stage` ≥ 1 has `blocks` blocks for what is planned from now on."""

    stage: int
    blocks: int


@dataclass(frozen=True, slots=True)
class BlocksCredited:
    """Stage `stage` ≥ 1 has freed `blocks` blocks of sequences that are not this planner's."""

    stage: int
    blocks: int


@dataclass(frozen=True, slots=True)
class ReleasedTaken:
    """Take the names of released requests, as `BlocksFreed`; no microbatch carries them then."""


@dataclass(frozen=True, slots=True)
class FlightDiscarded:
    """Discard all microbatches in flight: their positions run again, results are ignored."""


@dataclass(frozen=True, slots=True)
class SequenceAdopted:
    """Go on with another leader's sequence, at its place by age; a repetition changes nothing.

    At the stages in `absent` it has no blocks yet: they are promised to it, see `SequencePlaced`;
    at the others it has them, and the table or the stage's count of used blocks includes them. A
    sequence without blocks waits like any other.
    """

    state: SequenceState
    absent: frozenset[int] = frozenset()
    held: bool = True


@dataclass(frozen=True, slots=True)
class SequenceForgotten:
    """Another leader has adopted the sequence. Its blocks are in use until its KV has moved."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SequenceHeld:
    """The sequence keeps its blocks and is not planned; no effect if it is held already."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SequenceResumed:
    """The sequence goes on; no effect if it is not held, since a preemption resumed it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SequencePreempted:
    """The KV of a held or running sequence is freed, and computed again."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SequenceReset:
    """The sequence is held without its KV, which the stages that have it free.

    Its blocks stay in use until the stages that have them report them free. Unlike
    `SequencePreempted`, this is for a sequence whose stages may not be those of this planner.
    """

    request_id: str


@dataclass(frozen=True, slots=True)
class SequencePlaced:
    """The sequence takes the blocks promised to it at `stage`, where there is room.

    At the own stage they are in the table then, and may be written once earlier microbatches have
    run. Another stage has to adopt as many, in order: after the earlier microbatches and the names
    of `ReleasedTaken` have passed it.
    """

    request_id: str
    stage: int


@dataclass(frozen=True, slots=True)
class MicrobatchFollowed:
    """This stage follows its leader: frees `released`, covers each chunk's (request, blocks)."""

    released: tuple[str, ...]
    chunks: tuple[tuple[str, int], ...] = ()
    prefixes: PrefixNews | None = None


@dataclass(frozen=True, slots=True)
class BlocksAdopted:
    """A request gets so many blocks in all, for KV to come."""

    request_id: str
    blocks: int


@dataclass(frozen=True, slots=True)
class BlocksReleased:
    """A request's blocks are freed."""

    request_id: str


@dataclass(frozen=True, slots=True)
class BlocksRelocated:
    """Blocks move below `limit`, at most `most` of them; answered by `MoveBlocks`."""

    limit: int
    most: int | None = None


@dataclass(frozen=True, slots=True)
class PoolGrown:
    """There are so many blocks now, and no limit."""

    blocks: int


@dataclass(frozen=True, slots=True)
class PoolLimited:
    """No block from this one on is taken."""

    blocks: int


@dataclass(frozen=True, slots=True)
class PoolShrunk:
    """There are only so many blocks now."""

    blocks: int


@dataclass(frozen=True, slots=True)
class BatchYielded:
    """Batch sequences give blocks back until `stage` uses at most `blocks`, if they have so many.

    No effect where they do not yield.
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
