"""A member's handling of lost peers, and of a group that continues without this member.

There are two kinds of peers: members of the same group, whose loss stalls the pipeline until the
next change (`Isolation`), and workers of other groups of the newest change, from which this member
awaits KV or answers (`LostPeers`). A peer is lost once its connections are; it may be alive.
"""

from dataclasses import dataclass

from services.core.changeover.adoption import Adoption
from services.core.changeover.configuration import Configuration
from services.core.changeover.handover import Handover
from services.core.changeover.leader_moves import LeaderMoves
from services.core.changeover.member_context import MemberContext
from services.core.changeover.orphaned_kv import OrphanedKv
from services.core.changeover.vocabulary import PeersLost
from services.core.planner.configuration_events import GroupDivided, SequenceResumed

REMOVED_WAIT_S = 2.0
"""Wait after a `MemberRemoved`: the group record with the new configuration may arrive later."""
UNFINISHED_WAIT_S = 0.3
"""Wait after the loss of a member during a change. Frames that the other members have sent arrive
within this time, so a change that has not settled by then waits for the lost member, in vain."""
ALONE_WAIT_S = 15.0
"""Wait after the loss of a member: longer than the expiry of a lease plus a change-over, so that a
repair of the group would have arrived here."""


@dataclass(slots=True)
class Isolation:
    """Detects that this member is isolated: its group continues without it.

    A worker that cannot read the group records does not learn that its group was replaced. Its
    former members send it `MemberRemoved`; if they cannot reach it either, it loses their
    connections. Its requests are retried elsewhere, so it must abort them, but only after the
    records had time to arrive.
    """

    expired: bool = False  # isolated: the wait is over without a new configuration
    _removed_s: float | None = None  # time of the first `MemberRemoved`
    _lost_s: float | None = None  # time of the first loss of a member of the group

    @property
    def lost_member(self) -> bool:
        """Whether a member of this group was lost; microbatches in flight will not return."""
        return self._lost_s is not None

    def cannot_settle(self, now_s: float) -> bool:
        """Whether an unsettled change can no longer settle in this configuration."""
        return self._lost_s is not None and now_s - self._lost_s > UNFINISHED_WAIT_S

    @property
    def waiting(self) -> bool:
        """Whether a timeout is running."""
        return not self.expired and (self._removed_s is not None or self._lost_s is not None)

    def note_removed(self, now_s: float) -> None:
        """Record that a member of this group has switched to one without this member."""
        if self._removed_s is None:
            self._removed_s = now_s

    def note_lost(self, now_s: float) -> None:
        """Record the loss of a member of this group."""
        if self._lost_s is None:
            self._lost_s = now_s

    def expire(self, now_s: float) -> bool:
        """Set `expired` if a timeout is over; returns True only for the call that sets it."""
        if not self.waiting:
            return False
        is_removed = self._removed_s is not None and now_s - self._removed_s > REMOVED_WAIT_S
        is_alone = self._lost_s is not None and now_s - self._lost_s > ALONE_WAIT_S
        self.expired = is_removed or is_alone
        return self.expired


class LostPeers:
    """The lost peers of a member in a configuration; stops all waiting for them."""

    def __init__(
        self,
        context: MemberContext,
        handover: Handover,
        adoption: Adoption,
        moves: LeaderMoves,
        orphaned_kv: OrphanedKv,
    ) -> None:
        self._context = context
        self._handover = handover
        self._adoption = adoption
        self._moves = moves
        self._orphaned_kv = orphaned_kv
        self.enter()

    def enter(self) -> None:
        """Reset at the start of a configuration."""
        self.isolation = Isolation()
        # Workers of other groups that were lost or abandoned the epoch: this member awaits no
        # frame or KV of theirs.
        self.unreachable: frozenset[str] = frozenset()
        self.lost_workers: frozenset[str] = frozenset()  # of this change, as reported

    def note_lost(self, event: PeersLost) -> None:
        """Record lost workers, and stop waiting for those of other groups."""
        self.lost_workers = event.workers
        configuration = self._context.configuration
        if configuration is not None and event.workers & configuration.own.workers:
            self.isolation.note_lost(event.now_s)
        self.give_up_lost()

    def give_up_lost(self) -> None:
        """Stop waiting for lost workers of other groups.

        Does nothing while this leader waits for its stages to join: frames that these workers sent
        before are still deferred. `Changeover` calls it again after that.
        """
        configuration = self._context.configuration
        if configuration is None or self._adoption.waiting:
            return
        returned = [
            seq_id
            for worker_id in sorted(
                self.lost_workers - configuration.own.workers - self.unreachable
            )
            for seq_id in self._give_up(worker_id)
        ]
        self._note_division(frozenset(returned), configuration)

    def note_epoch_abandoned(self, peer: str) -> None:
        """Stop waiting for a worker that abandoned this epoch."""
        configuration = self._context.configuration
        if configuration is not None and peer not in configuration.own.workers | self.unreachable:
            self._note_division(frozenset(self._give_up(peer)), configuration)

    def note_removed(self, peer: str) -> None:
        """Record that `peer` continues without this worker, if it is in the same group."""
        configuration = self._context.configuration
        if configuration is not None and peer in configuration.own.workers:
            self.isolation.note_removed(self._context.now_s)

    def resume_or_hand_over(self, seq_id: str) -> None:
        """Resume a returned sequence here, or hand it to the present leader."""
        if self._context.leads:
            self._context.apply(SequenceResumed(seq_id))
        else:
            self._handover.send(seq_id, self._context.leader)

    def _note_division(self, returned: frozenset[str], configuration: Configuration) -> None:
        """Notify the planner that gateways may retry the `returned` sequences elsewhere.

        A gateway may retry at any leader of the former group, so these leaders share the load.
        """
        if not (returned and self._context.leads):
            return
        leaders = configuration.leaders_for(
            {stage.worker_id for stage in self._handover.old_stages}
        )
        others = leaders - {self._context.worker_id}
        # If two or more others are all lost, this worker is probably partitioned: count them as
        # alive.
        living = others - self.lost_workers or (others if len(others) > 1 else frozenset())
        self._context.apply(GroupDivided(1 + len(living), returned))

    def _give_up(self, worker_id: str) -> list[str]:
        """Stop waiting for a lost worker of another group of this change.

        Sequences that await its KV are recomputed. Returns the sequences whose adoption it had not
        confirmed, which return to this member.
        """
        self.unreachable |= {worker_id}
        returned = self._handover.lose(worker_id, self.unreachable)
        for seq_id in self._handover.forget_stage(worker_id):
            self.resume_or_hand_over(seq_id)
        self._adoption.note_all_adopted(worker_id)
        self._moves.lose(worker_id)
        self._orphaned_kv.release(self.unreachable)
        return returned
