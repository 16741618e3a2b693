"""The control plane of a `JoinedWorld`: coordinators, their store, and the mail to the workers.

Real: `CoordinatorState`, the requests to members as they go over the wire. The store, elections and
reports are modelled, with delays; while the world is `faulty` mail and answers are lost as well.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from services.core.groups.coordinator import (
    ChangePhase,
    ChangeRequested,
    ChangeStepped,
    Command,
    CoordinatorConfig,
    CoordinatorState,
    Event,
    MembersPolled,
    MemberStatus,
    PollMembers,
)
from services.core.groups.fence import AbortCall
from services.core.groups.state import GroupState
from services.core.groups.vocabulary import (
    AbortMember,
    ClusterListed,
    GroupStuck,
    LeadershipChanged,
    MemberAnswered,
    PrepareMembers,
    StoredGroup,
    Targets,
    TimePassed,
    Transact,
    TransactionFinished,
)
from services.core.report import EngineReport
from services.memmgr.driver import TICK_S
from services.memmgr.member_client import requests_for
from services.memmgr.translate_record import WorkerEndpoint
from services.worker.member.servicer import to_preparation, to_prepare_call
from tests.support.group_store import FakeStore
from tests.support.joined_worker import Call, WorkerProcess
from tideserve.worker.v1 import worker_pb2

if TYPE_CHECKING:
    from tests.support.joined_world import JoinedWorld

LEASE_S = 10.0
REPORT_S = 1.0


@dataclass(eq=False)
class Coordinator:
    """One memory manager. `heard`: the newest report of each worker, and of which process."""

    state: CoordinatorState = field(default_factory=lambda: CoordinatorState(CoordinatorConfig()))
    alive: bool = True
    heard: dict[str, tuple[str, EngineReport]] = field(default_factory=dict)


class ControlPlane:
    """Two coordinators, of which one leads, or believes so."""

    def __init__(self, world: "JoinedWorld", groups: type[GroupState], troubles: bool) -> None:
        """Without `troubles` what workers say of those is lost. `groups` decides on attempts."""
        self.store = FakeStore(num_layers=world.layers)
        self.committed = 0
        self.silent_until_s = 0.0  # the store, for everybody
        self._world = world
        self._groups = groups
        self._troubles = troubles
        self._asked = 0
        self.coordinators = [self._made(), self._made()]
        self.leader: Coordinator | None = None
        self._elect(self.coordinators[0])
        self._tick()

    def _made(self) -> Coordinator:
        made = Coordinator()
        made.state._groups = self._groups(made.state.config.protocol)
        return made

    @property
    def rests(self) -> bool:
        """Whether no group is about to change, and all members have followed."""
        groups = [stored.group for stored in self.store.groups.values()]
        epochs = {m.worker_id: one.epoch for one in groups for m in one.members}
        return not any(one.attempt for one in groups) and all(
            one.engine.member.settled and one.engine.member.links.epoch == epochs.get(name)
            for name, one in self._world.processes.items()
        )

    # --- elections

    def take_over(self, zombie: bool) -> None:
        """Another one leads; the former leader is dead, or does not know yet."""
        former, world = self.leader, self._world
        if former is None:
            return
        other = next(one for one in self.coordinators if one is not former)
        if zombie:
            self._elect(other)
            world.later(world.rng.uniform(0.1, 4.0), partial(self._resign, former))
            return
        former.alive, self.leader = False, None
        self.coordinators = [self._made(), other]
        world.later(world.rng.uniform(0.5, LEASE_S), partial(self._elect, other))

    def _elect(self, one: Coordinator) -> None:
        self.leader = one
        token = self.store.elect()
        self._feed(one, LeadershipChanged(self._world.now_s, token))
        self.tell(one)

    def _resign(self, one: Coordinator) -> None:
        if one is not self.leader:
            self._feed(one, LeadershipChanged(self._world.now_s, None))

    # --- the store

    def write(self, change: Callable[[], None]) -> None:
        """Somebody writes to the store; readers hear of it later."""
        change()
        self.tell_all()

    def tell_all(self) -> None:
        """Readers of the store get what it has now, each in its time."""
        for one in self.coordinators:
            self.tell(one)
        for process in self._world.processes.values():
            self.tell_worker(process)

    def tell(self, one: Coordinator) -> None:
        """A coordinator gets the listing of now, in a while."""
        listed = self.store.listing(0.0)
        self._world.later(self._world.delay_s(), partial(self._listed, one, listed))

    def tell_worker(self, process: WorkerProcess) -> None:
        """A worker gets the group records of now, in a while."""
        seen = partial(self._seen, process, self.store.revision, tuple(self.store.groups.values()))
        self._world.later(self._world.delay_s(), seen)

    def _listed(self, one: Coordinator, listed: ClusterListed) -> None:
        world = self._world
        if world.now_s < self.silent_until_s:
            world.later(self.silent_until_s - world.now_s, partial(self._listed, one, listed))
        else:
            self._feed(one, replace(listed, now_s=world.now_s))

    def _seen(self, process: WorkerProcess, revision: int, groups: tuple[StoredGroup, ...]) -> None:
        world = self._world
        until_s = max(process.stands_until_s, process.blind_until_s, self.silent_until_s)
        if world.processes.get(process.name) is not process:
            return
        if world.now_s < until_s:
            world.later(until_s - world.now_s, partial(self._seen, process, revision, groups))
        elif revision > process.revision:  # a watch tells in order
            process.revision = revision
            process.see(groups)

    def _transact(self, one: Coordinator, command: Transact) -> None:
        """It may be applied and nobody hears of it, or nobody knows, and it is applied later."""
        world = self._world
        if world.now_s < self.silent_until_s:
            wait_s = self.silent_until_s - world.now_s
            world.later(wait_s, partial(self._transact, one, command))
            return
        fate = world.rng.random() if world.faulty else 1.0
        revision = None
        if fate < 0.03:
            world.later(world.delay_s(), partial(self._apply, command))
        else:
            revision = self._apply(command)
        if fate < 0.06:
            revision = None
        self._feed(one, TransactionFinished(world.now_s, command.transaction_id, revision))
        if revision is None:
            self.tell(one)

    def _apply(self, command: Transact) -> int | None:
        revision = self.store.transact(command)
        if revision is not None:
            for group in command.groups:
                self._world.note(f"{group}")
            self.tell_all()
        return revision

    # --- coordinators

    def ask(self, targets: Targets) -> None:
        """An operator asks for a change."""
        if self.leader is not None:
            self._asked += 1
            name = f"change-{self._asked}"
            self._feed(self.leader, ChangeRequested(self._world.now_s, name, targets, urgent=True))

    def report(self, process: WorkerProcess) -> None:
        """A worker reports to the leader."""
        if self.leader is not None:
            heard = partial(self._report, self.leader, process.name, process.incarnation)
            self._world.mail(partial(heard, process.report))

    def _report(self, one: Coordinator, name: str, incarnation: str, report: EngineReport) -> None:
        worker = one.state.records.workers.get(name)
        if not one.alive or worker is None or worker.incarnation != incarnation:
            return
        one.heard[name] = (incarnation, report)
        if report.trouble and self._troubles:
            now_s = self._world.now_s
            self._feed(one, GroupStuck(now_s, name, incarnation, report.epoch, report.trouble))

    def _tick(self) -> None:
        for one in self.coordinators:
            self._feed(one, TimePassed(self._world.now_s))
        self._world.later(TICK_S, self._tick)

    def _feed(self, one: Coordinator, event: Event) -> None:
        if not one.alive:
            return
        for command in one.state.handle(event):
            self._carry_out(one, command)
        one.state.check_invariants()

    def _carry_out(self, one: Coordinator, command: Command) -> None:
        world = self._world
        match command:
            case Transact():
                world.later(world.delay_s(), partial(self._transact, one, command))
            case PrepareMembers():
                self._prepare(one, command)
            case AbortMember(worker_id=name, incarnation=incarnation):
                asked = AbortCall(command.token, command.attempt, incarnation)
                world.mail(partial(self._abort, name, asked))
            case PollMembers(after_s=after_s):
                world.later(after_s, partial(self._look, one, command))
            case ChangeStepped(phase=phase):
                world.note(f"{command.change_id} is {phase}: {command.message}")
                self.committed += phase is ChangePhase.COMMITTED

    def _look(self, one: Coordinator, command: PollMembers) -> None:
        seen = tuple(
            MemberStatus(name, one.heard[name][1].epoch, not one.heard[name][1].unsettled)
            for name in command.worker_ids
            if name in one.heard
        )
        self._feed(one, MembersPolled(self._world.now_s, command.change_id, seen))

    def _prepare(self, one: Coordinator, command: PrepareMembers) -> None:
        world = self._world
        world.note(f"attempt {command.attempt} asks {[t.members for t in command.targets]}")
        names = [member.worker_id for source in command.sources for member in source.group.members]
        names += [other.worker_id for other in (*command.holders, *command.survivors)]
        endpoints = {name: WorkerEndpoint(name, f"local:{name}", f"local:{name}") for name in names}
        deadline_s = world.now_s + command.timeout_s
        prepares, introductions = requests_for(command, endpoints)
        for name, introduction in introductions.items():
            world.mail(partial(self._introduce, name, introduction))
        for name, request in prepares.items():
            asked = partial(self._call, one, name, request, deadline_s)
            world.mail(asked, partial(asked, lost=True))
            if world.faulty and world.rng.random() < 0.05:
                world.mail(asked)

    def _call(
        self,
        one: Coordinator,
        name: str,
        request: worker_pb2.PrepareRequest,
        deadline_s: float,
        lost: bool = False,
    ) -> None:
        world = self._world
        process = world.processes.get(name)
        asked = to_prepare_call(request)

        def hear(incarnation: str, ready: bool, reason: str) -> None:
            if world.now_s <= deadline_s:
                self._feed(
                    one,
                    MemberAnswered(world.now_s, request.attempt, name, incarnation, ready, reason),
                )

        def answer(ready: bool, reason: str) -> None:
            assert process is not None
            told = partial(hear, process.incarnation, ready, reason)
            world.mail(told, partial(hear, process.incarnation, False, "the call broke"))

        if lost or process is None:
            hear(request.incarnation, False, "unavailable")
        elif process.stands:
            wait_s = process.stands_until_s - world.now_s
            world.later(wait_s, partial(self._call, one, name, request, deadline_s))
        elif world.now_s <= deadline_s:
            change = to_preparation(asked, request, deadline_s - world.now_s)
            process.ask(Call(asked, change, deadline_s, answer))

    def _introduce(self, name: str, request: worker_pb2.IntroduceRequest) -> None:
        process = self._world.processes.get(name)
        if process is not None and not process.stands:
            process.introduce(request)

    def _abort(self, name: str, asked: AbortCall) -> None:
        process = self._world.processes.get(name)
        if process is not None and not process.stands:
            process.abort(asked)
