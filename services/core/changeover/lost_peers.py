"""What a member does about peers that are lost or have gone on without it.

Two kinds matter: members of the own group, whose loss holds the microbatches up until a change
(`Desertion`), and workers of the newest change that are in other groups, which owe KV or answers.
"""

from dataclasses import dataclass

from services.core.changeover.configuration import Configuration
from services.core.changeover.handover import Handover
from services.core.changeover.leader_moves import LeaderMoves
from services.core.changeover.member_context import MemberContext
from services.core.changeover.takeover import Takeover
from services.core.changeover.unclaimed import Unclaimed
from services.core.changeover.vocabulary import PeersLost
from services.core.planner.configuration_events import GroupDivided, SequenceResumed

FAREWELL_WAIT_S = 2.0
"""After a `Farewell`: the record that the other member followed is on its way here, too."""
UNFINISHED_WAIT_S = 0.3
"""After the loss of a member amid a change: what its group still needs of the others comes sooner.

What it needs of the lost one never comes.
"""
ALONE_WAIT_S = 15.0
"""After the loss of a member: longer than a lease takes to end, and a change-over."""


@dataclass(slots=True)
class Desertion:
    """When a member knows that its group goes on without it, and when it gives its requests up.

    A worker that is cut off from the group records does not see that its group has ended. Its
    former members say `Farewell` as they leave; if it is cut off from them, too, it loses them. Its
    requests go on elsewhere, so it gives them up, but not before the records had time to come.
    `left`: this configuration is over here; the member waits for another one.
    """

    left: bool = False
    _farewell_s: float | None = None
    _lost_s: float | None = None

    @property
    def lost_member(self) -> bool:
        """Whether a member of the own group was lost: what is in flight does not come back."""
        return self._lost_s is not None

    def ends_no_change(self, now_s: float) -> bool:
        """Whether a change that is not over by now never will be in this configuration."""
        return self._lost_s is not None and now_s - self._lost_s > UNFINISHED_WAIT_S

    @property
    def waiting(self) -> bool:
        """Whether time may decide."""
        return not self.left and (self._farewell_s is not None or self._lost_s is not None)

    def note_farewell(self, now_s: float) -> None:
        """A member of the own group has left it for a later configuration."""
        if self._farewell_s is None:
            self._farewell_s = now_s

    def note_lost(self, now_s: float) -> None:
        """A member of the own group was lost."""
        if self._lost_s is None:
            self._lost_s = now_s

    def leave(self, now_s: float) -> bool:
        """Whether the time has come, for the first time."""
        if not self.waiting:
            return False
        farewell = self._farewell_s is not None and now_s - self._farewell_s > FAREWELL_WAIT_S
        alone = self._lost_s is not None and now_s - self._lost_s > ALONE_WAIT_S
        self.left = farewell or alone
        return self.left


class LostPeers:
    """The state of one configuration.

    `told`: workers of this change that were lost, as far as is known. `left`: those of them that
    are in other groups, or have passed the change over.
    """

    def __init__(
        self,
        context: MemberContext,
        handover: Handover,
        takeover: Takeover,
        moves: LeaderMoves,
        unclaimed: Unclaimed,
    ) -> None:
        self._context = context
        self._handover = handover
        self._takeover = takeover
        self._moves = moves
        self._unclaimed = unclaimed
        self.enter()

    def enter(self) -> None:
        """Begin a configuration."""
        self.desertion = Desertion()
        self.left: frozenset[str] = frozenset()
        self.told: frozenset[str] = frozenset()

    def note_lost(self, event: PeersLost) -> None:
        """Give up work that only lost workers of other groups could do."""
        self.told = event.workers
        configuration = self._context.configuration
        if configuration is not None and event.workers & configuration.own.workers:
            self.desertion.note_lost(event.now_s)
        self.leave_told()

    def leave_told(self) -> None:
        """Leave lost workers, but not while stages join: frames that they sent are deferred."""
        configuration = self._context.configuration
        if configuration is None or self._takeover.waiting:
            return
        back = [
            name
            for worker_id in sorted(self.told - configuration.own.workers - self.left)
            for name in self._leave(worker_id)
        ]
        self._share_out(frozenset(back), configuration)

    def note_passed(self, peer: str) -> None:
        """A worker of this change has passed it over."""
        configuration = self._context.configuration
        if configuration is not None and peer not in configuration.own.workers | self.left:
            self._share_out(frozenset(self._leave(peer)), configuration)

    def note_farewell(self, peer: str) -> None:
        """A member of the own group has gone on without this one."""
        configuration = self._context.configuration
        if configuration is not None and peer in configuration.own.workers:
            self.desertion.note_farewell(self._context.now_s)

    def go_on(self, name: str) -> None:
        """Run a request that has come back, or hand it to the leader of now."""
        if self._context.leads:
            self._context.change(SequenceResumed(name))
        else:
            self._handover.send(name, self._context.leader)

    def _share_out(self, back: frozenset[str], configuration: Configuration) -> None:
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
        living = others - self.told or (others if len(others) > 1 else frozenset())
        self._context.change(GroupDivided(1 + len(living), back))

    def _leave(self, worker_id: str) -> list[str]:
        """Stop waiting for a lost worker of another group of this change.

        Its KV is computed again, and requests that it leads now are over. Returns those that come
        back from it.
        """
        self.left |= {worker_id}
        back = self._handover.lose(worker_id, self.left)
        for name in self._handover.forget_stage(worker_id):
            self.go_on(name)
        self._takeover.note_all_adopted(worker_id)
        self._moves.lose(worker_id)
        self._unclaimed.release(self.left)
        return back
