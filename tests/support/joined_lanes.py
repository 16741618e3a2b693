"""What goes wrong between the processes of a `JoinedWorld`: their lanes, at any point of a change."""

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
"""After it, a peer or a worker that says nothing counts as lost."""
LONG_S = 150.0
"""A cut from the store that lasts longer than any request may stand still."""
ARRIVAL_S = 0.1
"""How long before the end of a lease the last requests come."""
PREPARING = "preparing"
MOMENTS = (PREPARING, *MemberPhase)


def moment_of(member: Member) -> str:
    """Where in a change a member is; one that only prepares serves on."""
    if member.settled and member.busy_changing:
        return PREPARING
    return member.changeover.phase


@dataclass(frozen=True)
class Hanging:
    """A member is to end lanes once it is at this moment of a change: to one peer, or to all."""

    moment: str
    activations: bool
    bulk: bool
    all_peers: bool


class LaneFaults:
    """The faults are methods; `look` carries out those that wait for a moment."""

    def __init__(self, world: "JoinedWorld") -> None:
        self._world = world
        self._hanging: Hanging | None = None
        self._separated = False

    def cut_lanes(self) -> None:
        """The lanes between two break; one of them may notice it late."""
        world = self._world
        if len(world.processes) > 1:
            self._break(sorted(world.processes))

    def _break(self, names: list[str]) -> None:
        world = self._world
        one, other = world.rng.sample(names, 2)
        tell = world.rng.choice([(one,), (one, other)])
        world.note(f"the lanes of {one} and {other} break, {tell} notice")
        world.network.part(one, other, tell)
        notice = partial(world.network.tell_untold, one, other)
        world.later(world.rng.uniform(0.0, SILENCE_S), notice)

    def hang_up(self) -> None:
        """At some moment of a change, the first member that is there ends lanes itself.

        Only its peers get an event of that.
        """
        world = self._world
        activations, bulk = world.rng.choice([(True, True), (True, False), (False, True)])
        all_peers = world.rng.random() < 0.5
        self._hanging = Hanging(world.rng.choice(MOMENTS), activations, bulk, all_peers)
        world.change()

    def look(self) -> None:
        """Have a member hang up if the moment has come."""
        hanging, world = self._hanging, self._world
        if hanging is None or not world.faulty:
            return
        there = [
            one
            for _, one in sorted(world.processes.items())
            if not one.stands and moment_of(one.engine.member) == hanging.moment
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
        """Two workers never connect again; others reach both of them."""
        world = self._world
        if len(world.processes) < 2 or self._separated:
            return
        self._separated = True
        one, other = world.rng.sample(sorted(world.processes), 2)
        world.note(f"nothing gets across between {one} and {other} any more")
        world.network.separate(one, other)

    def isolate(self) -> None:
        """A leader is cut off from the store for long, and a lane of its group breaks.

        That happens as its lease ends, and requests have come right before. From then on nobody
        asks for a change, as after `Lives.blind`.
        """
        world = self._world
        leaders = [
            one
            for _, one in sorted(world.processes.items())
            if one.place is not None and one.place.leads and not one.stands
        ]
        if not leaders or not world.control.rests:
            return
        leader = world.rng.choice(leaders)
        configuration = leader.engine.member.configuration
        assert configuration is not None
        workers = sorted(configuration.own.workers & world.processes.keys())
        if len(workers) < 2:
            return
        world.changes = False
        world.lives.cut_off(leader, LONG_S)
        lost_s = world.now_s + LEASE_S
        self._pass_until(lost_s - ARRIVAL_S)
        world.arrive()
        self._pass_until(lost_s + world.rng.uniform(-ARRIVAL_S / 2, ARRIVAL_S / 2))
        self._break(workers)

    def _pass_until(self, until_s: float) -> None:
        while self._world.now_s < until_s:
            self._world.turn()
