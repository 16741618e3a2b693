"""Events and commands of `Changeover`, a group member's state machine; its driver is the engine.

Slow work is a command whose completion arrives as a separate event, so that each turn (the engine's
work between two iterations) stays short. The driver executes a `MemoryCommand` at once and passes
the answer to the state machine before any other event.

Terms: a *slab* is the parameters of a layer, the embedding or the head. An *attempt* is a prepared
change of groups, named by its id. *Departed* layers have left this member's stage; *returning*
layers come back to it. The *lanes* are two connections to each other member, for activations and
for bulk data.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

from services.core.changeover.configuration import Configuration, GroupStages
from services.core.changeover.frames import Activations, MemberFrame
from services.core.changeover.route import Transfer
from services.core.changeover.transfer_outcome import TransferOutcome
from services.core.groups.layer_map import Stage
from services.core.host.vocabulary import HostCommand, HostEvent
from services.core.planner.events import (
    ClientCommand,
    DrainContinued,
    IterationEvent,
    LendBlocks,
    MeasurementEvent,
    MoveBlocks,
    Planned,
    RequestAborted,
    RequestArrived,
    RequeueChecked,
)
from services.core.planner.sequence import SequenceState
from services.core.shipments.vocabulary import (
    ShipmentFrame,
    ShippingAsked,
    ShippingCommand,
    ShippingPeerLost,
)

FrameT = TypeVar("FrameT")

# --- events


@dataclass(frozen=True, slots=True)
class ConfigurationCommitted:
    """A change of groups is committed, and one of its `groups` has this worker as a member.

    Ignored unless its epoch is higher than those of the present and the committed configuration.
    """

    now_s: float
    groups: tuple[GroupStages, ...]


@dataclass(frozen=True, slots=True)
class TurnTaken:
    """The clock tick between iterations: continue whatever is in progress."""

    now_s: float


@dataclass(frozen=True, slots=True)
class FrameReceived(Generic[FrameT]):
    """A frame of the present epoch from `peer`, in sending order.

    Frames of shipments are valid in any epoch.
    """

    now_s: float
    peer: str
    frame: FrameT


@dataclass(frozen=True, slots=True)
class PeersLost:
    """The complete set of members of the present change that were lost since its start here."""

    now_s: float
    workers: frozenset[str]


@dataclass(frozen=True, slots=True)
class StageSwitched:
    """Answer to `SwitchStage`.

    Each layer of the new stage has memory for `blocks` KV blocks. `departed`: KV of layers that
    left the stage is still stored here.
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

    The preparation starts once the last change has settled here, however long that takes.
    `holders`: workers outside the change, with the layers that each may send to this member.
    """

    attempt: str
    groups: tuple[GroupStages, ...]
    holders: tuple[Stage, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparationAborted:
    """The attempt will never be committed: undo its preparation. Unknown attempts are ignored."""

    attempt: str


@dataclass(frozen=True, slots=True)
class MembersConnected:
    """End of `ConnectMembers`; `unreachable` is a member that did not connect in time, or ""."""

    attempt: str
    unreachable: str = ""


@dataclass(frozen=True, slots=True)
class RestoreMeasured:
    """Answer to `MeasureRestore`: beside all parameters, `blocks` KV blocks fit into memory.

    `missing`: slabs that must be restored, of which this worker has `copied` in host memory;
    `returning`: layers that need memory for KV again.
    """

    blocks: int
    missing: tuple[str, ...]
    returning: tuple[int, ...]
    copied: tuple[str, ...] = ()


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


RequestEvent = RequestArrived | RequestAborted | RequeueChecked | DrainContinued | IterationEvent
Event = (
    RequestEvent
    | MeasurementEvent
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
    | ShippingAsked
    | ShippingPeerLost
    | HostEvent
)

# --- commands


@dataclass(frozen=True, slots=True)
class SendFrame(Generic[FrameT]):
    """Send a frame to a member, which may be this worker; frames to lost members are discarded.

    The frame carries the epoch of `group`, or of the present configuration if that is None.
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

    Iterations pause only during this step of a change. Answered by `StageSwitched`.
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
    """Cancel an outgoing transfer, since its blocks are freed; ends with a `TransferOutcome`."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class ConnectMembers:
    """Connect both lanes to every other member of the change; ends with `MembersConnected`."""

    attempt: str


@dataclass(frozen=True, slots=True)
class MeasureRestore:
    """Determine the missing slabs and the remaining memory for KV of a stage with these layers.

    Answered by `RestoreMeasured`, or by `RestoreFailed`.
    """

    first_layer: int
    end_layer: int


@dataclass(frozen=True, slots=True)
class ShrinkKv:
    """Unmap the memory of block ids from `blocks` on; the ids in use are below `used`.

    Ends with `KvShrunk`.
    """

    attempt: str
    blocks: int
    used: int


@dataclass(frozen=True, slots=True)
class RestoreSlab:
    """Restore a slab and verify it; several may be in progress.

    It is fetched from the worker `holder`. If that is "", it is read from the copy in host memory
    (`from_copy`) or from the model folder. Ends with `SlabVerified`, or with `RestoreFailed` if the
    folder's parameters differ from those that were loaded at the start.
    """

    attempt: str
    slab: str
    holder: str
    from_copy: bool = False


@dataclass(frozen=True, slots=True)
class MapKv:
    """Map as many KV blocks for the returning layers as the stage has. Answered by `KvMapped`."""

    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UndoRestore:
    """Undo the memory changes of a preparation. Answered by `RestoreUndone`.

    `keep_verified`: keep the slabs that were restored and verified, for the next attempt.
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
    """For the event log only: a preparation was aborted. Audits check that it never commits."""

    attempt: str


@dataclass(frozen=True, slots=True)
class NoteAdopted:
    """This member now leads a sequence that another leader started."""

    sequence: SequenceState


@dataclass(frozen=True, slots=True)
class NoteMoved:
    """Leader `worker_id` of `group` adopted a sequence and emits its tokens from `next_index`."""

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
    | LendBlocks
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
    | ShippingCommand
    | HostCommand
)


def log_name(value: Any) -> str:
    """The type name of an event or command in an event log, the key of `LOGGED`.

    If it carries a frame, the frame's type is part of the name ("FrameReceived[Adopt]"), because a
    reader of the log needs it to decode the frame.
    """
    name = type(value).__name__
    if isinstance(value, FrameReceived | SendFrame):
        return f"{name}[{type(value.frame).__name__}]"
    return name


def _logged_types() -> dict[str, Any]:
    # Without the generic types, which are added below once per type of frame.
    kinds = {kind for kind in (*get_args(Event), *get_args(Command), Planned) if not get_args(kind)}
    named: dict[str, Any] = {kind.__name__: kind for kind in kinds}
    for carrier in (FrameReceived, SendFrame):
        for frame in (*get_args(MemberFrame), *get_args(ShipmentFrame)):
            named[f"{carrier.__name__}[{frame.__name__}]"] = carrier[frame]
    return named


LOGGED: dict[str, Any] = _logged_types()
"""Types of the events and commands in a member's event log, by `log_name`."""
