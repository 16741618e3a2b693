"""Records of workers that have gone for good are removed, though epochs never go back.

Where workers are named after their pods, every rolling update leaves the assignments and tombstones
of the old names behind. They fence: a worker that comes back under a name must get an epoch above
every epoch that was ever seen under that name. One record does the same for all names that are
forgotten: the epoch floor.

Why that is safe. A worker's assignment has the largest epoch of all configurations with the worker
in them, since a commit writes both, and the tombstone has the largest of all with its group's name.
The transaction that removes them writes a floor at or above these epochs, and every later epoch is
above the floor (`Records.next_epoch`). It compares the records that it removes, the floor that it
replaces, and that the worker is not registered; so of two such transactions the later one sees the
floor of the first, and none passes by a commit.

The assignment alone remembers what a process holds. So a process that has been in a group
registers again only in a transaction which compares that its assignment is there and its own; one
that finds it gone ends, as its successor starts with all layers. Either that registration or the
removal comes first, and the other one is then refused. No clock takes part in this: the time that a
worker has been away only says when the removal is tried.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.core.groups.records import Records
from services.core.groups.vocabulary import Transact, group_keys, worker_keys
from services.core.ids import group_id_of

FORGOTTEN_MAX = 32
"""Workers of one transaction: etcd takes 128 operations, and each worker is three comparisons."""


@dataclass(slots=True)
class Departed:
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
        return tuple(free[:FORGOTTEN_MAX])


def forget(records: Records, names: Iterable[str], transaction_id: int, token: int) -> Transact:
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
