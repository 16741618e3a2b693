"""Groups for workers without one: new workers, and survivors of a group that lost a member."""

from collections.abc import Iterable

from services.core.groups.records import Records, assignment_of
from services.core.groups.vocabulary import (
    Assignment,
    Group,
    GroupPhase,
    Member,
    Transact,
    Worker,
)
from services.core.ids import group_id_of


def settle(
    records: Records, broken_id: str | None, names: Iterable[str], transaction_id: int, token: int
) -> Transact | None:
    """The transaction that gives each registered worker among `names` a group of its own.

    `broken_id` (None for none) is the group that they were in; it goes, unless its first worker
    wants its name again. None while another live group has the name of one.
    """
    wanting = {name for name in names if records.place_of(name) in (None, broken_id)}
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
    return records.held_by(worker)


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
