"""The group protocol's view of the store: its records, and whether they agree."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from services.core.groups.vocabulary import (
    Assignment,
    ClusterListed,
    Group,
    GroupPhase,
    Member,
    StoredAssignment,
    StoredGroup,
    Transact,
    Worker,
)
from services.core.ids import group_id_of


@dataclass(slots=True)
class Records:
    """The newest listing, and our own commits since. It never goes back.

    It remembers every epoch that it has seen, also if the store has lost the record. Epochs at or
    below the floor need not be remembered: no such epoch is given any more.
    """

    revision: int = 0
    workers: dict[str, Worker] = field(default_factory=dict)
    groups: dict[str, StoredGroup] = field(default_factory=dict)
    assignments: dict[str, StoredAssignment] = field(default_factory=dict)
    epoch_floor: int = 0
    floor_revision: int = 0
    _listed: int = 0  # revision of the listing
    _last_epoch: dict[str, int] = field(default_factory=dict)

    def take(self, listed: ClusterListed) -> None:
        """Replace everything by a listing; an older one has no effect."""
        if listed.revision < self.revision:
            return
        self.revision = self._listed = listed.revision
        self.workers = {worker.worker_id: worker for worker in listed.workers}
        self.groups = {stored.group.group_id: stored for stored in listed.groups}
        self.assignments = {stored.assignment.worker_id: stored for stored in listed.assignments}
        self.epoch_floor = max(self.epoch_floor, listed.epoch_floor)
        self.floor_revision = listed.floor_revision
        for stored in listed.groups:
            self._note_epoch(stored.group)
        self._forget_low_epochs()

    def apply(self, written: Transact, revision: int) -> None:
        """Take in what we have committed, at `revision`.

        Two commits may end in the other order. They have no record in common.
        """
        for group in written.groups:
            self._note_epoch(group)
        self.epoch_floor = max(self.epoch_floor, written.epoch_floor)
        if revision <= self._listed:
            return  # the listing has it, or what came after it
        self.revision = max(self.revision, revision)
        for group in written.groups:
            self.groups[group.group_id] = StoredGroup(group, revision)
        for assignment in written.assignments:
            stored = StoredAssignment(assignment, revision)
            self.assignments[assignment.worker_id] = stored
        if written.forgotten:
            self.floor_revision = revision
            for worker_id in written.forgotten:
                self.assignments.pop(worker_id, None)
                self.groups.pop(group_id_of(worker_id), None)
            self._forget_low_epochs()

    def next_epoch(self, group_ids: Iterable[str], worker_ids: Iterable[str]) -> int:
        """One above everything that these groups and workers have ever been through."""
        epochs = [self.epoch_floor]
        epochs += [self._last_epoch.get(group_id, 0) for group_id in group_ids]
        epochs += [
            stored.assignment.epoch
            for worker_id in worker_ids
            if (stored := self.assignments.get(worker_id)) is not None
        ]
        return 1 + max(epochs)

    def group_revision(self, group_id: str) -> int:
        """Revision of a group's record, 0 if there is none."""
        stored = self.groups.get(group_id)
        return stored.mod_revision if stored is not None else 0

    def assignment_revision(self, worker_id: str) -> int:
        """Revision of a worker's assignment, 0 if there is none."""
        stored = self.assignments.get(worker_id)
        return stored.mod_revision if stored is not None else 0

    def is_live(self, group_id: str) -> bool:
        """Whether there is such a group, sound or not; a tombstone is none."""
        stored = self.groups.get(group_id)
        return stored is not None and stored.group.phase is not GroupPhase.DISSOLVED

    def is_sound(self, group_id: str, without: Collection[str] = ()) -> bool:
        """Whether the group lives and every record that concerns it agrees with that.

        Not so: a member has gone or was started anew, a record fell behind or was lost. Members
        `without` a registration may have none.
        """
        stored = self.groups.get(group_id)
        if stored is None or not self.is_live(group_id) or not stored.group.members:
            return False
        group = stored.group
        if group_id != group_id_of(group.members[0].worker_id):
            return False
        if group.epoch != self._last_epoch[group_id]:
            return False
        if not all(self._agrees(group, member, without) for member in group.members):
            return False
        present = [one for one in group.members if one.worker_id in self.workers]
        if group.phase is GroupPhase.DEGRADED or not present:
            return True
        return covers(group.members, self.workers[present[0].worker_id].num_layers)

    def group_of(self, worker_id: str) -> str | None:
        """The sound group that a worker is in, None without one."""
        stored = self.assignments.get(worker_id)
        if stored is None or not self.is_sound(stored.assignment.group_id):
            return None
        return stored.assignment.group_id

    def held_layers(self, worker: Worker) -> tuple[int, int]:
        """The layers that a worker holds for certain: all, unless it was given fewer since."""
        stored = self.assignments.get(worker.worker_id)
        if stored is not None and stored.assignment.incarnation == worker.incarnation:
            return stored.assignment.first_layer, stored.assignment.end_layer
        return 0, worker.num_layers

    def check_invariants(self) -> None:
        """Raise AssertionError if sound groups share a worker, or an epoch was forgotten."""
        for group_id, stored in self.groups.items():
            assert stored.group.epoch <= self._last_epoch[group_id]
        members = [
            member.worker_id
            for group_id, stored in self.groups.items()
            if self.is_sound(group_id)
            for member in stored.group.members
        ]
        assert len(members) == len(set(members)), "I3: a worker is in two groups"

    def _agrees(self, group: Group, member: Member, without: Collection[str]) -> bool:
        stored = self.assignments.get(member.worker_id)
        if stored is None or stored.assignment != assignment_of(group, member):
            return False
        worker = self.workers.get(member.worker_id)
        if worker is None:
            return member.worker_id in without
        return (worker.incarnation, worker.model) == (member.incarnation, group.model)

    def _forget_low_epochs(self) -> None:
        """Forget epochs of groups without a record that the floor covers."""
        if len(self._last_epoch) > len(self.groups):
            self._last_epoch = {
                group_id: epoch
                for group_id, epoch in self._last_epoch.items()
                if group_id in self.groups or epoch > self.epoch_floor
            }

    def _note_epoch(self, group: Group) -> None:
        last = self._last_epoch.get(group.group_id, 0)
        self._last_epoch[group.group_id] = max(last, group.epoch)


def assignment_of(group: Group, member: Member) -> Assignment:
    """The assignment that a commit of `group` gives to `member`."""
    return Assignment(
        member.worker_id,
        member.incarnation,
        group.group_id,
        group.epoch,
        member.first_layer,
        member.end_layer,
    )


def covers(members: Sequence[Member], num_layers: int) -> bool:
    """Whether the members run every layer once, in order."""
    end = 0
    for member in members:
        if member.first_layer != end or member.end_layer < end:
            return False
        end = member.end_layer
    return end == num_layers
