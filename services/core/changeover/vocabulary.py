"""Events and commands of the change-over state machine of a group member.

Slow work is a command whose completion is an event of its own, so that each turn stays bounded. A
`MemoryCommand` is answered synchronously, before any other event is handled.
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
    RequeueChecked,
)
from services.core.planner.sequence import SequenceState

FrameT = TypeVar("FrameT")

# --- events


@dataclass(frozen=True, slots=True)
class ConfigurationCommitted:
    """A change of groups is committed, and one of its `groups` has this worker as a member.

    Ignored unless its epoch is newer than the present configuration's.
    """

    now_s: float
    groups: tuple[GroupStages, ...]


@dataclass(frozen=True, slots=True)
class TurnTaken:
    """The clock tick between iterations: continue whatever is in progress."""

    now_s: float


@dataclass(frozen=True, slots=True)
class FrameReceived(Generic[FrameT]):
    """A frame of the present epoch from `peer`, in sending order."""

    now_s: float
    peer: str
    frame: FrameT


@dataclass(frozen=True, slots=True)
class PeersLost:
    """All members of the present change that were lost since this worker entered it."""

    now_s: float
    workers: frozenset[str]


@dataclass(frozen=True, slots=True)
class StageSwitched:
    """Answer to `SwitchStage`.

    Each layer of the new stage has `blocks` blocks. `departed`: KV of layers that left the stage is
    still stored here.
    """

    blocks: int
    departed: bool


@dataclass(frozen=True, slots=True)
class DepartedReleased:
    """Answer to `ReleaseDeparted`; the fields are those of `StageSwitched`."""

    blocks: int
    departed: bool


@dataclass(frozen=True, slots=True)
class PreparationAsked:
    """Prepare for `groups`, which may be committed later; answered by `EndPreparation`.

    The preparation starts once the last change has settled here, with no time limit.
    """

    attempt: str
    groups: tuple[GroupStages, ...]


@dataclass(frozen=True, slots=True)
class PreparationAborted:
    """The attempt will never be committed. Unknown attempts are ignored."""

    attempt: str


@dataclass(frozen=True, slots=True)
class MembersConnected:
    """End of `ConnectMembers`; `unreachable` is a member that did not connect in time, or ""."""

    attempt: str
    unreachable: str = ""


@dataclass(frozen=True, slots=True)
class RestoreMeasured:
    """Answer to `MeasureRestore`: room for `blocks` KV blocks remains beside the parameters.

    `missing`: slabs whose parameters must be fetched; `returning`: layers to be restored.
    """

    blocks: int
    missing: tuple[str, ...]
    returning: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvShrunk:
    """End of `ShrinkKv`: the memory of the removed blocks is unmapped."""

    attempt: str


@dataclass(frozen=True, slots=True)
class SlabVerified:
    """End of `RestoreSlab`: the slab is verified, or its transfer failed (not `intact`)."""

    attempt: str
    slab: str
    intact: bool


@dataclass(frozen=True, slots=True)
class KvMapped:
    """Answer to `MapKv`: the returning layers have KV blocks."""


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """Replaces any answer of a preparation: the layers cannot be restored, for `reason`."""

    reason: str


@dataclass(frozen=True, slots=True)
class RestoreUndone:
    """Answer to `UndoRestore`: each layer of the present stage has `blocks` blocks."""

    blocks: int


RequestEvent = RequestArrived | RequestAborted | RequeueChecked | IterationEvent
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
    """Send a frame to a member, which may be this worker; frames to lost members are dropped.

    The frame carries the epoch of the present configuration, or of `group`.
    """

    peer: str
    frame: FrameT
    group: GroupStages | None = None


@dataclass(frozen=True, slots=True)
class RunStage:
    """Run this stage of a microbatch and forward the result to the next stage or the leader."""

    frame: Activations


@dataclass(frozen=True, slots=True)
class SwitchStage:
    """Run the layers of this configuration from now on, and send frames with its epoch.

    This is the only pause of a change. Answered by `StageSwitched`.
    """

    configuration: Configuration


@dataclass(frozen=True, slots=True)
class ReleaseDeparted:
    """Free KV of departed layers from block id `blocks` on; only lower ids are still needed.

    Answered by `DepartedReleased`.
    """

    blocks: int


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """Send the KV of a request's first `blocks` blocks; ends with a `TransferOutcome`."""

    transfer_id: str
    seq_id: str
    transfer: Transfer
    blocks: int


@dataclass(frozen=True, slots=True)
class CancelTransfer:
    """Cancel an outgoing transfer: its KV is obsolete, or its blocks are about to be freed."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class ConnectMembers:
    """Connect both lanes to every other member of the change; ends with `MembersConnected`."""

    attempt: str


@dataclass(frozen=True, slots=True)
class MeasureRestore:
    """Measure missing parameters and remaining KV room of a stage with these layers.

    Answered by `RestoreMeasured`.
    """

    first_layer: int
    end_layer: int


@dataclass(frozen=True, slots=True)
class ShrinkKv:
    """Unmap the KV of block ids from `blocks` on; only ids below `used` are in use.

    Ends with `KvShrunk`.
    """

    attempt: str
    blocks: int
    used: int


@dataclass(frozen=True, slots=True)
class RestoreSlab:
    """Fetch a slab from the member `holder`, or from the model folder if it is "", and verify it.

    Ends with `SlabVerified`, or with `RestoreFailed` if the folder's parameters differ from those
    that were loaded at the start.
    """

    attempt: str
    slab: str
    holder: str


@dataclass(frozen=True, slots=True)
class MapKv:
    """Map as many KV blocks for the returning layers as the stage has. Answered by `KvMapped`."""

    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UndoRestore:
    """Roll back the memory changes of a preparation. Answered by `RestoreUndone`.

    `keep_verified`: keep slabs that were restored and verified, so that the next attempt need not
    fetch them again.
    """

    attempt: str
    keep_verified: bool = False


@dataclass(frozen=True, slots=True)
class EndPreparation:
    """Report to the coordinator that this member is ready, or why it is not (`refusal`)."""

    attempt: str
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class NoteAborted:
    """A preparation was aborted; audits check that it is never committed."""

    attempt: str


@dataclass(frozen=True, slots=True)
class NoteAdopted:
    """This member now leads a sequence that another leader started."""

    sequence: SequenceState


@dataclass(frozen=True, slots=True)
class NoteMoved:
    """Leader `worker_id` of `group` has adopted a sequence; it emits tokens from `next_index`."""

    seq_id: str
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
    """The type name of an event or command in an event log.

    Events and commands that carry a frame are logged as "FrameReceived[Adopt]": the frame is a
    union, so a reader needs its type to decode it.
    """
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
"""Types in a member's event log besides facts, by `log_name`."""
