"""The coordinator's view of the records in etcd, and whether they are consistent.

Terms: a *listing* is a snapshot of all records at an etcd revision. An *assignment* is the record
of a worker's group and layers. A *tombstone* is the record of a dissolved group. The *epoch floor*
is a record with a lower bound of new epochs (see `singleton_groups`).
"""

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
    """The newest listing plus this coordinator's later commits. Revisions never decrease.

    Keeps the highest epoch of every group, even if the store lost the record: members would
    discard a configuration with a reused epoch. Epochs up to the floor need not be kept.
    """

    revision: int = 0  # of the newest known write
    workers: dict[str, Worker] = field(default_factory=dict)  # registered (leases), by id
    groups: dict[str, StoredGroup] = field(default_factory=dict)  # by id, tombstones included
    assignments: dict[str, StoredAssignment] = field(default_factory=dict)  # by worker id
    epoch_floor: int = 0  # new epochs are higher
    floor_revision: int = 0  # of the floor's record
    _listed: int = 0  # revision of the newest listing
    _last_epoch: dict[str, int] = field(default_factory=dict)  # highest epoch seen, by group

    def take(self, listed: ClusterListed) -> None:
        """Replace all records by a listing; an outdated listing is ignored."""
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
        """Apply this coordinator's own commit at `revision`, before the watch delivers it.

        Replies to concurrent commits may arrive in any order, since such commits share no record.
        """
        for group in written.groups:
            self._note_epoch(group)
        self.epoch_floor = max(self.epoch_floor, written.epoch_floor)
        if revision <= self._listed:
            return  # the listing already contains this commit or a later state
        self.revision = max(self.revision, revision)
        for group in written.groups:
            self.groups[group.group_id] = StoredGroup(group, revision)
        for assignment in written.assignments:
            stored = StoredAssignment(assignment, revision)
            self.assignments[assignment.worker_id] = stored
        if written.removed_workers:
            self.floor_revision = revision
            for worker_id in written.removed_workers:
                self.assignments.pop(worker_id, None)
                self.groups.pop(group_id_of(worker_id), None)
            self._forget_low_epochs()

    def next_epoch(self, group_ids: Iterable[str], worker_ids: Iterable[str]) -> int:
        """The lowest epoch above every earlier epoch of these groups and workers."""
        epochs = [self.epoch_floor]
        epochs += [self._last_epoch.get(group_id, 0) for group_id in group_ids]
        epochs += [
            stored.assignment.epoch
            for worker_id in worker_ids
            if (stored := self.assignments.get(worker_id)) is not None
        ]
        return 1 + max(epochs)

    def group_revision(self, group_id: str) -> int:
        """Revision of a group's record; 0 if absent."""
        stored = self.groups.get(group_id)
        return stored.mod_revision if stored is not None else 0

    def assignment_revision(self, worker_id: str) -> int:
        """Revision of a worker's assignment; 0 if absent."""
        stored = self.assignments.get(worker_id)
        return stored.mod_revision if stored is not None else 0

    def is_live(self, group_id: str) -> bool:
        """Whether the group exists and is not dissolved; it need not be sound."""
        stored = self.groups.get(group_id)
        return stored is not None and stored.group.phase is not GroupPhase.DISSOLVED

    def is_sound(self, group_id: str, without: Collection[str] = ()) -> bool:
        """Whether the group is live and consistent with all records of its members.

        A group is not sound if a member's lease ended, a member restarted, or a record is outdated
        or lost. Members in `without` may be unregistered.
        """
        stored = self.groups.get(group_id)
        if stored is None or not self.is_live(group_id) or not stored.group.members:
            return False
        group = stored.group
        if group_id != group_id_of(group.members[0].worker_id):
            return False
        # If the epoch is lower than the last seen, the store lost the newer record.
        if group.epoch != self._last_epoch[group_id]:
            return False
        if not all(self._agrees(group, member, without) for member in group.members):
            return False
        present = [member for member in group.members if member.worker_id in self.workers]
        if group.phase is GroupPhase.DEGRADED or not present:
            return True
        return covers(group.members, self.workers[present[0].worker_id].num_layers)

    def group_of(self, worker_id: str) -> str | None:
        """Id of the worker's sound group; None without such a group."""
        stored = self.assignments.get(worker_id)
        if stored is None or not self.is_sound(stored.assignment.group_id):
            return None
        group = self.groups[stored.assignment.group_id].group
        # A restored assignment may name a group that was formed again without the worker.
        is_member = any(member.worker_id == worker_id for member in group.members)
        return group.group_id if is_member else None

    def held_layers(self, worker: Worker) -> tuple[int, int]:
        """The worker's resident layers, first and end: all, unless its assignment has fewer."""
        stored = self.assignments.get(worker.worker_id)
        if stored is not None and stored.assignment.incarnation == worker.incarnation:
            return stored.assignment.first_layer, stored.assignment.end_layer
        return 0, worker.num_layers

    def check_invariants(self) -> None:
        """Raise AssertionError if sound groups share a worker, or an epoch was lost."""
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
        """Remove epochs up to the floor of groups without a record."""
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
    """The assignment that a commit of `group` writes for `member`."""
    return Assignment(
        member.worker_id,
        member.incarnation,
        group.group_id,
        group.epoch,
        member.first_layer,
        member.end_layer,
    )


def covers(members: Sequence[Member], num_layers: int) -> bool:
    """Whether the members' stages cover layers 0 to `num_layers` - 1 once, in order."""
    end = 0
    for member in members:
        if member.first_layer != end or member.end_layer < end:
            return False
        end = member.end_layer
    return end == num_layers
