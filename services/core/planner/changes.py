"""Changes of a planner and its blocks beside events, as records that a replay repeats.

A change of groups calls the planner's methods. In a log, each call from outside is one of these;
what a call does inside follows from it and is not recorded.
"""

from dataclasses import dataclass
from typing import get_args

from services.core.planner.batch import Microbatch
from services.core.planner.block_ledger import Follower
from services.core.planner.events import Command, Event
from services.core.planner.sequence import SequenceState
from services.core.planner.state import IterationState


@dataclass(frozen=True, slots=True)
class Configured:
    """The worker leads these stages after its own."""

    followers: tuple[Follower, ...]


@dataclass(frozen=True, slots=True)
class CapacitySet:
    """A stage told how many blocks it has."""

    stage: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Credited:
    """A stage freed blocks of sequences that are not this planner's."""

    stage: int
    blocks: int


@dataclass(frozen=True, slots=True)
class ReleasedTaken:
    """The names of released requests went another way than with a microbatch."""


@dataclass(frozen=True, slots=True)
class FlightDiscarded:
    """All microbatches in flight were given up."""


@dataclass(frozen=True, slots=True)
class SequenceForgotten:
    """Another leader has adopted it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SequenceAdopted:
    """It came from another leader."""

    state: SequenceState
    absent: frozenset[int]
    held: bool


@dataclass(frozen=True, slots=True)
class SequenceHeld:
    """It keeps its blocks and is planned no more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SequenceResumed:
    """It goes on."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SequencePreempted:
    """It lost its blocks, not for want of room here."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SequencePlaced:
    """It was to have its blocks at a stage."""

    request_id: str
    stage: int


@dataclass(frozen=True, slots=True)
class TableApplied:
    """The stage followed a microbatch of its leader: (request, blocks in all) for each chunk."""

    released: tuple[str, ...]
    chunks: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class BlocksAdopted:
    """A request got so many blocks in all, for K/V to come."""

    request_id: str
    blocks: int


@dataclass(frozen=True, slots=True)
class BlocksReleased:
    """A request's blocks were freed."""

    request_id: str


@dataclass(frozen=True, slots=True)
class BlocksRelocated:
    """Blocks moved below a limit: at most `most`."""

    limit: int
    most: int | None


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


SequenceChange = (
    SequenceForgotten
    | SequenceAdopted
    | SequenceHeld
    | SequenceResumed
    | SequencePreempted
    | SequencePlaced
)
StageChange = Configured | CapacitySet | Credited | ReleasedTaken | FlightDiscarded
BlockChange = (
    TableApplied
    | BlocksAdopted
    | BlocksReleased
    | BlocksRelocated
    | PoolGrown
    | PoolLimited
    | PoolShrunk
)
Change = SequenceChange | StageChange | BlockChange

RECORDED: tuple[type, ...] = (*get_args(Event), *get_args(Command), *get_args(Change), Microbatch)
"""Everything that a planner's log holds, beside None for a look at an empty queue."""


def repeat(state: IterationState, change: Change) -> list[Command]:
    """Repeat the change on `state`; returns what the method returned the first time."""
    if isinstance(change, SequenceChange):
        return _repeat_of_sequence(state, change)
    if isinstance(change, StageChange):
        _repeat_of_stages(state, change)
    else:
        _repeat_of_blocks(state, change)
    return []


def _repeat_of_sequence(state: IterationState, change: SequenceChange) -> list[Command]:
    match change:
        case SequenceForgotten():
            state.forget(change.request_id)
        case SequenceAdopted():
            return state.adopt(change.state, change.absent, change.held)
        case SequenceHeld():
            state.hold(change.request_id)
        case SequenceResumed():
            state.resume(change.request_id)
        case SequencePreempted():
            state.preempt(change.request_id)
        case SequencePlaced():
            state.place(change.request_id, change.stage)
    return []


def _repeat_of_stages(state: IterationState, change: StageChange) -> None:
    match change:
        case Configured():
            state.configure(change.followers)
        case CapacitySet():
            state.set_capacity(change.stage, change.blocks)
        case Credited():
            state.credit(change.stage, change.blocks)
        case ReleasedTaken():
            state.take_released()
        case FlightDiscarded():
            state.discard_in_flight()


def _repeat_of_blocks(state: IterationState, change: BlockChange) -> None:
    table = state.table
    match change:
        case TableApplied():
            table.apply(change.released, change.chunks)
        case BlocksAdopted():
            table.adopt(change.request_id, change.blocks)
        case BlocksReleased():
            table.release(change.request_id)
        case BlocksRelocated():
            table.relocate(change.limit, change.most)
        case PoolGrown():
            table.pool.grow(change.blocks)
        case PoolLimited():
            table.pool.limit(change.blocks)
        case PoolShrunk():
            table.pool.shrink(change.blocks)
