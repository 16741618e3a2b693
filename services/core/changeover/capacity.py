"""Block capacities of a group's members: reports to the leader, and its answers.

The answers carry the ids of released requests, since the leader's ledger counts their blocks as
free before the stages have freed them.
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
        self._asked: dict[str, Capacity] = {}  # reports that wait for `CapacityKept`, by member

    @property
    def is_awaited(self) -> bool:
        """Whether a member waits for `CapacityKept`."""
        return bool(self._asked)

    def enter(self) -> None:
        """Reset at the start of a configuration."""
        self._asked.clear()

    def note(self, peer: str, frame: Capacity) -> None:
        """Record the blocks of a member, and its request for `CapacityKept`, if any."""
        index = self._stage_of(peer)
        if not index:
            return
        self._context.change(CapacityReported(index, frame.blocks))
        asked = self._asked.get(peer)
        if frame.attempt:
            self._asked[peer] = frame
        elif asked is not None and frame.blocks > asked.blocks:
            del self._asked[peer]  # its capacity rose again: it has aborted the preparation

    def note_foreign_freed(self, peer: str, frame: ForeignBlocksFreed) -> None:
        """Add blocks that a member freed for other leaders' requests to the ledger."""
        self._context.change(BlocksCredited(self._stage_of(peer), frame.blocks))

    def answer(self) -> None:
        """Answer the members whose block use has fallen to their announced limit; every turn."""
        ledger = self._context.planner.sequence_table.ledger
        for peer, asked in list(self._asked.items()):
            stage = self._stage_of(peer)
            # Preempt batch work first: without it, the use might not fall for a long time.
            self._context.change(BatchYielded(stage, asked.blocks))
            if ledger.used_at(stage) <= asked.blocks:
                del self._asked[peer]
                kept = CapacityKept(peer, asked.attempt, self._kv.take_released())
                self._context.send_along(kept)

    def pass_on(self, frame: Reserve | CapacityKept) -> None:
        """Free the blocks of `released` requests, and forward the frame to the next stage."""
        if frame.released:
            # Before the frame takes effect: the leader has given their blocks to other requests.
            self._context.change(MicrobatchFollowed(frame.released))
            self._kv.forget(frame.released)
        if not self._context.leads:
            self._context.send_along(frame)

    def _stage_of(self, worker_id: str) -> int:
        configuration = self._context.configuration
        assert configuration is not None
        return configuration.stage_of(worker_id)
