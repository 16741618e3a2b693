"""etcd as the group protocol sees it, without a process: records, revisions, transactions."""

import copy
from dataclasses import dataclass, field, replace

from services.core.groups.fence import MemberState, is_removed, restored
from services.core.groups.vocabulary import (
    ClusterListed,
    Group,
    StoredAssignment,
    StoredGroup,
    Transact,
    Worker,
)
from services.core.ids import group_id_of

DATA = (
    "revision",
    "token",
    "workers",
    "groups",
    "assignments",
    "epoch_floor",
    "floor_revision",
)


class Violated(AssertionError):
    """An invariant does not hold."""


@dataclass
class FakeStore:
    """etcd: records, revisions, transactions. `removed` names comparisons to leave out."""

    removed: frozenset[str] = frozenset()
    num_layers: int = 4
    revision: int = 1
    token: int = 0
    workers: dict[str, Worker] = field(default_factory=dict)
    groups: dict[str, StoredGroup] = field(default_factory=dict)
    assignments: dict[str, StoredAssignment] = field(default_factory=dict)
    configurations: dict[tuple[str, int], Group] = field(default_factory=dict)
    epoch_floor: int = 0
    floor_revision: int = 0
    removed_workers: int = 0
    rollbacks: int = 0
    # The highest epoch ever of each group name and worker.
    highest: dict[str, int] = field(default_factory=dict)

    def listing(self, now_s: float) -> ClusterListed:
        return ClusterListed(
            now_s,
            self.revision,
            tuple(self.workers.values()),
            tuple(self.groups.values()),
            tuple(self.assignments.values()),
            self.epoch_floor,
            self.floor_revision,
        )

    def elect(self) -> int:
        self.revision += 1
        self.token = self.revision
        return self.token

    def register(self, name: str, incarnation: str) -> None:
        self.revision += 1
        self.workers[name] = Worker(name, incarnation, "m", self.num_layers, self.revision)

    def expire(self, name: str) -> None:
        self.revision += 1
        del self.workers[name]

    def transact(self, command: Transact) -> int | None:
        """Commit a transaction; returns its revision, or None if a comparison failed."""
        if not self._holds(command):
            return None
        self.revision += 1
        for group in command.groups:
            self._check_commit(group)
            self.groups[group.group_id] = StoredGroup(group, self.revision)
        for assignment in command.assignments:
            self._check_epoch(assignment.worker_id, assignment.epoch)
            stored = StoredAssignment(assignment, self.revision)
            self.assignments[assignment.worker_id] = stored
        if command.removed_workers:
            self._forget(command)
        return self.revision

    def may_register(self, member: MemberState, restores: bool = True) -> bool:
        """Whether the process may register; restores its assignment if that was lost."""
        own, entry = member.assignment, self.assignments.get(member.worker_id)
        stored = entry.assignment if entry is not None else None
        if own is None or (stored is not None and member.agrees(stored)):
            return True
        if is_removed(own, stored, self.epoch_floor):
            return False
        if restores:
            self.revision += 1
            written = restored(own, stored)
            self._check_epoch(member.worker_id, written.epoch)
            self.assignments[member.worker_id] = StoredAssignment(written, self.revision)
        return True

    def data(self) -> dict[str, object]:
        """A copy of etcd's data."""
        return copy.deepcopy({name: getattr(self, name) for name in DATA})

    def lose(self, backup: dict[str, object] | None) -> None:
        """Restart with the data of `backup`, or empty."""
        self.rollbacks += 1
        for name, value in copy.deepcopy(backup or FakeStore().data()).items():
            setattr(self, name, value)
        # New writes may differ from the lost history; members must notice.
        self.configurations.clear()
        self.highest.clear()

    def _forget(self, command: Transact) -> None:
        for name in command.removed_workers:
            self.removed_workers += 1
            self.assignments.pop(name, None)
            self.groups.pop(group_id_of(name), None)
        if "floor" not in self.removed:
            self.epoch_floor, self.floor_revision = command.epoch_floor, self.revision

    def _check_epoch(self, name: str, epoch: int) -> None:
        """Check that epochs never decrease for a group name or worker."""
        if epoch < self.highest.get(name, 0):
            raise Violated(f"I3: {name} went back to epoch {epoch}")
        self.highest[name] = epoch

    def _holds(self, command: Transact) -> bool:
        if command.token != self.token and "leader" not in self.removed:
            return False
        if "cas" in self.removed:
            return True
        if command.removed_workers and command.floor_revision != self.floor_revision:
            return False
        groups = {key: stored.mod_revision for key, stored in self.groups.items()}
        assignments = {key: stored.mod_revision for key, stored in self.assignments.items()}
        workers = {key: worker.create_revision for key, worker in self.workers.items()}
        if "incarnation" in self.removed:
            workers = command.worker_revisions
        return all(
            present.get(key, 0) == revision
            for present, wanted in (
                (groups, command.group_revisions),
                (assignments, command.assignment_revisions),
                (workers, command.worker_revisions),
            )
            for key, revision in wanted.items()
        )

    def _check_commit(self, group: Group) -> None:
        self._check_epoch(group.group_id, group.epoch)
        before = self.groups.get(group.group_id)
        plain = replace(group, attempt="")
        if self.configurations.setdefault((group.group_id, group.epoch), plain) != plain:
            raise Violated(f"I3: two configurations of {group.group_id} at {group.epoch}")
        if before is None or before.group.epoch < group.epoch:
            for member in group.members:
                worker = self.workers.get(member.worker_id)
                if worker is None or worker.incarnation != member.incarnation:
                    raise Violated(f"I4: {member.worker_id} is not the one that was asked")
