"""Builds transactions for singleton groups, and for the removal of departed workers' records.

A *singleton group* has a single worker: a new worker, or a survivor of a group that lost a member.
An *assignment* is the record of a worker's group and layers; a *tombstone* is the record of a
dissolved group.

Where workers are named after pods, every rolling update leaves assignments and tombstones of the
old names behind. Their epochs are needed: if a worker returns under a name, its configurations must
have epochs above all earlier epochs of that name, or members would take them for outdated. A single
record, the *epoch floor*, replaces the epochs of all removed names.

Safety. A worker's assignment has the highest epoch of all configurations with the worker, since a
commit writes both; the tombstone has the highest epoch of its group id. The removing transaction
writes a floor that is not below these epochs, and every later epoch is above the floor
(`Records.next_epoch`). The transaction compares the records that it removes and the floor that it
replaces, and requires that the worker is not registered. So the later of two removals sees the
floor of the first, and a removal cannot miss a concurrent commit.

The assignment is also the only record of the layers that a process holds. So a process that has
been in a group registers again only in a transaction that compares its own assignment; if that was
removed, the process exits, and its successor starts with all layers. Of that registration and the
removal, the first to commit wins. Safety does not depend on clocks: the time of absence only
decides when a removal is tried.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.core.groups.records import Records, assignment_of
from services.core.groups.vocabulary import (
    Assignment,
    Group,
    GroupPhase,
    Member,
    Transact,
    Worker,
    group_keys,
    worker_keys,
)
from services.core.ids import group_id_of

REMOVED_MAX = 32
"""Workers per transaction: etcd allows 128 operations, and each worker needs 3 comparisons."""


@dataclass(slots=True)
class DepartedWorkers:
    """Workers with records but without a registration, and since when."""

    _since_s: dict[str, float] = field(default_factory=dict)  # first seen absent, by worker

    def note(self, records: Records, now_s: float) -> None:
        """Update the absences from the current records."""
        gone = records.assignments.keys() - records.workers.keys()
        self._since_s = {name: self._since_s.get(name, now_s) for name in gone}

    def away_s(self, worker_id: str, now_s: float) -> float:
        """Seconds that a worker has been absent; 0 if it is registered."""
        return now_s - self._since_s.get(worker_id, now_s)

    def due(
        self, records: Records, now_s: float, gone_after_s: float, busy: set[str]
    ) -> tuple[str, ...]:
        """Up to `REMOVED_MAX` absent workers whose records may be removed and are not `busy`."""
        long_absent = [name for name, at_s in self._since_s.items() if now_s - at_s >= gone_after_s]
        if not long_absent:
            return ()
        # Keep the records of members of a live group, since its repair needs their assignments.
        placed = {
            member.worker_id
            for group_id, stored in records.groups.items()
            if records.is_live(group_id)
            for member in stored.group.members
        }
        removable = [
            name
            for name in sorted(long_absent)
            if name not in records.workers
            and name in records.assignments
            and name not in placed
            and not records.is_live(group_id_of(name))
            and not _keys((name,)) & busy
        ]
        return tuple(removable[:REMOVED_MAX])


def remove_records(
    records: Records, names: Iterable[str], transaction_id: int, token: int
) -> Transact:
    """The transaction that removes the records of these workers and raises the floor."""
    removed_workers = tuple(names)
    group_ids = [group_id_of(name) for name in removed_workers]
    return Transact(
        transaction_id,
        token,
        groups=(),
        group_revisions={key: records.group_revision(key) for key in group_ids},
        assignment_revisions={name: records.assignment_revision(name) for name in removed_workers},
        worker_revisions=dict.fromkeys(removed_workers, 0),  # none may have registered meanwhile
        removed_workers=removed_workers,
        epoch_floor=records.next_epoch(group_ids, removed_workers) - 1,
        floor_revision=records.floor_revision,
    )


def _keys(names: Iterable[str]) -> set[str]:
    names = tuple(names)
    return worker_keys(names) | group_keys(map(group_id_of, names))


def form_singletons(
    records: Records, broken_id: str | None, names: Iterable[str], transaction_id: int, token: int
) -> Transact | None:
    """The transaction that puts each registered worker among `names` into a singleton group.

    `broken_id` is the id of their present group, if any; that group is dissolved, unless the new
    group of its first worker reuses the id. Returns None while another live group has an id that a
    new group needs.
    """
    unplaced = {name for name in names if records.group_of(name) in (None, broken_id)}
    owners = {group_id_of(name): name for name in unplaced if name in records.workers}
    if any(records.is_live(group_id) and group_id != broken_id for group_id in owners):
        return None
    group_ids = sorted({*owners} if broken_id is None else {*owners, broken_id})
    epoch = records.next_epoch(group_ids, unplaced)
    groups = tuple(
        _singleton(records, records.workers[owners[group_id]], epoch, broken_id)
        if group_id in owners
        else Group(group_id, epoch, GroupPhase.DISSOLVED, (), records.groups[group_id].group.model)
        for group_id in group_ids
    )
    assignments = [assignment_of(group, member) for group in groups for member in group.members]
    # Absent members get an assignment, too: its epoch shows them that they left, if they return.
    assignments += _absent_assignments(records, unplaced - set(owners.values()), broken_id, epoch)
    return Transact(
        transaction_id,
        token,
        groups=groups,
        assignments=tuple(assignments),
        group_revisions={key: records.group_revision(key) for key in group_ids},
        assignment_revisions={
            a.worker_id: records.assignment_revision(a.worker_id) for a in assignments
        },
        worker_revisions={name: records.workers[name].create_revision for name in owners.values()},
    )


def _singleton(records: Records, worker: Worker, epoch: int, broken_id: str | None) -> Group:
    """A worker's singleton group; DEGRADED unless the worker holds all layers."""
    first, end = _held_layers(records, worker, broken_id)
    whole = (first, end) == (0, worker.num_layers)
    phase = GroupPhase.STABLE if whole else GroupPhase.DEGRADED
    member = Member(worker.worker_id, worker.incarnation, first, end)
    return Group(group_id_of(worker.worker_id), epoch, phase, (member,), worker.model)


def _held_layers(records: Records, worker: Worker, broken_id: str | None) -> tuple[int, int]:
    """The worker's resident layers, by its assignment or, if that was lost, by its last group."""
    broken = records.groups.get(broken_id) if broken_id is not None else None
    if not records.assignment_revision(worker.worker_id) and broken is not None:
        for member in broken.group.members:
            if (member.worker_id, member.incarnation) == (worker.worker_id, worker.incarnation):
                return member.first_layer, member.end_layer
    return records.held_layers(worker)


def _absent_assignments(
    records: Records, names: Iterable[str], broken_id: str | None, epoch: int
) -> list[Assignment]:
    """Assignments to no group for absent workers, with their resident layers."""
    stored = [records.assignments.get(name) for name in sorted(names)]
    return [
        Assignment(
            entry.assignment.worker_id,
            entry.assignment.incarnation,
            "",
            epoch,
            entry.assignment.first_layer,
            entry.assignment.end_layer,
        )
        for entry in stored
        if entry is not None and entry.assignment.group_id == (broken_id or "")
    ]
