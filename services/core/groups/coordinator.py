"""The coordinator's state machine: tracks each change of groups until its members have settled.

Theory of operation. A *change* replaces groups by *target* groups of the same workers (a merge or a
split). The inner `GroupState` tries a change in an *attempt*: it marks the records, has the members
prepare, and commits or aborts. `CoordinatorState` adds the queue before the attempt and tracks the
members after the commit, until they serve the new groups and have *settled* (moved all KV). Every
commit has an *epoch*, a number that increases. A driver passes every event to `handle`, executes
every command in order, and returns the outcomes as events. The memory manager's driver writes to
etcd and calls members; the simulator's driver writes to a table and schedules delays.

Phases of a change:
QUEUED     waits, since `running_max` changes run; urgent (manual) changes skip the queue.
BLOCKED    another write to its records is in flight; the attempt is repeated every
           `poll_interval_s`, for at most `blocked_max_s`.
PREPARING  the attempt runs. If it aborts or is cancelled, the change has FAILED, and the requester
           decides whether to retry.
COMMITTED  the new groups are in force; waits until all members report the epoch or a later epoch.
           After `change_over_timeout_s` the change counts as FAILED, although the commit stands.
STABLE     all members serve the new groups. The change no longer counts towards `running_max`, and
           is tracked until its members have settled.
SETTLED    all members have settled.
LEFT       tracking ended after `change_over_timeout_s`; some members have not settled yet.

Attempts that the protocol starts itself (such as survivors of a lost member that restore their
layers) are tracked as changes under the attempt's id, from the Prepare on.

The state machine has no clock: `PollMembers` schedules the driver's next report of the members'
epochs, and `TimePassed` lets deadlines expire.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from services.core.groups.attempt import Attempt
from services.core.groups.layer_map import Stage
from services.core.groups.records import Records
from services.core.groups.state import GroupState, ProtocolConfig
from services.core.groups.vocabulary import (
    AbortMember,
    PrepareMembers,
    ReconfigurationCommitted,
    ReconfigurationFailed,
    Reconfigure,
    ReconfigureCalledOff,
    Targets,
    TimePassed,
    Transact,
)
from services.core.groups.vocabulary import Event as GroupEvent


class ChangePhase(StrEnum):
    """Phase of a change of groups."""

    QUEUED = "queued"
    BLOCKED = "blocked"
    PREPARING = "preparing"
    COMMITTED = "committed"
    STABLE = "stable"
    SETTLED = "settled"
    LEFT = "left"
    FAILED = "failed"


TRANSITIONS = {
    (ChangePhase.QUEUED, ChangePhase.PREPARING),
    (ChangePhase.QUEUED, ChangePhase.FAILED),
    (ChangePhase.PREPARING, ChangePhase.BLOCKED),
    (ChangePhase.BLOCKED, ChangePhase.PREPARING),
    (ChangePhase.BLOCKED, ChangePhase.FAILED),
    (ChangePhase.PREPARING, ChangePhase.COMMITTED),
    (ChangePhase.PREPARING, ChangePhase.FAILED),
    (ChangePhase.COMMITTED, ChangePhase.STABLE),
    (ChangePhase.COMMITTED, ChangePhase.FAILED),
    (ChangePhase.STABLE, ChangePhase.SETTLED),
    (ChangePhase.STABLE, ChangePhase.LEFT),
}
"""All allowed transitions."""

RUNNING = frozenset({ChangePhase.BLOCKED, ChangePhase.PREPARING, ChangePhase.COMMITTED})
"""Phases that count towards `running_max`."""

# Phases in which a change is not tracked any more.
ENDED = frozenset({ChangePhase.SETTLED, ChangePhase.LEFT, ChangePhase.FAILED})


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """Limits of changes of groups; times in seconds."""

    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    running_max: int = 32  # concurrent changes, urgent changes aside
    poll_interval_s: float = 0.2  # interval of polls of members, and of retries while BLOCKED
    blocked_max_s: float = 5.0  # time limit of the retries while BLOCKED
    # Time limit of an attempt, beyond that of the preparation: for its two transactions, whose
    # outcome may have to be read back.
    attempt_margin_s: float = 30.0
    change_over_timeout_s: float = 30.0  # from commit to STABLE, and from there to SETTLED


@dataclass(frozen=True, slots=True)
class ChangeRequested:
    """Request to replace the groups of the workers in `targets` by the groups `targets`.

    An `urgent` change skips the queue. `traceparent` is written into the new groups' records.
    """

    now_s: float
    change_id: str
    targets: Targets
    urgent: bool = False
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class ChangeCalledOff:
    """Cancels the change to `targets`; an in-flight commit is not stopped."""

    now_s: float
    targets: Targets
    reason: str


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """The epoch that a worker reports, and whether its last change has settled."""

    worker_id: str
    epoch: int
    settled: bool


@dataclass(frozen=True, slots=True)
class MembersPolled:
    """Reply to `PollMembers`: the latest reports; workers without a report are missing."""

    now_s: float
    change_id: str
    members: tuple[MemberStatus, ...]


Event = GroupEvent | ChangeRequested | ChangeCalledOff | MembersPolled
"""Drivers send `ChangeRequested` and `ChangeCalledOff` instead of `Reconfigure` and
`ReconfigureCalledOff`, which this state machine passes to `GroupState`."""


@dataclass(frozen=True, slots=True)
class PollMembers:
    """Send `MembersPolled` for these workers after `after_s`; immediately if that is 0."""

    change_id: str
    worker_ids: tuple[str, ...]
    after_s: float


@dataclass(frozen=True, slots=True)
class ChangeStepped:
    """Report that a change entered `phase`; `message` is for people. `epoch`: of its commit."""

    change_id: str
    phase: ChangePhase
    message: str
    epoch: int | None = None


Command = Transact | PrepareMembers | AbortMember | PollMembers | ChangeStepped


@dataclass(slots=True)
class _Change:
    """A change in progress."""

    change_id: str
    targets: Targets
    urgent: bool  # skips the queue
    traceparent: str
    blocked_until_s: float = 0.0  # end of retries while BLOCKED
    phase: ChangePhase = ChangePhase.QUEUED
    deadline_s: float = 0.0  # of the current phase
    epoch: int | None = None  # of the commit

    @property
    def worker_ids(self) -> tuple[str, ...]:
        return tuple(stage.worker_id for target in self.targets for stage in target)

    @property
    def is_counted(self) -> bool:
        """Whether the change counts towards `running_max`."""
        return not self.urgent and self.phase in RUNNING

    def step(self, phase: ChangePhase, message: str) -> ChangeStepped:
        """Enter `phase`, and report it."""
        self.enter(phase)
        return ChangeStepped(self.change_id, phase, message, self.epoch)

    def enter(self, phase: ChangePhase) -> None:
        """Enter `phase` without a report."""
        assert (self.phase, phase) in TRANSITIONS, f"a change went from {self.phase} to {phase}"
        self.phase = phase

    def poll(self, after_s: float) -> PollMembers:
        """The command to report the members' epochs after `after_s`."""
        return PollMembers(self.change_id, self.worker_ids, after_s)


@dataclass(slots=True)
class CoordinatorState:
    """The coordinator's state machine; starts as a standby."""

    config: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    _groups: GroupState = field(init=False)  # the group protocol
    _changes: dict[str, _Change] = field(default_factory=dict)  # not ended, by id, oldest first

    def __post_init__(self) -> None:
        self._groups = GroupState(self.config.protocol)

    def handle(self, event: Event) -> list[Command]:
        """Apply an event; returns the commands for the driver, in order."""
        match event:
            case ChangeRequested():
                self._changes[event.change_id] = _Change(
                    event.change_id, event.targets, event.urgent, event.traceparent
                )
                commands: list[Command] = []
            case ChangeCalledOff():
                commands = self._call_off(event)
            case MembersPolled():
                commands = self._note_poll(event)
            case _:
                commands = self._advance(event)
        # While PREPARING no polls occur, so ticks enforce its deadline. Polls of the members
        # enforce the deadlines of the phases after it.
        if isinstance(event, TimePassed):
            commands += self._fail_overdue(event.now_s)
        return commands + self._begin_queued(event.now_s)

    @property
    def records(self) -> Records:
        """The records in the store as last known; read only."""
        return self._groups.records

    @property
    def leads(self) -> bool:
        """Whether this coordinator is the leader."""
        return self.token is not None

    @property
    def token(self) -> int | None:
        """The fencing token of the leadership; None for a standby."""
        return self._groups.token

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The attempts in progress."""
        return self._groups.attempts

    def change_of(self, attempt_id: str) -> str | None:
        """The change id of an attempt in progress; None if the attempt has ended."""
        matches = (a.request_id for a in self.attempts if a.attempt_id == attempt_id)
        return next(matches, None)

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        self._groups.check_invariants()
        changes = self._changes.values()
        running = sum(change.is_counted for change in changes)
        assert running <= self.config.running_max, "too many changes run"
        queued = any(change.phase is ChangePhase.QUEUED for change in changes)
        assert not queued or running == self.config.running_max, "a change is queued needlessly"
        preparing = {c.change_id for c in changes if c.phase is ChangePhase.PREPARING}
        assert preparing <= {a.request_id for a in self.attempts}, "a change has lost its attempt"
        committed = (ChangePhase.COMMITTED, ChangePhase.STABLE)
        for change_id, change in self._changes.items():
            assert change.change_id == change_id and change.phase not in ENDED
            assert (change.epoch is not None) == (change.phase in committed)

    # --- attempts

    def _begin_queued(self, now_s: float) -> list[Command]:
        """Start the queued changes that may run now, oldest first."""
        commands: list[Command] = []
        for change in [c for c in self._changes.values() if c.phase is ChangePhase.QUEUED]:
            running = sum(change.is_counted for change in self._changes.values())
            if change.urgent or running < self.config.running_max:
                change.blocked_until_s = now_s + self.config.blocked_max_s
                commands += self._begin(change, now_s)
        return commands

    def _call_off(self, event: ChangeCalledOff) -> list[Command]:
        """Cancel a change before its commit; its members keep their configuration."""
        commands: list[Command] = []
        for change in list(self._changes.values()):
            if change.targets != event.targets:
                continue
            if change.phase is ChangePhase.PREPARING:
                cancel = ReconfigureCalledOff(event.now_s, change.change_id, event.reason)
                commands += self._advance(cancel)
            elif change.phase in (ChangePhase.QUEUED, ChangePhase.BLOCKED):
                commands += self._end(change, ChangePhase.FAILED, event.reason)
        return commands

    def _begin(self, change: _Change, now_s: float) -> list[Command]:
        """Start an attempt, for a queued or a blocked change."""
        self._prepare(change, now_s)
        request = Reconfigure(now_s, change.change_id, change.targets, change.traceparent)
        commands = self._advance(request)
        # The protocol may have refused the request already, which ends or blocks the change.
        if change.phase is ChangePhase.PREPARING:
            text = _preparing_text(change.targets)
            commands.append(ChangeStepped(change.change_id, change.phase, text))
        return commands

    def _prepare(self, change: _Change, now_s: float) -> None:
        change.enter(ChangePhase.PREPARING)
        protocol = self.config.protocol
        change.deadline_s = now_s + protocol.prepare_timeout_s + self.config.attempt_margin_s

    def _advance(self, event: GroupEvent) -> list[Command]:
        """Pass an event to the group protocol; apply the ends of attempts to their changes."""
        commands: list[Command] = []
        for command in self._groups.handle(event):
            if isinstance(command, ReconfigurationCommitted | ReconfigurationFailed):
                commands += self._end_attempt(command, event.now_s)
                continue
            if isinstance(command, PrepareMembers):
                self._follow_restoration(command, event.now_s)
            commands.append(command)
        return commands

    def _follow_restoration(self, command: PrepareMembers, now_s: float) -> None:
        """Track an attempt that the protocol started itself, such as a restore of layers."""
        if self.change_of(command.attempt) != command.attempt:
            return
        targets = tuple(
            tuple(Stage(m.worker_id, m.first_layer, m.end_layer) for m in target.members)
            for target in command.targets
        )
        change = _Change(command.attempt, targets, urgent=True, traceparent="")
        self._prepare(change, now_s)
        self._changes[change.change_id] = change

    def _end_attempt(
        self, ended: ReconfigurationCommitted | ReconfigurationFailed, now_s: float
    ) -> list[Command]:
        change = self._changes.get(ended.request_id)
        if change is None:
            return []  # the change failed at its deadline, or a restore ended before its Prepare
        if isinstance(ended, ReconfigurationCommitted):
            change.epoch = ended.epoch
            change.deadline_s = now_s + self.config.change_over_timeout_s
            text = f"epoch {ended.epoch}; {', '.join(change.worker_ids)} change over"
            return [change.step(ChangePhase.COMMITTED, text), change.poll(0.0)]
        # Another write to the records is in flight: retry, since such a write ends soon.
        if ended.busy and now_s <= change.blocked_until_s:
            change.enter(ChangePhase.BLOCKED)
            return [change.poll(self.config.poll_interval_s)]
        return self._end(change, ChangePhase.FAILED, ended.reason)

    def _fail_overdue(self, now_s: float) -> list[Command]:
        reason = "etcd does not answer; see `tideserve status` later for the outcome"
        return [
            command
            for change in list(self._changes.values())
            if change.phase is ChangePhase.PREPARING and now_s > change.deadline_s
            for command in self._end(change, ChangePhase.FAILED, reason)
        ]

    def _end(self, change: _Change, phase: ChangePhase, message: str) -> list[Command]:
        del self._changes[change.change_id]
        return [change.step(phase, message)]

    # --- members

    def _note_poll(self, polled: MembersPolled) -> list[Command]:
        change = self._changes.get(polled.change_id)
        if change is None:
            return []
        match change.phase:
            case ChangePhase.BLOCKED:
                return self._begin(change, polled.now_s)
            case ChangePhase.COMMITTED:
                return self._await_epoch(change, polled)
            case ChangePhase.STABLE:
                return self._await_settled(change, polled)
        return []

    def _await_epoch(self, change: _Change, polled: MembersPolled) -> list[Command]:
        """Wait until all members report the epoch or a later epoch."""
        lagging = _lagging(change, polled.members)
        if not lagging:
            change.deadline_s = polled.now_s + self.config.change_over_timeout_s
            stable = change.step(ChangePhase.STABLE, f"all members serve epoch {change.epoch}")
            return [stable, *self._await_settled(change, polled)]
        if polled.now_s <= change.deadline_s:
            return [change.poll(self.config.poll_interval_s)]
        reason = (
            f"epoch {change.epoch} is committed, but {', '.join(lagging)} did not change over"
            f" within {self.config.change_over_timeout_s:g} s; see `tideserve logs`"
        )
        return self._end(change, ChangePhase.FAILED, reason)

    def _await_settled(self, change: _Change, polled: MembersPolled) -> list[Command]:
        lagging = _lagging(change, [member for member in polled.members if member.settled])
        if not lagging:
            return self._end(change, ChangePhase.SETTLED, "all members have settled")
        if polled.now_s <= change.deadline_s:
            return [change.poll(self.config.poll_interval_s)]
        return self._end(change, ChangePhase.LEFT, f"{', '.join(lagging)} have not settled yet")


def _lagging(change: _Change, members: Sequence[MemberStatus]) -> list[str]:
    """The workers of a committed change that `members` lacks at its epoch or a later epoch."""
    assert change.epoch is not None
    current = [member.worker_id for member in members if member.epoch >= change.epoch]
    return [worker_id for worker_id in change.worker_ids if worker_id not in current]


def _preparing_text(targets: Targets) -> str:
    if all(len(target) == 1 for target in targets):
        places = [f"{target[0].worker_id} (all layers)" for target in targets]
    else:
        places = [
            f"{stage.worker_id} (layers {stage.first_layer}-{stage.end_layer - 1})"
            for target in targets
            for stage in target
        ]
    *others, last = places
    named = f"{', '.join(others)} and {last} prepare" if others else f"{last} prepares"
    return f"{named}; serving continues"
