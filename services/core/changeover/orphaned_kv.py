"""Releases orphaned KV after a change: KV that no leader will fetch any more.

KV of the last configuration is *unclaimed* until a leader claims its request. A member cannot know
by itself whether another group is about to fetch it. So every leader announces when all its moves
are finished (`AllMoved`); KV that is still unclaimed after that has no leader. Without this
protocol, KV whose leader died would occupy its blocks for ever.
"""

from collections.abc import Set

from services.core.changeover.frames import AllMoved, ForeignBlocksFreed
from services.core.changeover.member_context import MemberContext
from services.core.changeover.stage_kv import StageKv


class OrphanedKv:
    """A member's part: a leader announces its own finish, every member collects them all."""

    def __init__(self, context: MemberContext, kv: StageKv) -> None:
        self._context = context
        self._kv = kv
        self._finished_leaders: set[str] = set()  # those whose moves of this change are finished
        self._announcement_due = False  # this leader has yet to announce that it is finished

    @property
    def settled(self) -> bool:
        """Whether this member owes no announcement and holds no unclaimed KV."""
        return not self._announcement_due and not self._kv.has_unclaimed

    @property
    def leader_is_finished(self) -> bool:
        """Whether the leader of this member's group has finished its moves."""
        return self._context.leader in self._finished_leaders

    def enter(self) -> None:
        """Reset at the start of a configuration."""
        self._finished_leaders.clear()
        self._announcement_due = self._context.leads

    def announce(self, lost: Set[str]) -> None:
        """Announce, once per configuration, that this leader's moves are finished.

        `lost`: workers to which nothing is sent.
        """
        context, configuration = self._context, self._context.configuration
        if configuration is None or not self._announcement_due:
            return
        self._announcement_due = False
        for peer in sorted(configuration.members - configuration.own.workers - lost):
            context.send(peer, AllMoved(context.worker_id))
        # Stages release what is not in `kept`: it includes sequences whose release is on its way.
        table = context.planner.sequence_table
        context.send_along(AllMoved(context.worker_id, (*table.sequences, *table.released)))
        self._note_finished(context.worker_id, lost)

    def note_all_moved(self, frame: AllMoved, lost: Set[str]) -> None:
        """Record that a leader's moves are finished."""
        context = self._context
        if frame.leader == context.leader:
            self._kv.claim(frame.kept)
            context.send_along(frame)
        self._note_finished(frame.leader, lost)

    def release(self, lost: Set[str]) -> None:
        """Release unclaimed KV once every leader of the change is finished or lost."""
        context, configuration = self._context, self._context.configuration
        if configuration is None or not configuration.leaders <= self._finished_leaders | lost:
            return
        released = self._kv.release_unclaimed()
        if released and not context.leads:
            # The leader's ledger counts these blocks as used since `Joined`.
            context.send(context.leader, ForeignBlocksFreed(released))

    def _note_finished(self, leader: str, lost: Set[str]) -> None:
        self._finished_leaders.add(leader)
        self.release(lost)
