"""The control plane of a `JoinedWorld`: coordinators, their store, and messages to workers.

Real: `CoordinatorState` and the encoded requests to members. Modelled, with delays: the store,
elections and reports. While the world is `faulty`, messages and answers are also lost.
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
    """A memory manager. `heard`: the newest report of each worker, with its process."""

    state: CoordinatorState = field(default_factory=lambda: CoordinatorState(CoordinatorConfig()))
    alive: bool = True
    heard: dict[str, tuple[str, EngineReport]] = field(default_factory=dict)


class ControlPlane:
    """Two coordinators, of which at least one believes that it leads."""

    def __init__(self, world: "JoinedWorld", groups: type[GroupState], troubles: bool) -> None:
        """Without `troubles`, reports of stuck groups are lost. `groups` decides on attempts."""
        self.store = FakeStore(num_layers=world.layers)
        self.committed = 0
        self.silent_until_s = 0.0  # revision of the store
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
        """Whether no group is changing, and all members serve their configuration."""
        groups = [stored.group for stored in self.store.groups.values()]
        epochs = {m.worker_id: group.epoch for group in groups for m in group.members}
        return not any(group.attempt for group in groups) and all(
            process.engine.member.settled and process.engine.member.links.epoch == epochs.get(name)
            for name, process in self._world.processes.items()
        )

    # --- elections

    def take_over(self, zombie: bool) -> None:
        """Elect another coordinator; the former leader is dead, or does not know yet."""
        former, world = self.leader, self._world
        if former is None:
            return
        other = next(coordinator for coordinator in self.coordinators if coordinator is not former)
        if zombie:
            self._elect(other)
            world.later(world.rng.uniform(0.1, 4.0), partial(self._resign, former))
            return
        former.alive, self.leader = False, None
        self.coordinators = [self._made(), other]
        world.later(world.rng.uniform(0.5, LEASE_S), partial(self._elect, other))

    def _elect(self, coordinator: Coordinator) -> None:
        self.leader = coordinator
        token = self.store.elect()
        self._feed(coordinator, LeadershipChanged(self._world.now_s, token))
        self.send_listing(coordinator)

    def _resign(self, coordinator: Coordinator) -> None:
        if coordinator is not self.leader:
            self._feed(coordinator, LeadershipChanged(self._world.now_s, None))

    # --- the store

    def write(self, change: Callable[[], None]) -> None:
        """Write to the store; readers learn of it later."""
        change()
        self.send_listings()

    def send_listings(self) -> None:
        """Send the store's current content to all readers, with random delays."""
        for coordinator in self.coordinators:
            self.send_listing(coordinator)
        for process in self._world.processes.values():
            self.send_groups(process)

    def send_listing(self, coordinator: Coordinator) -> None:
        """Send the current listing to a coordinator, with a random delay."""
        listed = self.store.listing(0.0)
        self._world.later(self._world.delay_s(), partial(self._listed, coordinator, listed))

    def send_groups(self, process: WorkerProcess) -> None:
        """Send the current group records to a worker, with a random delay."""
        seen = partial(self._seen, process, self.store.revision, tuple(self.store.groups.values()))
        self._world.later(self._world.delay_s(), seen)

    def _listed(self, coordinator: Coordinator, listed: ClusterListed) -> None:
        world = self._world
        if world.now_s < self.silent_until_s:
            world.later(
                self.silent_until_s - world.now_s, partial(self._listed, coordinator, listed)
            )
        else:
            self._feed(coordinator, replace(listed, now_s=world.now_s))

    def _seen(self, process: WorkerProcess, revision: int, groups: tuple[StoredGroup, ...]) -> None:
        world = self._world
        until_s = max(process.stands_until_s, process.blind_until_s, self.silent_until_s)
        if world.processes.get(process.name) is not process:
            return
        if world.now_s < until_s:
            world.later(until_s - world.now_s, partial(self._seen, process, revision, groups))
        elif revision > process.revision:  # a watch delivers in order
            process.revision = revision
            process.see(groups)

    def _transact(self, coordinator: Coordinator, command: Transact) -> None:
        """Run a transaction; its reply may be lost, or it may be applied after a timeout."""
        world = self._world
        if world.now_s < self.silent_until_s:
            wait_s = self.silent_until_s - world.now_s
            world.later(wait_s, partial(self._transact, coordinator, command))
            return
        fate = world.rng.random() if world.faulty else 1.0
        revision = None
        if fate < 0.03:
            world.later(world.delay_s(), partial(self._apply, command))
        else:
            revision = self._apply(command)
        if fate < 0.06:
            revision = None
        self._feed(coordinator, TransactionFinished(world.now_s, command.transaction_id, revision))
        if revision is None:
            self.send_listing(coordinator)

    def _apply(self, command: Transact) -> int | None:
        revision = self.store.transact(command)
        if revision is not None:
            for group in command.groups:
                self._world.note(f"{group}")
            self.send_listings()
        return revision

    # --- coordinators

    def ask(self, targets: Targets) -> None:
        """Request a change as an operator."""
        if self.leader is not None:
            self._asked += 1
            name = f"change-{self._asked}"
            self._feed(self.leader, ChangeRequested(self._world.now_s, name, targets, urgent=True))

    def report(self, process: WorkerProcess) -> None:
        """A worker reports to the leader."""
        if self.leader is not None:
            heard = partial(self._report, self.leader, process.name, process.incarnation)
            self._world.mail(partial(heard, process.report))

    def _report(
        self, coordinator: Coordinator, name: str, incarnation: str, report: EngineReport
    ) -> None:
        worker = coordinator.state.records.workers.get(name)
        if not coordinator.alive or worker is None or worker.incarnation != incarnation:
            return
        coordinator.heard[name] = (incarnation, report)
        if report.trouble and self._troubles:
            now_s = self._world.now_s
            self._feed(
                coordinator, GroupStuck(now_s, name, incarnation, report.epoch, report.trouble)
            )

    def _tick(self) -> None:
        for coordinator in self.coordinators:
            self._feed(coordinator, TimePassed(self._world.now_s))
        self._world.later(TICK_S, self._tick)

    def _feed(self, coordinator: Coordinator, event: Event) -> None:
        if not coordinator.alive:
            return
        for command in coordinator.state.handle(event):
            self._carry_out(coordinator, command)
        coordinator.state.check_invariants()

    def _carry_out(self, coordinator: Coordinator, command: Command) -> None:
        world = self._world
        match command:
            case Transact():
                world.later(world.delay_s(), partial(self._transact, coordinator, command))
            case PrepareMembers():
                self._prepare(coordinator, command)
            case AbortMember(worker_id=name, incarnation=incarnation):
                asked = AbortCall(command.token, command.attempt, incarnation)
                world.mail(partial(self._abort, name, asked))
            case PollMembers(after_s=after_s):
                world.later(after_s, partial(self._look, coordinator, command))
            case ChangeStepped(phase=phase):
                world.note(f"{command.change_id} is {phase}: {command.message}")
                self.committed += phase is ChangePhase.COMMITTED

    def _look(self, coordinator: Coordinator, command: PollMembers) -> None:
        seen = tuple(
            MemberStatus(
                name, coordinator.heard[name][1].epoch, not coordinator.heard[name][1].unsettled
            )
            for name in command.worker_ids
            if name in coordinator.heard
        )
        self._feed(coordinator, MembersPolled(self._world.now_s, command.change_id, seen))

    def _prepare(self, coordinator: Coordinator, command: PrepareMembers) -> None:
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
            asked = partial(self._call, coordinator, name, request, deadline_s)
            world.mail(asked, partial(asked, lost=True))
            if world.faulty and world.rng.random() < 0.05:
                world.mail(asked)

    def _call(
        self,
        coordinator: Coordinator,
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
                    coordinator,
                    MemberAnswered(world.now_s, request.attempt, name, incarnation, ready, reason),
                )

        def answer(ready: bool, reason: str) -> None:
            assert process is not None
            answered = partial(hear, process.incarnation, ready, reason)
            world.mail(answered, partial(hear, process.incarnation, False, "the call broke"))

        if lost or process is None:
            hear(request.incarnation, False, "unavailable")
        elif process.stands:
            wait_s = process.stands_until_s - world.now_s
            world.later(wait_s, partial(self._call, coordinator, name, request, deadline_s))
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
