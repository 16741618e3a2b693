"""Capacities of the members of a group: what they tell the leader, and what it answers.

Names of released requests travel with the answers: the leader counts on those blocks.
"""

from services.core.changeover.frames import Capacity, CapacityKept, Credit, Reserve
from services.core.changeover.member_context import MemberContext
from services.core.changeover.stage_kv import StageKv
from services.core.planner.configuration_events import (
    BatchYielded,
    BlocksCredited,
    CapacityReported,
    MicrobatchFollowed,
)


class MemberCapacity:
    """One member's part, as a leader and as a stage."""

    def __init__(self, context: MemberContext, kv: StageKv) -> None:
        self._context = context
        self._kv = kv
        self._asked: dict[str, Capacity] = {}

    @property
    def asked(self) -> bool:
        """Whether a member waits for an answer."""
        return bool(self._asked)

    def enter(self) -> None:
        """Begin a configuration."""
        self._asked.clear()

    def note(self, peer: str, frame: Capacity) -> None:
        """A member reports its blocks; it may ask for an answer when no more are in use."""
        index = self._stage_of(peer)
        if not index:
            return
        self._context.change(CapacityReported(index, frame.blocks))
        asked = self._asked.get(peer)
        if frame.attempt:
            self._asked[peer] = frame
        elif asked is not None and frame.blocks > asked.blocks:
            del self._asked[peer]  # it has aborted that preparation

    def credit(self, peer: str, frame: Credit) -> None:
        """A member has freed blocks of other leaders' requests."""
        self._context.change(BlocksCredited(self._stage_of(peer), frame.blocks))

    def answer(self) -> None:
        """Answer members that wait until few enough of their blocks are in use; in each turn."""
        ledger = self._context.planner.sequence_table.ledger
        for peer, asked in list(self._asked.items()):
            stage = self._stage_of(peer)
            self._context.change(BatchYielded(stage, asked.blocks))
            if ledger.used_at(stage) <= asked.blocks:
                del self._asked[peer]
                kept = CapacityKept(peer, asked.attempt, self._kv.take_released())
                self._context.send_along(kept)

    def pass_on(self, frame: Reserve | CapacityKept) -> None:
        """Release the named requests, and pass the names on to the next stages."""
        if frame.released:
            self._context.change(MicrobatchFollowed(frame.released))
            self._kv.forget(frame.released)
        if not self._context.leads:
            self._context.send_along(frame)

    def _stage_of(self, worker_id: str) -> int:
        configuration = self._context.configuration
        assert configuration is not None
        return configuration.stage_of(worker_id)
