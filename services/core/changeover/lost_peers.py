"""What a member does about peers that are lost or have gone on without it.

Two kinds matter: members of the own group, whose loss holds the microbatches up until a change
(`Isolation`), and workers of the newest change that are in other groups, which owe KV or answers.
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
"""After a `MemberRemoved`: the record that the other member followed is on its way here, too."""
UNFINISHED_WAIT_S = 0.3
"""After the loss of a member amid a change: what its group still needs of the others comes sooner.

What it needs of the lost one never comes.
"""
ALONE_WAIT_S = 15.0
"""After the loss of a member: longer than a lease takes to end, and a change-over."""


@dataclass(slots=True)
class Isolation:
    """When a member knows that its group goes on without it, and when it gives its requests up.

    A worker that is cut off from the group records does not see that its group has ended. Its
    former members say `MemberRemoved` as they leave; if it is cut off from them, too, it loses them. Its
    requests go on elsewhere, so it gives them up, but not before the records had time to come.
    `expired`: this configuration is over here; the member waits for another one.
    """

    expired: bool = False
    _removed_s: float | None = None
    _lost_s: float | None = None

    @property
    def lost_member(self) -> bool:
        """Whether a member of the own group was lost: what is in flight does not come back."""
        return self._lost_s is not None

    def cannot_settle(self, now_s: float) -> bool:
        """Whether a change that is not over by now never will be in this configuration."""
        return self._lost_s is not None and now_s - self._lost_s > UNFINISHED_WAIT_S

    @property
    def waiting(self) -> bool:
        """Whether time may decide."""
        return not self.expired and (self._removed_s is not None or self._lost_s is not None)

    def note_removed(self, now_s: float) -> None:
        """A member of the own group has left it for a later configuration."""
        if self._removed_s is None:
            self._removed_s = now_s

    def note_lost(self, now_s: float) -> None:
        """A member of the own group was lost."""
        if self._lost_s is None:
            self._lost_s = now_s

    def expire(self, now_s: float) -> bool:
        """Whether the time has come, for the first time."""
        if not self.waiting:
            return False
        farewell = self._removed_s is not None and now_s - self._removed_s > REMOVED_WAIT_S
        alone = self._lost_s is not None and now_s - self._lost_s > ALONE_WAIT_S
        self.expired = farewell or alone
        return self.expired


class LostPeers:
    """The state of one configuration.

    `lost_workers`: workers of this change that were lost, as far as is known. `unreachable`: those of them that
    are in other groups, or have passed the change over.
    """

    def __init__(
        self,
        context: MemberContext,
        handover: Handover,
        adoption: Adoption,
        moves: LeaderMoves,
        unclaimed: OrphanedKv,
    ) -> None:
        self._context = context
        self._handover = handover
        self._adoption = adoption
        self._moves = moves
        self._orphaned_kv = unclaimed
        self.enter()

    def enter(self) -> None:
        """Begin a configuration."""
        self.isolation = Isolation()
        self.unreachable: frozenset[str] = frozenset()
        self.lost_workers: frozenset[str] = frozenset()

    def note_lost(self, event: PeersLost) -> None:
        """Give up work that only lost workers of other groups could do."""
        self.lost_workers = event.workers
        configuration = self._context.configuration
        if configuration is not None and event.workers & configuration.own.workers:
            self.isolation.note_lost(event.now_s)
        self.give_up_lost()

    def give_up_lost(self) -> None:
        """Leave lost workers, but not while stages join: frames that they sent are deferred."""
        configuration = self._context.configuration
        if configuration is None or self._adoption.waiting:
            return
        back = [
            name
            for worker_id in sorted(
                self.lost_workers - configuration.own.workers - self.unreachable
            )
            for name in self._give_up(worker_id)
        ]
        self._note_division(frozenset(back), configuration)

    def note_epoch_abandoned(self, peer: str) -> None:
        """A worker of this change has passed it over."""
        configuration = self._context.configuration
        if configuration is not None and peer not in configuration.own.workers | self.unreachable:
            self._note_division(frozenset(self._give_up(peer)), configuration)

    def note_removed(self, peer: str) -> None:
        """A member of the own group has gone on without this one."""
        configuration = self._context.configuration
        if configuration is not None and peer in configuration.own.workers:
            self.isolation.note_removed(self._context.now_s)

    def go_on(self, name: str) -> None:
        """Run a request that has come back, or hand it to the leader of now."""
        if self._context.leads:
            self._context.change(SequenceResumed(name))
        else:
            self._handover.send(name, self._context.leader)

    def _note_division(self, back: frozenset[str], configuration: Configuration) -> None:
        """The others may compute some of the requests that come back; their gateways see to it.

        If several are lost and none is left, it is rather this worker that is cut off from them:
        then they count as living.
        """
        if not (back and self._context.leads):
            return
        leaders = configuration.leaders_for(
            {stage.worker_id for stage in self._handover.old_stages}
        )
        others = leaders - {self._context.worker_id}
        living = others - self.lost_workers or (others if len(others) > 1 else frozenset())
        self._context.change(GroupDivided(1 + len(living), back))

    def _give_up(self, worker_id: str) -> list[str]:
        """Stop waiting for a lost worker of another group of this change.

        Its KV is computed again, and requests that it leads now are over. Returns those that come
        back from it.
        """
        self.unreachable |= {worker_id}
        back = self._handover.lose(worker_id, self.unreachable)
        for name in self._handover.forget_stage(worker_id):
            self.go_on(name)
        self._adoption.note_all_adopted(worker_id)
        self._moves.lose(worker_id)
        self._orphaned_kv.release(self.unreachable)
        return back
