"""Groups for workers without one: new workers, and survivors of a group that lost a member."""

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
"""Workers of one transaction: etcd takes 128 operations, and each worker is three comparisons."""


@dataclass(slots=True)
class DepartedWorkers:
    """Since when workers with records have not been registered, as this coordinator has seen."""

    _since_s: dict[str, float] = field(default_factory=dict)

    def note(self, records: Records, now_s: float) -> None:
        """A listing was read."""
        gone = records.assignments.keys() - records.workers.keys()
        self._since_s = {name: self._since_s.get(name, now_s) for name in gone}

    def away_s(self, worker_id: str, now_s: float) -> float:
        """For how long a worker with records has not been registered; 0 if it is."""
        return now_s - self._since_s.get(worker_id, now_s)

    def due(
        self, records: Records, now_s: float, gone_after_s: float, busy: set[str]
    ) -> tuple[str, ...]:
        """Some workers that have been away for so long, and whose records nothing needs."""
        long_gone = [name for name, at_s in self._since_s.items() if now_s - at_s >= gone_after_s]
        if not long_gone:
            return ()
        placed = {
            member.worker_id
            for group_id, stored in records.groups.items()
            if records.is_live(group_id)
            for member in stored.group.members
        }
        free = [
            name
            for name in sorted(long_gone)
            if name not in records.workers
            and name in records.assignments
            and name not in placed
            and not records.is_live(group_id_of(name))
            and not _keys((name,)) & busy
        ]
        return tuple(free[:REMOVED_MAX])


# Where workers are named after their pods, every rolling update leaves the assignments and
# tombstones of the old names behind. They fence: a worker that comes back under a name must get an
# epoch above every epoch that was ever seen under that name. One record does the same for all
# names that are forgotten: the epoch floor.
#
# Why that is safe. A worker's assignment has the largest epoch of all configurations with the
# worker in them, since a commit writes both, and the tombstone has the largest of all with its
# group's name. The transaction that removes them writes a floor at or above these epochs, and
# every later epoch is above the floor (`Records.next_epoch`). It compares the records that it
# removes, the floor that it replaces, and that the worker is not registered; so of two such
# transactions the later one sees the floor of the first, and none passes by a commit.
#
# The assignment alone remembers what a process holds. So a process that has been in a group
# registers again only in a transaction which compares that its assignment is there and its own;
# one that finds it gone ends, as its successor starts with all layers. Either that registration or
# the removal comes first, and the other one is then refused. No clock takes part in this: the time
# that a worker has been away only says when the removal is tried.
def remove_records(
    records: Records, names: Iterable[str], transaction_id: int, token: int
) -> Transact:
    """The transaction that removes the records of these workers."""
    forgotten = tuple(names)
    group_ids = [group_id_of(name) for name in forgotten]
    return Transact(
        transaction_id,
        token,
        groups=(),
        group_revisions={one: records.group_revision(one) for one in group_ids},
        assignment_revisions={name: records.assignment_revision(name) for name in forgotten},
        worker_revisions=dict.fromkeys(forgotten, 0),
        forgotten=forgotten,
        epoch_floor=records.next_epoch(group_ids, forgotten) - 1,
        floor_revision=records.floor_revision,
    )


def _keys(names: Iterable[str]) -> set[str]:
    names = tuple(names)
    return worker_keys(names) | group_keys(map(group_id_of, names))


def form_singletons(
    records: Records, broken_id: str | None, names: Iterable[str], transaction_id: int, token: int
) -> Transact | None:
    """The transaction that gives each registered worker among `names` a group of its own.

    `broken_id` (None for none) is the group that they were in; it goes, unless its first worker
    wants its name again. None while another live group has the name of one.
    """
    wanting = {name for name in names if records.group_of(name) in (None, broken_id)}
    homes = {group_id_of(name): name for name in wanting if name in records.workers}
    if any(records.is_live(group_id) and group_id != broken_id for group_id in homes):
        return None
    group_ids = sorted({*homes} if broken_id is None else {*homes, broken_id})
    epoch = records.next_epoch(group_ids, wanting)
    groups = tuple(
        _home(records, records.workers[homes[group_id]], epoch, broken_id)
        if group_id in homes
        else Group(group_id, epoch, GroupPhase.DISSOLVED, (), records.groups[group_id].group.model)
        for group_id in group_ids
    )
    assignments = [assignment_of(group, one) for group in groups for one in group.members]
    assignments += _placeless(records, wanting - set(homes.values()), broken_id, epoch)
    return Transact(
        transaction_id,
        token,
        groups=groups,
        assignments=tuple(assignments),
        group_revisions={one: records.group_revision(one) for one in group_ids},
        assignment_revisions={
            one.worker_id: records.assignment_revision(one.worker_id) for one in assignments
        },
        worker_revisions={name: records.workers[name].mod_revision for name in homes.values()},
    )


def _home(records: Records, worker: Worker, epoch: int, broken_id: str | None) -> Group:
    """A worker's own group, with the layers that it holds."""
    first, end = _held_by(records, worker, broken_id)
    whole = (first, end) == (0, worker.num_layers)
    phase = GroupPhase.STABLE if whole else GroupPhase.DEGRADED
    member = Member(worker.worker_id, worker.incarnation, first, end)
    return Group(group_id_of(worker.worker_id), epoch, phase, (member,), worker.model)


def _held_by(records: Records, worker: Worker, broken_id: str | None) -> tuple[int, int]:
    """By its assignment, or where that was lost, by the group that it was in."""
    broken = records.groups.get(broken_id) if broken_id is not None else None
    if not records.assignment_revision(worker.worker_id) and broken is not None:
        for member in broken.group.members:
            if (member.worker_id, member.incarnation) == (worker.worker_id, worker.incarnation):
                return member.first_layer, member.end_layer
    return records.held_layers(worker)


def _placeless(
    records: Records, names: Iterable[str], broken_id: str | None, epoch: int
) -> list[Assignment]:
    """Assignments to no group for workers that have gone; they keep the held layers."""
    stored = [records.assignments.get(name) for name in sorted(names)]
    return [
        Assignment(
            one.assignment.worker_id,
            one.assignment.incarnation,
            "",
            epoch,
            one.assignment.first_layer,
            one.assignment.end_layer,
        )
        for one in stored
        if one is not None and one.assignment.group_id == (broken_id or "")
    ]
