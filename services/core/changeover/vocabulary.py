"""Events and commands of a member's change-over.

Slow work is a command with an event for its end, so that a turn stays bounded. The answer to a
command of the memory comes at once, before the next event of another kind.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

from services.core.changeover.configuration import Configuration, GroupStages
from services.core.changeover.frames import Activations, MemberFrame
from services.core.changeover.route import Transfer
from services.core.changeover.transfer_outcome import TransferOutcome
from services.core.planner.events import (
    ClientCommand,
    IterationEvent,
    MoveBlocks,
    Planned,
    RequestAborted,
    RequestArrived,
    WaitLooked,
)
from services.core.planner.sequence import SequenceState

FrameT = TypeVar("FrameT")

# --- events


@dataclass(frozen=True, slots=True)
class ConfigurationCommitted:
    """The groups of a change are committed, one of which has this worker as a member.

    A configuration that is not newer than the present one has no effect.
    """

    now_s: float
    groups: tuple[GroupStages, ...]


@dataclass(frozen=True, slots=True)
class TurnTaken:
    """Time has passed: go on with what is under way. Called between iterations."""

    now_s: float


@dataclass(frozen=True, slots=True)
class FrameReceived(Generic[FrameT]):
    """A frame of the present epoch has come from `peer`, in the order of its sending."""

    now_s: float
    peer: str
    frame: FrameT


@dataclass(frozen=True, slots=True)
class PeersLost:
    """Every member of the present change that was lost since this worker entered it."""

    now_s: float
    workers: frozenset[str]


@dataclass(frozen=True, slots=True)
class StageSwitched:
    """Answer to `SwitchStage`: every layer has `blocks`; `departed`: KV of other layers is here."""

    blocks: int
    departed: bool


@dataclass(frozen=True, slots=True)
class DepartedReleased:
    """Answer to `ReleaseDeparted`, with the same meaning as in `StageSwitched`."""

    blocks: int
    departed: bool


@dataclass(frozen=True, slots=True)
class PreparationAsked:
    """Get ready for groups that may be committed; answered by `EndPreparation`.

    It begins once the last change is over here, however long the asker waits for that.
    """

    attempt: str
    groups: tuple[GroupStages, ...]


@dataclass(frozen=True, slots=True)
class PreparationAborted:
    """The attempt will never be committed; unknown ones are ignored."""

    attempt: str


@dataclass(frozen=True, slots=True)
class MembersConnected:
    """End of `ConnectMembers`; `unreachable` names a member that did not answer in time."""

    attempt: str
    unreachable: str = ""


@dataclass(frozen=True, slots=True)
class RestoreMeasured:
    """Answer to `MeasureRestore`: `blocks` remain beside what returns.

    `missing` are the slabs whose parameters are not here, `returning` the layers that come back.
    """

    blocks: int
    missing: tuple[str, ...]
    returning: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvShrunk:
    """End of `ShrinkKv`: the memory of the blocks that went is free."""

    attempt: str


@dataclass(frozen=True, slots=True)
class SlabVerified:
    """End of `RestoreSlab`: the slab may run, or (not `intact`) its holder sent it not whole."""

    attempt: str
    slab: str
    intact: bool


@dataclass(frozen=True, slots=True)
class KvMapped:
    """Answer to `MapKv`."""


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """Instead of another answer: this member cannot have the layers, with one sentence of cause."""

    reason: str


@dataclass(frozen=True, slots=True)
class RestoreUndone:
    """Answer to `UndoRestore`: every layer of the present stage has `blocks`."""

    blocks: int


RequestEvent = RequestArrived | RequestAborted | WaitLooked | IterationEvent
Event = (
    RequestEvent
    | ConfigurationCommitted
    | TurnTaken
    | FrameReceived[Any]
    | PeersLost
    | StageSwitched
    | DepartedReleased
    | TransferOutcome
    | PreparationAsked
    | PreparationAborted
    | MembersConnected
    | RestoreMeasured
    | KvShrunk
    | SlabVerified
    | KvMapped
    | RestoreFailed
    | RestoreUndone
)

# --- commands


@dataclass(frozen=True, slots=True)
class SendFrame(Generic[FrameT]):
    """Send a frame to a member, perhaps this one itself; to one that is lost it is dropped.

    It goes out with the epoch of the present configuration, or with that of `group`.
    """

    peer: str
    frame: FrameT
    group: GroupStages | None = None


@dataclass(frozen=True, slots=True)
class RunStage:
    """Run this stage of a microbatch, and pass the result on."""

    frame: Activations


@dataclass(frozen=True, slots=True)
class SwitchStage:
    """Run the layers of this configuration from now on, and send frames of its epoch.

    The only pause that a change makes. Answered by `StageSwitched`.
    """

    configuration: Configuration


@dataclass(frozen=True, slots=True)
class ReleaseDeparted:
    """Free KV of departed layers from block `blocks` on; only lower blocks are needed.

    Answered by `DepartedReleased`.
    """

    blocks: int


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """Send KV of a request's first `blocks` blocks; ends with a transfer event."""

    transfer_id: str
    request_id: str
    transfer: Transfer
    blocks: int


@dataclass(frozen=True, slots=True)
class CancelTransfer:
    """Nobody needs what this member sends any more."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class ConnectMembers:
    """Have lanes to every other member of the change; ends with `MembersConnected`."""

    attempt: str


@dataclass(frozen=True, slots=True)
class MeasureRestore:
    """What a stage of these layers lacks, and what room it leaves: `RestoreMeasured`."""

    first_layer: int
    end_layer: int


@dataclass(frozen=True, slots=True)
class ShrinkKv:
    """Keep only blocks below `blocks`, of which those below `used` have owners.

    Ends with `KvShrunk`.
    """

    attempt: str
    blocks: int
    used: int


@dataclass(frozen=True, slots=True)
class RestoreSlab:
    """Fetch a slab from the member `holder`, "": from the model folder, and verify it.

    Ends with `SlabVerified`, or with `RestoreFailed` if the folder has not what was loaded.
    """

    attempt: str
    slab: str
    holder: str


@dataclass(frozen=True, slots=True)
class MapKv:
    """Give layers that come back as many blocks as the stage has. Answered by `KvMapped`."""

    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UndoRestore:
    """Take back what a preparation did to the memory. Answered by `RestoreUndone`.

    `keep_verified`: slabs that came whole stay, so that the next attempt goes on where this ended.
    """

    attempt: str
    keep_verified: bool = False


@dataclass(frozen=True, slots=True)
class EndPreparation:
    """Tell the asker that this member is ready, or why it is not (`refusal`)."""

    attempt: str
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class NoteAborted:
    """A preparation was aborted; an audit holds it against later commits."""

    attempt: str


@dataclass(frozen=True, slots=True)
class NoteAdopted:
    """This member leads a sequence from now on that another one began."""

    sequence: SequenceState


@dataclass(frozen=True, slots=True)
class NoteMoved:
    """The member `worker_id` of `group` has adopted a sequence, from token `next_index` on."""

    request_id: str
    worker_id: str
    group: GroupStages
    next_index: int


MemoryCommand = (
    SwitchStage | ReleaseDeparted | MeasureRestore | ShrinkKv | MapKv | UndoRestore | MoveBlocks
)
Command = (
    ClientCommand
    | MemoryCommand
    | SendFrame[Any]
    | RunStage
    | SendBlocks
    | CancelTransfer
    | ConnectMembers
    | RestoreSlab
    | EndPreparation
    | NoteAborted
    | NoteAdopted
    | NoteMoved
)


def log_name(value: Any) -> str:
    """What an event or command is called in a log: a frame's name is part of its carrier's."""
    name = type(value).__name__
    if isinstance(value, FrameReceived | SendFrame):
        return f"{name}[{type(value.frame).__name__}]"
    return name


def _logged() -> dict[str, Any]:
    kinds = {kind for kind in (*get_args(Event), *get_args(Command), Planned) if not get_args(kind)}
    named: dict[str, Any] = {kind.__name__: kind for kind in kinds}
    for carrier in (FrameReceived, SendFrame):
        for frame in get_args(MemberFrame):
            named[f"{carrier.__name__}[{frame.__name__}]"] = carrier[frame]
    return named


LOGGED: dict[str, Any] = _logged()
"""What a member's log holds beside facts, by `log_name`."""
