"""Dispatches each frame of a peer to the part of the member's state machine that handles it.

`_FRAMES` maps each type of frame to its handler. See `frames` for the meaning of each frame.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from services.core.changeover import frames
from services.core.changeover.adoption import Adoption
from services.core.changeover.capacity import MemberCapacity
from services.core.changeover.handover import Handover
from services.core.changeover.leader_moves import LeaderMoves
from services.core.changeover.lost_peers import LostPeers
from services.core.changeover.member_context import MemberContext
from services.core.changeover.orphaned_kv import OrphanedKv
from services.core.changeover.preparation import Preparation
from services.core.changeover.stage_kv import StageKv
from services.core.changeover.vocabulary import RunStage
from services.core.planner.configuration_events import MicrobatchFollowed
from services.core.planner.events import IterationFinished


@dataclass(slots=True)
class FrameHandlers:
    """The frame handlers of a member, with two flags that frames set in a configuration."""

    context: MemberContext
    kv: StageKv
    moves: LeaderMoves
    orphaned_kv: OrphanedKv
    handover: Handover
    adoption: Adoption
    capacity: MemberCapacity
    preparation: Preparation
    lost: LostPeers
    abort: Callable[[str], None]  # ends a sequence that its client has aborted
    drained: bool = False  # the leader has sent `Drained`: it launches no further microbatch
    leader_has_left: bool = False  # the leader has sent `AllAdopted`: no `Adopted` follows

    def enter(self) -> None:
        """Reset at the start of a configuration."""
        self.drained = self.leader_has_left = False

    def receive(self, peer: str, frame: frames.MemberFrame) -> None:
        """Handle a frame now, or defer it until all stages have joined."""
        if not self.adoption.defer_if_joining(peer, frame):
            self.handle(peer, frame)

    def handle(self, peer: str, frame: frames.MemberFrame) -> None:
        """Handle a frame now."""
        _FRAMES[type(frame)](self, peer, frame)

    def _run_microbatch(self, _peer: str, frame: frames.Activations) -> None:
        """Update the block table for a microbatch, and have this stage run it."""
        if self.drained or self.lost.isolation.lost_member:
            # After the loss of a member, an earlier microbatch may be missing even if that member
            # has reconnected, so this microbatch would run on an inconsistent block table.
            return
        chunks = tuple((chunk.seq_id, chunk.blocks) for chunk in frame.chunks)
        self.context.apply(MicrobatchFollowed(frame.released, chunks, frame.prefixes))
        self.kv.forget(frame.released)
        self.kv.claim(seq_id for seq_id, _ in chunks)
        self.context.commands.append(RunStage(frame))

    def _finish_microbatch(self, _peer: str, frame: frames.Samples) -> None:
        if self.lost.isolation.lost_member:
            return  # an earlier microbatch may be missing; all of them run again
        now_s = self.context.now_s
        self.context.apply(IterationFinished(now_s, frame.tokens, frame.number, frame.notes))

    def _adopt(self, peer: str, frame: frames.Adopt) -> None:
        """Adopt a sequence, unless `peer` is unreachable: this member has freed the KV already."""
        if peer not in self.lost.unreachable:
            self.adoption.adopt(peer, frame)

    def _note_drained(self, _peer: str, frame: frames.Drained) -> None:
        """Free the blocks that the drained leader released, and ignore later microbatches."""
        self.context.apply(MicrobatchFollowed(frame.released))
        self.drained = True
        # From stage to stage, so that each stage first applies all microbatches.
        self.context.send_along(frame)

    def _note_all_adopted(self, peer: str, _frame: frames.AllAdopted) -> None:
        """Record that `peer` sends no further `Adopt` and, if it leads, no further `Adopted`."""
        self.adoption.note_all_adopted(peer)
        if peer == self.context.leader:
            self.leader_has_left = True

    def _reserve(self, _peer: str, frame: frames.Reserve) -> None:
        self.capacity.free_and_forward(frame)
        if frame.worker_id == self.context.worker_id:
            self.kv.reserve(self.context.leader, frame)

    def _note_capacity_kept(self, _peer: str, frame: frames.CapacityKept) -> None:
        self.capacity.free_and_forward(frame)
        if frame.worker_id == self.context.worker_id:
            self.preparation.note_capacity_kept(frame.attempt)

    def _note_kv_freed(self, peer: str, frame: frames.KvFreed) -> None:
        if self.context.leads:
            self.moves.note_freed(peer, frame)
        if self.handover.note_freed(peer, frame.seq_id):
            self.lost.resume_or_hand_over(frame.seq_id)


_FRAMES: dict[type[Any], Callable[[FrameHandlers, str, Any], None]] = {
    frames.Activations: FrameHandlers._run_microbatch,
    frames.Samples: FrameHandlers._finish_microbatch,
    frames.Drained: FrameHandlers._note_drained,
    frames.Joined: lambda self, peer, frame: self.adoption.note_joined(peer, frame),
    frames.Capacity: lambda self, peer, frame: self.capacity.note_capacity(peer, frame),
    frames.CapacityKept: FrameHandlers._note_capacity_kept,
    frames.ForeignBlocksFreed: lambda self, peer, frame: self.capacity.note_foreign_freed(
        peer, frame
    ),
    frames.Adopt: FrameHandlers._adopt,
    frames.Adopted: lambda self, peer, frame: self.handover.note_adopted(peer, frame),
    frames.RequestDropped: lambda self, _peer, frame: self.abort(frame.seq_id),
    frames.AllAdopted: FrameHandlers._note_all_adopted,
    frames.AllMoved: lambda self, _peer, frame: self.orphaned_kv.note_all_moved(
        frame, self.lost.unreachable
    ),
    frames.EpochAbandoned: lambda self, peer, _frame: self.lost.note_epoch_abandoned(peer),
    frames.MemberRemoved: lambda self, peer, _frame: self.lost.note_removed(peer),
    frames.Reserve: FrameHandlers._reserve,
    frames.Reserved: lambda self, peer, frame: self.moves.receive(peer, frame),
    frames.SendKv: lambda self, peer, frame: self.kv.send(peer, frame),
    frames.KvEnded: lambda self, peer, frame: self.moves.receive(peer, frame),
    frames.FreeKv: lambda self, peer, frame: self.kv.free(peer, frame),
    frames.KvFreed: FrameHandlers._note_kv_freed,
}
assert _FRAMES.keys() == set(get_args(frames.MemberFrame)), "each frame has a handler"
