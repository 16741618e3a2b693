"""Block capacities in a group: members report them (`Capacity`), the leader answers.

A member that prepares to restore layers announces a lower capacity. The leader preempts batch work
and, once block use at that member is low enough, answers with `CapacityKept`. This answer carries
the ids of released sequences, because the leader's ledger counts their blocks as free before the
stages have freed them.
"""

from services.core.changeover.frames import Capacity, CapacityKept, ForeignBlocksFreed, Reserve
from services.core.changeover.member_context import MemberContext
from services.core.changeover.stage_kv import StageKv
from services.core.planner.configuration_events import (
    BatchYielded,
    BlocksCredited,
    CapacityReported,
    MicrobatchFollowed,
)


class MemberCapacity:
    """The capacity protocol at a member, as a leader and as a stage."""

    def __init__(self, context: MemberContext, kv: StageKv) -> None:
        self._context = context
        self._kv = kv
        self._awaiting_kept: dict[str, Capacity] = {}  # members that wait for `CapacityKept`

    @property
    def is_awaited(self) -> bool:
        """Whether a member waits for `CapacityKept` from this leader."""
        return bool(self._awaiting_kept)

    def enter(self) -> None:
        """Reset at the start of a configuration."""
        self._awaiting_kept.clear()

    def note_capacity(self, peer: str, frame: Capacity) -> None:
        """Record the capacity of a member, and that it waits for `CapacityKept`, if so."""
        index = self._stage_of(peer)
        if not index:
            return  # the leader knows its own capacity
        self._context.apply(CapacityReported(index, frame.blocks))
        announced = self._awaiting_kept.get(peer)
        if frame.attempt:
            self._awaiting_kept[peer] = frame
        elif announced is not None and frame.blocks > announced.blocks:
            del self._awaiting_kept[peer]  # a higher capacity: the member aborted its preparation

    def note_foreign_freed(self, peer: str, frame: ForeignBlocksFreed) -> None:
        """Return blocks to the ledger: a member freed them, no sequence here counts them."""
        self._context.apply(BlocksCredited(self._stage_of(peer), frame.blocks))

    def answer_waiting(self) -> None:
        """Send `CapacityKept` to members whose block use is low enough; called in every turn."""
        ledger = self._context.planner.sequence_table.ledger
        for peer, announced in list(self._awaiting_kept.items()):
            stage = self._stage_of(peer)
            # Preempt batch work: otherwise block use might not fall for a long time.
            self._context.apply(BatchYielded(stage, announced.blocks))
            if ledger.used_at(stage) <= announced.blocks:
                del self._awaiting_kept[peer]
                kept = CapacityKept(peer, announced.attempt, self._kv.take_released())
                self._context.send_along(kept)

    def free_and_forward(self, frame: Reserve | CapacityKept) -> None:
        """Free the blocks of `released` sequences, and forward the frame to the next stage."""
        if frame.released:
            # Before the frame takes effect, because the leader counts these blocks as free.
            self._context.apply(MicrobatchFollowed(frame.released))
            self._kv.forget(frame.released)
        if not self._context.leads:
            self._context.send_along(frame)

    def _stage_of(self, worker_id: str) -> int:
        configuration = self._context.configuration
        assert configuration is not None
        return configuration.stage_of(worker_id)
