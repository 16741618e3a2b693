"""Releases KV that no leader wants after a change: each leader says when it has all that it moves.

Without it, KV whose leader died, or never heard of it, would stay: no other group can tell that it
is not about to be fetched.
"""

from collections.abc import Set

from services.core.changeover.frames import AllMoved, ForeignBlocksFreed
from services.core.changeover.member_context import MemberContext
from services.core.changeover.stage_kv import StageKv


class OrphanedKv:
    """One member's part: as a leader, to say so; as any member, to hear it of all leaders."""

    def __init__(self, context: MemberContext, kv: StageKv) -> None:
        self._context = context
        self._kv = kv
        self._finished_leaders: set[str] = set()  # leaders that have all that they move
        self._announcement_due = False

    @property
    def settled(self) -> bool:
        """Whether this member has nothing left to say, and no KV that may be another group's."""
        return not self._announcement_due and not self._kv.has_unclaimed

    @property
    def leader_is_finished(self) -> bool:
        """Whether the leader of the own group has all that it moves."""
        return self._context.leader in self._finished_leaders

    def enter(self) -> None:
        """Begin the present configuration."""
        self._finished_leaders.clear()
        self._announcement_due = self._context.leads

    def announce(self, lost: Set[str]) -> None:
        """This leader has all its sequences, and their KV; say so once."""
        context, configuration = self._context, self._context.configuration
        if configuration is None or not self._announcement_due:
            return
        self._announcement_due = False
        for peer in sorted(configuration.members - configuration.own.workers - lost):
            context.send(peer, AllMoved(context.worker_id))
        table = context.planner.sequence_table
        context.send_along(AllMoved(context.worker_id, (*table.sequences, *table.released)))
        self._note_finished(context.worker_id, lost)

    def note_all_moved(self, frame: AllMoved, lost: Set[str]) -> None:
        """A leader says so."""
        context = self._context
        if frame.leader == context.leader:
            self._kv.claim(frame.kept)
            context.send_along(frame)
        self._note_finished(frame.leader, lost)

    def release(self, lost: Set[str]) -> None:
        """Release what is unclaimed, if every leader of the change has said so or is lost."""
        context, configuration = self._context, self._context.configuration
        if configuration is None or not configuration.leaders <= self._finished_leaders | lost:
            return
        released = self._kv.release_unclaimed()
        if released and not context.leads:
            context.send(context.leader, ForeignBlocksFreed(released))

    def _note_finished(self, leader: str, lost: Set[str]) -> None:
        self._finished_leaders.add(leader)
        self.release(lost)
