"""Failure handling: lost peers, and groups that continue without this member.

Two kinds of peers matter: members of this member's group, whose loss stalls the pipeline until the
next change (`Isolation`), and workers of the newest change in other groups, which owe it KV or
answers (`LostPeers`).
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
"""Wait after a `MemberRemoved`: the group record that its sender followed may be late here."""
UNFINISHED_WAIT_S = 0.3
"""Wait after losing a member during a change. The remaining members' frames arrive within it; those
of the lost member never arrive, so a change that has not settled by then will not settle."""
ALONE_WAIT_S = 15.0
"""Wait after losing a member: longer than a lease takes to expire plus a change-over."""


@dataclass(slots=True)
class Isolation:
    """Detects that this member is isolated: its group continues without it.

    A worker that is partitioned from the group records does not see that its group was replaced.
    Former members send `MemberRemoved` as they leave; if it is partitioned from them as well, it
    loses their connections. Its requests continue elsewhere, so it must abort them, but only after
    the records had time to arrive.
    """

    expired: bool = False  # the wait is over: this configuration has ended here
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
        """Note that a member of this group has entered a configuration without this member."""
        if self._removed_s is None:
            self._removed_s = now_s

    def note_lost(self, now_s: float) -> None:
        """Note the loss of a member of this group."""
        if self._lost_s is None:
            self._lost_s = now_s

    def expire(self, now_s: float) -> bool:
        """Whether the timeout expires now; True once."""
        if not self.waiting:
            return False
        farewell = self._removed_s is not None and now_s - self._removed_s > REMOVED_WAIT_S
        alone = self._lost_s is not None and now_s - self._lost_s > ALONE_WAIT_S
        self.expired = farewell or alone
        return self.expired


class LostPeers:
    """Lost peers of a configuration."""

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
        # Workers of other groups that were lost or abandoned the epoch: nothing is expected of them
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

        Deferred while stages join: frames that these workers sent before are deferred, too.
        """
        configuration = self._context.configuration
        if configuration is None or self._adoption.waiting:
            return
        back = [
            seq_id
            for worker_id in sorted(
                self.lost_workers - configuration.own.workers - self.unreachable
            )
            for seq_id in self._give_up(worker_id)
        ]
        self._note_division(frozenset(back), configuration)

    def note_epoch_abandoned(self, peer: str) -> None:
        """Stop waiting for a worker that abandoned this epoch."""
        configuration = self._context.configuration
        if configuration is not None and peer not in configuration.own.workers | self.unreachable:
            self._note_division(frozenset(self._give_up(peer)), configuration)

    def note_removed(self, peer: str) -> None:
        """Note that a member of this group continues without this worker."""
        configuration = self._context.configuration
        if configuration is not None and peer in configuration.own.workers:
            self.isolation.note_removed(self._context.now_s)

    def go_on(self, seq_id: str) -> None:
        """Resume a returned request here, or hand it to the present leader."""
        if self._context.leads:
            self._context.change(SequenceResumed(seq_id))
        else:
            self._handover.send(seq_id, self._context.leader)

    def _note_division(self, back: frozenset[str], configuration: Configuration) -> None:
        """Note in the planner that other leaders may recompute some of the returned requests.

        Their gateways retry them at any leader of the former group.
        """
        if not (back and self._context.leads):
            return
        leaders = configuration.leaders_for(
            {stage.worker_id for stage in self._handover.old_stages}
        )
        others = leaders - {self._context.worker_id}
        # If all of several others are lost, probably this worker is partitioned: count them as
        # alive.
        living = others - self.lost_workers or (others if len(others) > 1 else frozenset())
        self._context.change(GroupDivided(1 + len(living), back))

    def _give_up(self, worker_id: str) -> list[str]:
        """Stop waiting for a lost worker of another group of this change.

        KV that it owes is recomputed. Returns the sequences that it had not adopted, which return
        to this member.
        """
        self.unreachable |= {worker_id}
        back = self._handover.lose(worker_id, self.unreachable)
        for seq_id in self._handover.forget_stage(worker_id):
            self.go_on(seq_id)
        self._adoption.note_all_adopted(worker_id)
        self._moves.lose(worker_id)
        self._orphaned_kv.release(self.unreachable)
        return back
