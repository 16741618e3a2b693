"""Lane failures between the processes of a `JoinedWorld`, at any point of a change."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from services.core.changeover.state import MemberPhase
from services.worker.engine.pipeline.member import Member
from tests.support.joined_control import LEASE_S
from tests.support.joined_worker import WorkerProcess

if TYPE_CHECKING:
    from tests.support.joined_world import JoinedWorld

SILENCE_S = 5.0
"""Silence after which a peer or a worker counts as lost."""
LONG_S = 150.0
"""Duration of a partition from the store, longer than any request may stall."""
ARRIVAL_S = 0.1
"""How long before a lease expires the last requests arrive."""
EXTRA_REQUESTS = 12
PREPARING = "preparing"
MOMENTS = (PREPARING, *MemberPhase)


def moment_of(member: Member) -> str:
    """A member's phase of a change; a preparing member counts as serving."""
    if member.settled and member.busy_changing:
        return PREPARING
    return member.changeover.phase


@dataclass(frozen=True)
class Hanging:
    """A plan for a member to close lanes, to one peer or to all, in a phase of a change."""

    moment: str
    activations: bool
    bulk: bool
    all_peers: bool


class LaneFaults:
    """Lane faults as methods; `look` triggers those that wait for a phase."""

    def __init__(self, world: "JoinedWorld") -> None:
        self._world = world
        self._hanging: Hanging | None = None
        self._separated = False

    def cut_lanes(self) -> None:
        """Break the lanes between two workers, one of which may notice late."""
        world = self._world
        if len(world.processes) > 1:
            self._break(sorted(world.processes))

    def _break(self, names: list[str]) -> None:
        world = self._world
        first, other = world.rng.sample(names, 2)
        notified = world.rng.choice([(first,), (first, other)])
        world.note(f"the lanes of {first} and {other} break, {notified} notice")
        world.network.part(first, other, notified)
        notice = partial(world.network.notify_break, first, other)
        world.later(world.rng.uniform(0.0, SILENCE_S), notice)

    def hang_up(self) -> None:
        """Have the first member that reaches a random phase of a change close lanes itself.

        Only its peers get an event.
        """
        self._await(MOMENTS)
        self._world.change()

    def hang_up_amid(self) -> None:
        """Split a group under load, and have a member close lanes while requests change owner."""
        world = self._world
        self._await((MemberPhase.ADOPTING, MemberPhase.MIGRATING))
        world.requests_max += EXTRA_REQUESTS
        world.split()
        for _ in range(EXTRA_REQUESTS):
            world.arrive()
            world.pass_until(world.now_s + ARRIVAL_S)

    def _await(self, moments: Sequence[str]) -> None:
        world = self._world
        activations, bulk = world.rng.choice([(True, True), (True, False), (False, True)])
        all_peers = world.rng.random() < 0.5
        self._hanging = Hanging(world.rng.choice(moments), activations, bulk, all_peers)

    def look(self) -> None:
        """Close lanes of members that have reached the planned phase."""
        hanging, world = self._hanging, self._world
        if hanging is None or not world.faulty:
            return
        there = [
            process
            for _, process in sorted(world.processes.items())
            if not process.stands and moment_of(process.engine.member) == hanging.moment
        ]
        if there and len(world.processes) > 1:
            self._hanging = None
            self._hang(world.rng.choice(there), hanging)

    def _hang(self, process: WorkerProcess, hanging: Hanging) -> None:
        world, member = self._world, process.engine.member
        others = sorted(world.processes.keys() - {process.name})
        peers = others if hanging.all_peers else [world.rng.choice(others)]
        world.note(f"{process.name} ends lanes to {peers}: {hanging}")
        for peer in peers:
            if hanging.activations:
                member.links.lane.disconnect(peer)
            if hanging.bulk:
                process.engine.bulk.disconnect(peer)

    def separate(self) -> None:
        """Separate two workers of a group permanently; others reach both of them."""
        world = self._world
        leaders = [
            process for _, process in sorted(world.processes.items()) if self._leads_others(process)
        ]
        if not leaders or self._separated:
            return
        self._separated = True
        workers = self._own_workers(world.rng.choice(leaders))
        first, other = world.rng.sample(sorted(workers), 2)
        world.note(f"nothing gets across between {first} and {other} any more")
        world.network.separate(first, other)

    def isolate(self) -> None:
        """Partition a leader from the store for long, and break a lane of its group.

        The lane breaks as the lease expires, with requests just before. Afterwards no operator
        requests changes, as after `Lives.blind`.
        """
        world = self._world
        leaders = [
            process for _, process in sorted(world.processes.items()) if self._leads_others(process)
        ]
        if not leaders:
            return
        leader = world.rng.choice(leaders)
        world.changes = False
        world.lives.cut_off(leader, LONG_S)
        lost_s = world.now_s + LEASE_S
        world.pass_until(lost_s - ARRIVAL_S)
        world.arrive()
        world.pass_until(lost_s + world.rng.uniform(-ARRIVAL_S / 2, ARRIVAL_S / 2))
        workers = self._own_workers(leader)
        if len(workers) > 2 and world.rng.random() < 0.5:
            workers.discard(leader.name)  # no one reports the break to it
        if len(workers) > 1:
            self._break(sorted(workers))

    def _leads_others(self, process: WorkerProcess) -> bool:
        leads = process.place is not None and process.place.leads and not process.stands
        return leads and len(self._own_workers(process)) > 1

    def _own_workers(self, process: WorkerProcess) -> set[str]:
        """The running members of its group."""
        configuration = process.engine.member.configuration
        own = configuration.own.workers if configuration is not None else ()
        return set(own) & self._world.processes.keys()
