"""Releases orphaned KV at a member after a change of groups: KV that no leader will fetch any more.

KV of the last configuration is *unclaimed* until a frame of this group's leader shows that it leads
the sequence, or another leader frees it. A member cannot know whether the leader of another group
is about to fetch that KV. So every leader announces when all its moves of KV are finished
(`AllMoved`). KV that is unclaimed after the announcements of all leaders has no leader. Without
this protocol, KV whose leader died would occupy its blocks for ever.
"""

from collections.abc import Set

from services.core.changeover.frames import AllMoved, ForeignBlocksFreed
from services.core.changeover.member_context import MemberContext
from services.core.changeover.stage_kv import StageKv


class OrphanedKv:
    """A member's part: every member collects the announcements, and a leader sends its own."""

    def __init__(self, context: MemberContext, kv: StageKv) -> None:
        self._context = context
        self._kv = kv
        self._finished_leaders: set[str] = set()  # leaders that have announced `AllMoved`
        self._announcement_due = False  # this leader has yet to announce that it is finished

    @property
    def settled(self) -> bool:
        """Whether this member has sent its announcement, if any, and holds no unclaimed KV."""
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

        `lost`: workers to which no frame is sent.
        """
        context, configuration = self._context, self._context.configuration
        if configuration is None or not self._announcement_due:
            return
        self._announcement_due = False
        for peer in sorted(configuration.members - configuration.own.workers - lost):
            context.send(peer, AllMoved(context.worker_id))
        # Stages free the KV of sequences that are not in `kept`. It includes released sequences,
        # whose ids reach the stages with a later frame.
        table = context.planner.sequence_table
        context.send_along(AllMoved(context.worker_id, (*table.sequences, *table.released)))
        self._note_finished(context.worker_id, lost)

    def note_all_moved(self, frame: AllMoved, lost: Set[str]) -> None:
        """Record a leader's announcement; forward it if it is the leader of this group."""
        context = self._context
        if frame.leader == context.leader:
            self._kv.claim(frame.kept)
            context.send_along(frame)
        self._note_finished(frame.leader, lost)

    def release(self, lost: Set[str]) -> None:
        """Free unclaimed KV if every leader of the change is finished or lost."""
        context, configuration = self._context, self._context.configuration
        if configuration is None or not configuration.leaders <= self._finished_leaders | lost:
            return
        released = self._kv.release_unclaimed()
        if released and not context.leads:
            # `Joined` reported these blocks as used, so the leader's ledger must be corrected.
            context.send(context.leader, ForeignBlocksFreed(released))

    def _note_finished(self, leader: str, lost: Set[str]) -> None:
        self._finished_leaders.add(leader)
        self.release(lost)
