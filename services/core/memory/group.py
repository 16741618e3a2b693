"""Which groups there are: membership from leases turned into committed epochs.

Groups of one member: every registered worker forms the group `group_id_of(worker)`. Only a
committed record tells who may act, so nothing here acts: every decision is a compare-and-swap of
one record. A dissolved group's record stays as a tombstone, so that its epochs never regress.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from services.core.ids import group_id_of


class GroupPhase(StrEnum):
    """How far a group is in its life."""

    STABLE = "stable"
    DISSOLVED = "dissolved"


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that is registered now; `incarnation` belongs to its process."""

    worker_id: str
    incarnation: str
    model: str


@dataclass(frozen=True, slots=True)
class Member:
    """A worker's place in a group."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Group:
    """The record of a group. A tombstone has no members."""

    group_id: str
    epoch: int
    phase: GroupPhase
    members: tuple[Member, ...]
    model: str


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group record as the store has it; `mod_revision` fences the next write."""

    group: Group
    mod_revision: int


@dataclass(frozen=True, slots=True)
class WorkersListed:
    """All workers that are registered now. Only an answer of the store counts, never silence."""

    workers: tuple[Worker, ...]


@dataclass(frozen=True, slots=True)
class GroupsListed:
    """All group records, tombstones included."""

    groups: tuple[StoredGroup, ...]


@dataclass(frozen=True, slots=True)
class WriteFinished:
    """A write has ended. Unless `committed`, it may or may not have been applied."""

    group_id: str
    committed: bool


Event = WorkersListed | GroupsListed | WriteFinished


@dataclass(frozen=True, slots=True)
class WriteGroup:
    """Write `group` if its record is still at `mod_revision` (0: absent)."""

    group: Group
    mod_revision: int


@dataclass(slots=True)
class GroupState:
    """Compares what is with what should be, and orders the writes that are missing.

    Decides nothing before workers and groups have been listed once. At most one write per group
    is outstanding; after it, the group is left alone until the groups have been listed again.
    """

    _workers: dict[str, Worker] | None = None
    _groups: dict[str, StoredGroup] | None = None
    _last_epoch: dict[str, int] = field(default_factory=dict)
    _writing: dict[str, Group] = field(default_factory=dict)
    _unread: set[str] = field(default_factory=set)

    def handle(self, event: Event) -> list[WriteGroup]:
        """Apply one event; return the writes that the driver must start."""
        match event:
            case WorkersListed():
                self._workers = {worker.worker_id: worker for worker in event.workers}
            case GroupsListed():
                self._groups = {stored.group.group_id: stored for stored in event.groups}
                self._unread.clear()
                for stored in event.groups:
                    self._note_epoch(stored.group)
            case WriteFinished():
                written = self._writing.pop(event.group_id)
                self._unread.add(event.group_id)
                if event.committed:
                    self._note_epoch(written)
        return self._decide()

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        for stored in (self._groups or {}).values():
            assert stored.group.epoch <= self._last_epoch[stored.group.group_id]
        for group_id, group in self._writing.items():
            assert group.group_id == group_id
            assert group.epoch >= 1
            assert (group.phase is GroupPhase.STABLE) == bool(group.members)
        becoming = [
            member.worker_id for group in self._writing.values() for member in group.members
        ]
        assert len(becoming) == len(set(becoming))

    def _note_epoch(self, group: Group) -> None:
        last = self._last_epoch.get(group.group_id, 0)
        self._last_epoch[group.group_id] = max(last, group.epoch)

    def _decide(self) -> list[WriteGroup]:
        if self._workers is None or self._groups is None:
            return []
        wanted = {group_id_of(worker_id): worker for worker_id, worker in self._workers.items()}
        places = _stable_places(self._groups.values())
        commands = []
        for group_id in sorted(wanted.keys() | self._groups.keys()):
            if group_id in self._writing or group_id in self._unread:
                continue
            worker = wanted.get(group_id)
            if worker is not None and places.get(worker.worker_id, set()) - {group_id}:
                # It is in another stable group, which is dissolved first.
                continue
            command = self._missing_write(group_id, worker, self._groups.get(group_id))
            if command is not None:
                self._writing[group_id] = command.group
                commands.append(command)
        return commands

    def _missing_write(
        self, group_id: str, worker: Worker | None, stored: StoredGroup | None
    ) -> WriteGroup | None:
        """The write that makes it `worker`'s group (None: a tombstone), if one is missing."""
        last_epoch = self._last_epoch.get(group_id, 0)
        # A record below an epoch that was committed: the store lost it, or this view is late.
        if (
            stored is not None
            and stored.group.epoch == last_epoch
            and _serves(stored.group, worker)
        ):
            return None
        epoch = last_epoch + 1
        if worker is not None:
            member = Member(worker.worker_id, worker.incarnation)
            group = Group(group_id, epoch, GroupPhase.STABLE, (member,), worker.model)
        else:
            assert stored is not None
            group = Group(group_id, epoch, GroupPhase.DISSOLVED, (), stored.group.model)
        return WriteGroup(group, stored.mod_revision if stored is not None else 0)


def _serves(group: Group, worker: Worker | None) -> bool:
    """Whether the record says what it should: stable with `worker` alone, or a tombstone."""
    if worker is None:
        return group.phase is GroupPhase.DISSOLVED
    members = (Member(worker.worker_id, worker.incarnation),)
    return (group.phase, group.members, group.model) == (GroupPhase.STABLE, members, worker.model)


def _stable_places(groups: Iterable[StoredGroup]) -> dict[str, set[str]]:
    """The stable groups that each worker is in."""
    places: dict[str, set[str]] = {}
    for stored in groups:
        if stored.group.phase is GroupPhase.STABLE:
            for member in stored.group.members:
                places.setdefault(member.worker_id, set()).add(stored.group.group_id)
    return places
