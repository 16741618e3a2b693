"""A simulated cluster that runs the real group protocol while everything else fails at random.

Real: the coordinators' `CoordinatorState`, the members' `MemberState`. Modelled: a store with
compare and swap, engines that hold layers, a network that loses, delays and repeats. Two
coordinators, of which one may be a zombie; workers crash, lose their leases and restart; the store
may restart with an old copy of its data, or empty. After every step I1-I4 hold; once the faults
stop, all groups become stable (I9), and no change remains in progress.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from services.core.groups.coordinator import (
    ChangeCalledOff,
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
from services.core.groups.fence import (
    AbortCall,
    AbortPreparation,
    Apply,
    MemberState,
    PrepareCall,
    Verdict,
    prepare_calls,
)
from services.core.groups.layer_map import Stage
from services.core.groups.state import ProtocolConfig
from services.core.groups.vocabulary import (
    AbortMember,
    ClusterListed,
    EngineHung,
    Group,
    GroupPhase,
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
from tests.support.group_removals import MEMBERS, CarelessState
from tests.support.group_store import FakeStore, Violated

LAYERS = 4
ALL = frozenset(range(LAYERS))
NAMES = ("w0", "w1", "w2")


@dataclass
class Process:
    """A worker process: its fence, and an engine that holds layers."""

    name: str
    incarnation: str
    state: MemberState
    held: set[int] = field(default_factory=lambda: set(ALL))
    staged: dict[str, set[int]] = field(default_factory=dict)
    executing: frozenset[int] = frozenset()
    ready: dict[str, MemberAnswered] = field(default_factory=dict)
    coordinator: dict[str, int | None] = field(default_factory=dict)

    @property
    def copies(self) -> set[int]:
        """Layers in its memory: those it runs, and those it is prepared to run."""
        return self.held.union(*(self.staged[attempt] for attempt in self.ready))

    def carry_out(self, action: AbortPreparation | Apply) -> None:
        if isinstance(action, AbortPreparation):
            self.staged.pop(action.attempt, None)
            self.ready.pop(action.attempt, None)
            return
        mine = next(member for member in action.group.members if member.worker_id == self.name)
        if mine.incarnation != self.incarnation:
            raise Violated(f"I4: {self.name} acts for incarnation {mine.incarnation}")
        self.held |= self.staged.get(action.attempt or action.superseded or "", set())
        self.staged.clear()
        self.ready.clear()
        layers = frozenset(range(mine.first_layer, mine.end_layer))
        if action.group.phase is GroupPhase.STABLE:
            self.held &= layers
            self.executing = layers
        else:
            self.executing = frozenset()
        if not layers <= self.held:
            raise Violated(f"I1: {self.name} at {action.group.epoch} lacks {layers - self.held}")


@dataclass
class World:
    """Call `step` many times, then `settle`; both raise Violated."""

    seed: int
    removed: frozenset[str] = frozenset()
    crashes_left: int = 1
    losses_left: int = 0
    now_s: float = 0.0
    committed: int = 0

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        self.store = FakeStore(self.removed, LAYERS)
        config = ProtocolConfig(
            prepare_timeout_s=6.0,
            backoff_s=0.2,
            backoff_max_s=1.0,
            gone_after_s=0.1,
            absent_wait_s=0.5,
        )
        self.bounds = CoordinatorConfig(config, running_max=2, attempt_margin_s=4.0)
        self.states = [CoordinatorState(self.bounds), CoordinatorState(self.bounds)]
        self.known_rollbacks = [0, 0]  # by each coordinator
        self.backup: dict[str, object] | None = None
        self.logs: list[list[tuple[Event, list[Command]]]] = [[], []]  # formatted by the driver
        if "attempt" in self.removed:
            for state in self.states:
                state._groups = CarelessState(config)
        self.tokens = [self.store.elect(), 0]
        self.processes: dict[str, Process] = {}
        self.crashed = False
        # Coordinator, member ("" for answers), message. None: the coordinator restarted.
        self.mail: list[tuple[int | None, str, object]] = []
        self.transactions: list[tuple[int, Transact, bool]] = []
        self.looks: list[tuple[int, PollMembers]] = []
        self.listings: list[ClusterListed] = []
        self.incarnations = 0
        self.requests = 0
        for name in NAMES:
            self._start(name)

    # --- single steps

    def step(self) -> None:
        """Run a random step, then check the invariants."""
        actions = (
            [self._list] * 4
            + [self._pass_time]
            + [self._transact] * 5
            + [self._deliver] * 8
            + [self._observe] * 4
            + [self._prepare] * 3
            + [self._ask] * 2
            + [self._notice, self._lease, self._look, self._report_trouble, self._report_hung]
        )
        self.rng.choice(actions)()
        if self.rng.random() < 0.005:
            self._take_over()
        if self.rng.random() < 0.002:
            self._crash()
        if self.losses_left and self.rng.random() < 0.02:
            self._back_up_or_lose()
        self.check()

    def settle(self) -> None:
        """Run without faults until all groups are stable."""
        self.mail.clear()
        for name in NAMES:
            self._start(name, even_if_alive=False)
        self.tokens = [0, self.store.elect()]
        for _ in range(60):
            self._settle_for_a_second()
            self.check()
        self._check_stable()
        self._check_changeable()
        if not self.removed:
            self._check_logs()

    def _settle_for_a_second(self) -> None:
        self.now_s += 1.0
        for name in NAMES:
            self._keep_registered(name)
        for index in range(2):
            self._note_rollback(index)
            self._feed(index, LeadershipChanged(self.now_s, self.tokens[index] or None))
            self._feed(index, self.store.listing(self.now_s))
            self._feed(index, TimePassed(self.now_s))
        while self.transactions:
            self._transact(faulty=False)
        for process in self.processes.values():
            self._see(process, tuple(self.store.groups.values()))
        for _ in range(len(self.looks)):
            self._look(faulty=False)
        while self.mail:
            self._deliver(faulty=False)
            for process in self.processes.values():
                self._fetch(process, from_disk=True)

    def check(self) -> None:
        """Raise Violated unless I1 and I2 hold, and no state contradicts itself."""
        for process in self.processes.values():
            if not process.executing <= process.held:
                raise Violated(f"I1: {process.name} lacks {process.executing - process.held}")
            if not self.removed:
                process.state.check_invariants()
        held = set().union(*(process.copies for process in self.processes.values()))
        if not self.crashed and held != ALL:
            raise Violated(f"I2: no worker holds {ALL - held}")
        if not self.removed:
            for state in self.states:
                state.check_invariants()

    def _check_logs(self) -> None:
        """Check that all changes have ended, and that a replay makes the same decisions."""
        if self.looks:
            raise Violated(f"I9: {self.looks} are not over")
        for state, log in zip(self.states, self.logs, strict=True):
            again = CoordinatorState(state.config)
            for event, commands in log:
                if again.handle(event) != commands:
                    raise Violated(f"a replay decides otherwise after {event}")

    def _check_stable(self) -> None:
        for name in NAMES:
            process, stored = self.processes[name], self.store.assignments[name]
            place = stored.assignment
            group = self.store.groups[place.group_id].group
            if group.phase is not GroupPhase.STABLE or group.attempt:
                raise Violated(f"I9: {group} is not at rest")
            if name not in {member.worker_id for member in group.members}:
                raise Violated(f"I9: {name} is assigned to {group}, which lacks it")
            if (process.state.group_id, process.state.epoch) != (place.group_id, place.epoch):
                raise Violated(f"I9: {name} has not followed to {place}")
            if place.incarnation != process.incarnation or not process.executing:
                raise Violated(f"I9: {name} does not serve")

    def _check_changeable(self) -> None:
        before = self.committed
        is_merged = any(
            len(entry.group.members) == len(NAMES) for entry in self.store.groups.values()
        )
        targets = tuple(_evenly([name]) for name in NAMES) if is_merged else (_evenly(NAMES),)
        self._feed(1, ChangeRequested(self.now_s, "last", targets))
        for _ in range(10):
            self._settle_for_a_second()
            self.check()
        if self.committed == before:
            raise Violated("I9: the groups cannot change any more")
        self._check_stable()

    # --- coordinators

    def _feed(self, index: int, event: Event) -> None:
        commands = self.states[index].handle(event)
        if commands or not isinstance(event, TimePassed):
            self.logs[index].append((event, commands))
        for command in commands:
            match command:
                case Transact():
                    self.transactions.append((index, command, False))
                case PrepareMembers():
                    for name, asked in prepare_calls(command).items():
                        self.mail.append((index, name, asked))
                case AbortMember():
                    asked = AbortCall(command.token, command.attempt, command.incarnation)
                    self.mail.append((index, command.worker_id, asked))
                case PollMembers():
                    self.looks.append((index, command))
                case ChangeStepped():
                    self.committed += command.phase is ChangePhase.COMMITTED
        if not self.removed:
            self.states[index].check_invariants()

    def _list(self) -> None:
        self.listings = [*self.listings[-4:], self.store.listing(self.now_s)]
        late = self.rng.random() < 0.3
        listed = self.rng.choice(self.listings) if late else self.listings[-1]
        index = self.rng.randrange(2)
        self._note_rollback(index)
        self._feed(index, replace(listed, now_s=self.now_s))

    def _look(self, faulty: bool = True) -> None:
        """Report to a coordinator what members serve; reports of some may be missing."""
        if not self.looks:
            return
        at = self.rng.randrange(len(self.looks)) if faulty else 0
        index, command = self.looks.pop(at)
        known = [self.processes[name] for name in command.worker_ids if name in self.processes]
        seen = tuple(
            MemberStatus(process.name, process.state.epoch, not faulty or self.rng.random() < 0.7)
            for process in known
            if not faulty or self.rng.random() < 0.9
        )
        self._feed(index, MembersPolled(self.now_s, command.change_id, seen))

    def _pass_time(self) -> None:
        self.now_s += self.rng.random() * 0.6
        self._feed(self.rng.randrange(2), TimePassed(self.now_s))

    def _take_over(self) -> None:
        """Elect the other coordinator; the former leader does not know yet."""
        leads = self.tokens.index(self.store.token)
        self.tokens[1 - leads] = self.store.elect()
        self._feed(1 - leads, LeadershipChanged(self.now_s, self.store.token))

    def _notice(self) -> None:
        for index in range(2):
            token = self.store.token if self.tokens[index] == self.store.token else None
            if self.rng.random() < 0.3:
                self._feed(index, LeadershipChanged(self.now_s, token))

    def _ask(self) -> None:
        self.requests += 1
        request_id = f"r{self.requests}"
        leads = self.tokens.index(self.store.token)
        index = leads if self.rng.random() < 0.8 else 1 - leads
        targets = self._some_targets()
        self._feed(index, ChangeRequested(self.now_s, request_id, targets))
        if self.rng.random() < 0.1:
            self._feed(index, ChangeCalledOff(self.now_s, targets, "not wanted"))

    def _report_trouble(self) -> None:
        """A member reports its group as stuck, possibly wrongly or late."""
        if not self.processes or self.rng.random() < 0.7:
            return
        process = self.rng.choice(sorted(self.processes.values(), key=lambda process: process.name))
        epoch = process.state.epoch - (self.rng.random() < 0.2)
        incarnation = process.state.incarnation
        report = GroupStuck(self.now_s, process.name, incarnation, epoch, "the lane is cut")
        self._feed(self.rng.randrange(2), report)

    def _report_hung(self) -> None:
        """A worker reports its engine as hung or running, possibly wrongly."""
        if not self.processes or self.rng.random() < 0.5:
            return
        process = self.rng.choice(sorted(self.processes.values(), key=lambda process: process.name))
        still = self.rng.random() < 0.3
        report = EngineHung(self.now_s, process.name, process.state.incarnation, still)
        self._feed(self.rng.randrange(2), report)

    def _some_targets(self) -> Targets:
        live = [group.group.members for group in self.store.groups.values() if group.group.members]
        chosen = self.rng.sample(live, self.rng.randrange(1, len(live) + 1)) if live else []
        names = [member.worker_id for members in chosen for member in members] or list(NAMES)
        self.rng.shuffle(names)
        cut = self.rng.randrange(1, len(names) + 1) if len(names) > 2 else len(names)
        parts = [part for part in (names[:cut], names[cut:]) if part]
        if self.rng.random() < 0.3 and len(names) > len(chosen):
            parts = [[name] for name in names]
        return tuple(_evenly(part) for part in parts)

    def _transact(self, faulty: bool = True) -> None:
        if not self.transactions:
            return
        index, command, answered = self.transactions.pop(
            self.rng.randrange(len(self.transactions)) if faulty else 0
        )
        fate = self.rng.random() if faulty else 0.0
        if fate < 0.88 or answered:
            revision = self.store.transact(command)
        elif fate < 0.94:  # committed, but the reply is lost
            self.store.transact(command)
            revision = None
        else:  # perhaps later
            self.transactions.append((index, command, True))
            revision = None
        if not answered:
            finished = TransactionFinished(self.now_s, command.transaction_id, revision)
            self._feed(index, finished)
            if revision is None and not faulty:
                self._note_rollback(index)
                self._feed(index, self.store.listing(self.now_s))

    def _deliver(self, faulty: bool = True) -> None:
        if not self.mail:
            return
        index = self.rng.randrange(len(self.mail)) if faulty else 0
        coordinator, name, message = self.mail[index]
        if not faulty or self.rng.random() < 0.7 or len(self.mail) > 60:
            del self.mail[index]
        if faulty and self.rng.random() < 0.05:
            return
        if isinstance(message, MemberAnswered):
            assert coordinator is not None
            self._feed(coordinator, replace(message, now_s=self.now_s))
        elif name in self.processes:
            self._receive(coordinator, self.processes[name], message)

    # --- members

    def _receive(self, coordinator: int | None, process: Process, message: object) -> None:
        if isinstance(message, AbortCall):
            over = process.state.abort(message)
            if over is not None:
                process.carry_out(over)
            return
        assert isinstance(message, PrepareCall)
        answer = process.state.judge(message)
        if answer.verdict is Verdict.ACCEPTED:
            process.coordinator[message.attempt] = coordinator
            if "free_after_commit" in self.removed:
                process.held &= _layers(process, message.target)
            if "fetch_before_ack" in self.removed:
                process.staged[message.attempt] = set()
                self._acknowledge(process, message)
        elif answer.verdict is Verdict.REPLAYED:
            if message.attempt in process.ready and coordinator is not None:
                self.mail.append((coordinator, "", process.ready[message.attempt]))
        elif answer.verdict is Verdict.FUTURE and self.rng.random() < 0.9:
            self.mail.append(
                (coordinator, process.name, message)
            )  # the member waits for the records
        else:
            self._answer(coordinator, process, message.attempt, False, answer.reason)

    def _prepare(self) -> None:
        """An engine continues or fails its preparation."""
        process = self._any_process()
        asked = process.state.preparing if process is not None else None
        if process is None or asked is None or asked.attempt in process.ready:
            return
        if self.rng.random() < 0.04:
            over = process.state.abort_own(asked.attempt)
            assert over is not None
            process.carry_out(over)
            self._answer(
                process.coordinator[asked.attempt], process, asked.attempt, False, "no room"
            )
        else:
            self._fetch(process, from_disk=not process.executing)

    def _fetch(self, process: Process, from_disk: bool) -> None:
        asked = process.state.preparing
        if asked is None or asked.attempt in process.ready:
            return
        missing = _layers(process, asked.target) - process.held
        others = [other.held for other in self.processes.values() if other is not process]
        if missing <= set().union(*others) or from_disk:
            process.staged[asked.attempt] = set(missing)
            self._acknowledge(process, asked)

    def _acknowledge(self, process: Process, asked: PrepareCall) -> None:
        coordinator = process.coordinator[asked.attempt]
        self._answer(coordinator, process, asked.attempt, True, "")
        process.ready[asked.attempt] = MemberAnswered(
            self.now_s, asked.attempt, process.name, process.incarnation, True
        )

    def _answer(
        self, coordinator: int | None, process: Process, attempt: str, ready: bool, reason: str
    ) -> None:
        if coordinator is None:
            return  # the requesting coordinator has restarted
        answer = MemberAnswered(
            self.now_s, attempt, process.name, process.incarnation, ready, reason
        )
        self.mail.append((coordinator, "", answer))

    def _observe(self) -> None:
        process = self._any_process()
        if process is None:
            return
        late = self.rng.random() < 0.3 and self.listings
        groups = (
            self.rng.choice(self.listings).groups if late else tuple(self.store.groups.values())
        )
        self._see(process, groups)

    def _see(self, process: Process, groups: tuple[StoredGroup, ...]) -> None:
        before = process.state.epoch
        for action in process.state.observe(groups, self.store.rollbacks):
            process.carry_out(action)
        if process.state.epoch < before:
            raise Violated(f"I3: {process.name} went back to epoch {process.state.epoch}")

    def _any_process(self) -> Process | None:
        alive = list(self.processes.values())
        return self.rng.choice(alive) if alive else None

    # --- faults

    def _start(self, name: str, even_if_alive: bool = True) -> None:
        if name in self.processes and not even_if_alive:
            return
        self.incarnations += 1
        incarnation = f"{name}-{self.incarnations}"
        kind = MEMBERS.get(next(iter(self.removed & MEMBERS.keys()), ""), MemberState)
        self.processes[name] = Process(name, incarnation, kind(name, incarnation))
        self.store.register(name, incarnation)

    def _crash(self) -> None:
        """Kill a process; its record stays until the lease expires."""
        if self.crashes_left and self.processes:
            self.crashes_left -= 1
            self.crashed = True
            del self.processes[self.rng.choice(sorted(self.processes))]

    def _lease(self) -> None:
        """Expire a lease, of a dead or a live process, or let a worker register again."""
        name = self.rng.choice(NAMES)
        process = self.processes.get(name)
        if process is None:
            if self.rng.random() < 0.5:
                if name in self.store.workers:
                    self.store.expire(name)
            else:
                self._start(name)
        elif name in self.store.workers and self.rng.random() < 0.05:
            self.store.expire(name)
        else:
            self._keep_registered(name)

    def _keep_registered(self, name: str) -> None:
        """Register a process if needed; a removed member of a group restarts."""
        process = self.processes[name]
        if name in self.store.workers and not self._is_registered(process):
            self.store.expire(name)  # of a predecessor, restored from a backup
        may_register = "known" in self.removed or self._may_register(process)
        if not may_register:
            self.crashed = True
            self._start(name)
        elif not self._is_registered(process):
            self.store.register(name, process.incarnation)

    def _is_registered(self, process: Process) -> bool:
        worker = self.store.workers.get(process.name)
        return worker is not None and worker.incarnation == process.incarnation

    def _may_register(self, process: Process) -> bool:
        before = self.store.revision
        may_register = self.store.may_register(process.state, "restored" not in self.removed)
        if not self.removed and not self.store.rollbacks and self.store.revision != before:
            raise Violated(f"{process.name} wrote an assignment that was not lost")
        return may_register

    def _back_up_or_lose(self) -> None:
        """Back up the store, or lose its writes."""
        if self.rng.random() < 0.5:
            self.backup = self.store.data()
            return
        self.losses_left -= 1
        self.lose()

    def lose(self) -> None:
        """Restore the store's backup, or an empty store."""
        self.store.lose(self.backup if self.rng.random() < 0.7 else None)
        self.listings.clear()
        # Leases expire, so another coordinator may lead.
        self.tokens = [0, 0]
        self.tokens[self.rng.randrange(2)] = self.store.elect()

    def _note_rollback(self, index: int) -> None:
        """Restart a coordinator whose writes the store has lost."""
        if self.known_rollbacks[index] == self.store.rollbacks:
            return
        self.known_rollbacks[index] = self.store.rollbacks
        self.states[index] = CoordinatorState(self.bounds)
        self.logs[index] = []
        self.transactions = [
            (sender, command, answered or sender == index)
            for sender, command, answered in self.transactions
        ]
        self.looks = [look for look in self.looks if look[0] != index]
        # Its calls may still arrive; their answers are dropped.
        self.mail = [
            (None if sender == index else sender, name, message)
            for sender, name, message in self.mail
            if name or sender != index
        ]
        for process in self.processes.values():
            process.coordinator = {
                attempt: None if asker == index else asker
                for attempt, asker in process.coordinator.items()
            }
        if self.tokens[index]:
            self._feed(index, LeadershipChanged(self.now_s, self.tokens[index]))


def _layers(process: Process, group: Group) -> frozenset[int]:
    for member in group.members:
        if member.worker_id == process.name:
            return frozenset(range(member.first_layer, member.end_layer))
    return frozenset()


def _evenly(names: Sequence[str]) -> tuple[Stage, ...]:
    """A pipeline of these workers, with nearly equal numbers of layers."""
    bounds = [LAYERS * index // len(names) for index in range(len(names) + 1)]
    return tuple(
        Stage(name, first, end) for name, first, end in zip(names, bounds, bounds[1:], strict=False)
    )
