"""The coordinator's machine: every change of groups, from the request until its members settle.

Theory of operation. `GroupState` makes one attempt at a change: it marks the records, has the
members prepare, and commits or aborts. This machine has a `GroupState` inside and follows each
change beyond its attempt. Feed it every event, carry out every command in order, and feed what
comes of it as the next event: that is all that a driver does. The memory manager's driver writes
to etcd and calls members; the simulator's writes to a table and waits.

A change is QUEUED while `running_max` changes run; one asked for by hand is urgent and begins at
once. If another write is in its way, it is BLOCKED and asked for again every `look_s`, up to
`blocked_max_s`. While an attempt runs it is PREPARING. An attempt that is aborted ends the change:
it has FAILED, and its asker decides anew. So does a change that is called off before its commit. A
committed change cannot fail any more, but its members may be late: it is COMMITTED until all of
them report its epoch or a later one, at most `change_over_timeout_s`. Then it is STABLE: it makes
room for the next one in the queue, and is followed until all members have settled. A change whose
KV moves too long is LEFT to its members.

Survivors of a lost member get their layers back by attempts that nobody asked for. They are
followed from the moment when their members are asked, under the id of the attempt.

The machine has no clock: `LookAtMembers` says when the driver must tell what the members serve, and
`TimePassed` lets deadlines pass.
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
    CalledOff,
    PrepareMembers,
    ReconfigurationCommitted,
    ReconfigurationFailed,
    Reconfigure,
    Targets,
    TimePassed,
    Transact,
)
from services.core.groups.vocabulary import Event as GroupEvent


class ChangePhase(StrEnum):
    """How far a change of groups is."""

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
"""No other step can happen."""

RUNNING = frozenset({ChangePhase.BLOCKED, ChangePhase.PREPARING, ChangePhase.COMMITTED})
"""Phases that count towards `running_max`."""

ENDED = frozenset({ChangePhase.SETTLED, ChangePhase.LEFT, ChangePhase.FAILED})


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """Bounds of a change of groups; times in seconds.

    `attempt_margin_s` beside the members' time to prepare is for the two transactions of an
    attempt, whose answers may have to be looked up.
    """

    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    running_max: int = 32
    look_s: float = 0.2
    blocked_max_s: float = 5.0
    attempt_margin_s: float = 30.0
    change_over_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class ChangeAsked:
    """Somebody asks to change the groups of the workers in `targets` to `targets`.

    An `urgent` change is not queued. `traceparent` goes into the records of the new groups.
    """

    now_s: float
    change_id: str
    targets: Targets
    urgent: bool = False
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class ChangeCalledOff:
    """Nobody wants the change to `targets` any more; a commit under way is not stopped."""

    now_s: float
    targets: Targets
    reason: str


@dataclass(frozen=True, slots=True)
class MemberSeen:
    """The epoch that a worker reports to serve, and whether it is done with its last change."""

    worker_id: str
    epoch: int
    settled: bool


@dataclass(frozen=True, slots=True)
class MembersSeen:
    """The time of a `LookAtMembers` has come; `members` that have not reported yet are missing."""

    now_s: float
    change_id: str
    members: tuple[MemberSeen, ...]


Event = GroupEvent | ChangeAsked | ChangeCalledOff | MembersSeen
"""`ChangeAsked` takes the place of the protocol's `Reconfigure`, the next that of `CalledOff`."""


@dataclass(frozen=True, slots=True)
class LookAtMembers:
    """Tell `MembersSeen` of these workers in `after_s`; at once if that is 0."""

    change_id: str
    worker_ids: tuple[str, ...]
    after_s: float


@dataclass(frozen=True, slots=True)
class ChangeStepped:
    """A change has come to `phase`; `message` is a sentence for people. `epoch`: once committed."""

    change_id: str
    phase: ChangePhase
    message: str
    epoch: int | None = None


Command = Transact | PrepareMembers | AbortMember | LookAtMembers | ChangeStepped


@dataclass(slots=True)
class _Change:
    """One change; `deadline_s` is that of its phase."""

    change_id: str
    targets: Targets
    urgent: bool
    traceparent: str
    blocked_until_s: float = 0.0
    phase: ChangePhase = ChangePhase.QUEUED
    deadline_s: float = 0.0
    epoch: int | None = None

    @property
    def worker_ids(self) -> tuple[str, ...]:
        return tuple(stage.worker_id for target in self.targets for stage in target)

    @property
    def takes_turn(self) -> bool:
        """Whether it counts towards `running_max`."""
        return not self.urgent and self.phase in RUNNING

    def step(self, phase: ChangePhase, message: str) -> ChangeStepped:
        """Go to `phase`."""
        self.move(phase)
        return ChangeStepped(self.change_id, phase, message, self.epoch)

    def move(self, phase: ChangePhase) -> None:
        """Go to `phase`, and tell nobody."""
        assert (self.phase, phase) in TRANSITIONS, f"a change went from {self.phase} to {phase}"
        self.phase = phase

    def look(self, after_s: float) -> LookAtMembers:
        return LookAtMembers(self.change_id, self.worker_ids, after_s)


@dataclass(slots=True)
class CoordinatorState:
    """The group protocol, and the changes that it is asked for. It starts as a standby."""

    config: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    _groups: GroupState = field(init=False)
    _changes: dict[str, _Change] = field(default_factory=dict)  # that have not ended, as asked

    def __post_init__(self) -> None:
        self._groups = GroupState(self.config.protocol)

    def handle(self, event: Event) -> list[Command]:
        """Apply one event; return what the driver must do next, in order."""
        match event:
            case ChangeAsked():
                self._changes[event.change_id] = _Change(
                    event.change_id, event.targets, event.urgent, event.traceparent
                )
                commands: list[Command] = []
            case ChangeCalledOff():
                commands = self._call_off(event)
            case MembersSeen():
                commands = self._see(event)
            case _:
                commands = self._advance(event)
        if isinstance(event, TimePassed):
            commands += self._fail_overdue(event.now_s)
        return commands + self._begin_queued(event.now_s)

    @property
    def records(self) -> Records:
        """The newest listing, and our own commits since. To be read only."""
        return self._groups.records

    @property
    def leads(self) -> bool:
        """Whether this coordinator decides."""
        return self._groups.token is not None

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The attempts that run."""
        return self._groups.attempts

    def change_of(self, attempt_id: str) -> str | None:
        """The change that a running attempt is for; None if the attempt has ended."""
        found = (one.request_id for one in self.attempts if one.attempt_id == attempt_id)
        return next(found, None)

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        self._groups.check_invariants()
        changes = self._changes.values()
        turns = sum(change.takes_turn for change in changes)
        assert turns <= self.config.running_max, "too many changes run"
        queued = any(change.phase is ChangePhase.QUEUED for change in changes)
        assert not queued or turns == self.config.running_max, "a change waits for nothing"
        preparing = {one.change_id for one in changes if one.phase is ChangePhase.PREPARING}
        assert preparing <= {one.request_id for one in self.attempts}, "an attempt is forgotten"
        committed = (ChangePhase.COMMITTED, ChangePhase.STABLE)
        for change_id, change in self._changes.items():
            assert change.change_id == change_id and change.phase not in ENDED
            assert (change.epoch is not None) == (change.phase in committed)

    # --- attempts

    def _begin_queued(self, now_s: float) -> list[Command]:
        commands: list[Command] = []
        for change in [one for one in self._changes.values() if one.phase is ChangePhase.QUEUED]:
            turns = sum(one.takes_turn for one in self._changes.values())
            if change.urgent or turns < self.config.running_max:
                change.blocked_until_s = now_s + self.config.blocked_max_s
                commands += self._begin(change, now_s)
        return commands

    def _call_off(self, event: ChangeCalledOff) -> list[Command]:
        """End a change that waits or prepares; its members go on as they are."""
        commands: list[Command] = []
        for change in list(self._changes.values()):
            if change.targets != event.targets:
                continue
            if change.phase is ChangePhase.PREPARING:
                commands += self._advance(CalledOff(event.now_s, change.change_id, event.reason))
            elif change.phase in (ChangePhase.QUEUED, ChangePhase.BLOCKED):
                commands += self._end(change, ChangePhase.FAILED, event.reason)
        return commands

    def _begin(self, change: _Change, now_s: float) -> list[Command]:
        """Ask for an attempt."""
        self._prepare(change, now_s)
        asked = Reconfigure(now_s, change.change_id, change.targets, change.traceparent)
        commands = self._advance(asked)
        if change.phase is ChangePhase.PREPARING:
            text = _getting_ready(change.targets)
            commands.append(ChangeStepped(change.change_id, change.phase, text))
        return commands

    def _prepare(self, change: _Change, now_s: float) -> None:
        change.move(ChangePhase.PREPARING)
        protocol = self.config.protocol
        change.deadline_s = now_s + protocol.prepare_timeout_s + self.config.attempt_margin_s

    def _advance(self, event: GroupEvent) -> list[Command]:
        """Feed the group protocol; follow what it says of changes."""
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
        """Nobody has asked for this attempt: survivors of a lost member get their layers back."""
        if self.change_of(command.attempt) != command.attempt:
            return
        targets = tuple(
            tuple(Stage(one.worker_id, one.first_layer, one.end_layer) for one in target.members)
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
            return []  # it took too long, or its records were not marked yet
        if isinstance(ended, ReconfigurationCommitted):
            change.epoch = ended.epoch
            change.deadline_s = now_s + self.config.change_over_timeout_s
            text = f"epoch {ended.epoch}; {', '.join(change.worker_ids)} change over"
            return [change.step(ChangePhase.COMMITTED, text), change.look(0.0)]
        if ended.busy and now_s <= change.blocked_until_s:
            change.move(ChangePhase.BLOCKED)
            return [change.look(self.config.look_s)]
        return self._end(change, ChangePhase.FAILED, ended.reason)

    def _fail_overdue(self, now_s: float) -> list[Command]:
        reason = "etcd does not answer; `tideserve status` tells later"
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

    def _see(self, seen: MembersSeen) -> list[Command]:
        change = self._changes.get(seen.change_id)
        if change is None:
            return []
        match change.phase:
            case ChangePhase.BLOCKED:
                return self._begin(change, seen.now_s)
            case ChangePhase.COMMITTED:
                return self._await_epoch(change, seen)
            case ChangePhase.STABLE:
                return self._await_settled(change, seen)
        return []

    def _await_epoch(self, change: _Change, seen: MembersSeen) -> list[Command]:
        """Wait until the members report the epoch, or a later one."""
        late = _late(change, seen.members)
        if not late:
            change.deadline_s = seen.now_s + self.config.change_over_timeout_s
            stable = change.step(ChangePhase.STABLE, f"all members serve epoch {change.epoch}")
            return [stable, *self._await_settled(change, seen)]
        if seen.now_s <= change.deadline_s:
            return [change.look(self.config.look_s)]
        reason = (
            f"epoch {change.epoch} is committed, but {', '.join(late)} did not change over within "
            f"{self.config.change_over_timeout_s:g} s; see `tideserve logs`"
        )
        return self._end(change, ChangePhase.FAILED, reason)

    def _await_settled(self, change: _Change, seen: MembersSeen) -> list[Command]:
        late = _late(change, [one for one in seen.members if one.settled])
        if not late:
            return self._end(change, ChangePhase.SETTLED, "all members have settled")
        if seen.now_s <= change.deadline_s:
            return [change.look(self.config.look_s)]
        return self._end(change, ChangePhase.LEFT, f"{', '.join(late)} have not settled yet")


def _late(change: _Change, members: Sequence[MemberSeen]) -> list[str]:
    """The workers of a committed change that are not among `members` with its epoch."""
    assert change.epoch is not None
    there = [one.worker_id for one in members if one.epoch >= change.epoch]
    return [name for name in change.worker_ids if name not in there]


def _getting_ready(targets: Targets) -> str:
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
