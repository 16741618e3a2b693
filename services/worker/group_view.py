"""Follows the group records in etcd, and derives this worker's committed group configuration.

An epoch numbers the configurations; an incarnation is the id of a worker process.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from services.common.etcd import Store
from services.common.membership import GROUPS, Directory
from services.common.records import to_group
from services.core.groups.vocabulary import Group, GroupPhase, StoredGroup
from tideserve.common.v1 import record_pb2


class Place(NamedTuple):
    """A worker's role in a group at an epoch: `leads`; `shared`: the group has other members."""

    group_id: str
    epoch: int
    leads: bool = False
    shared: bool = False


class GroupView:
    """The group records and this worker's place in them, kept current while `run` runs."""

    def __init__(
        self, store: Store, worker_id: str, incarnation: str, on_change: Callable[[], None]
    ) -> None:
        """`on_change` is called after every change of the records."""
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._on_change = on_change
        self._directory = Directory(store, GROUPS, record_pb2.GroupRecord, self._read)
        self.groups: tuple[StoredGroup, ...] = ()
        self.place: Place | None = None

    async def run(self) -> None:
        """Follow etcd until cancelled."""
        await self._directory.run()

    @property
    def rollbacks(self) -> int:
        """How often etcd had lost writes before `groups` were read."""
        return self._directory.rollbacks

    def traceparent_of(self, group_id: str, epoch: int) -> str:
        """The traceparent of the change to this configuration; "" if it is not traced."""
        for stored in self.groups:
            if (stored.group.group_id, stored.group.epoch) == (group_id, epoch):
                return stored.group.traceparent
        return ""

    def _read(self) -> None:
        self.groups = stored_groups(self._directory)
        groups = (stored.group for stored in self.groups)
        self.place = place_of(groups, self._worker_id, self._incarnation)
        self._on_change()


def place_of(groups: Iterable[Group], worker_id: str, incarnation: str) -> Place | None:
    """The place of this incarnation in its newest group; None if that group is not stable."""
    own = [
        (group, number)
        for group in groups
        for number, member in enumerate(group.members)
        if (member.worker_id, member.incarnation) == (worker_id, incarnation)
    ]
    newest, number = max(own, key=lambda entry: entry[0].epoch, default=(None, 0))
    if newest is None or newest.phase is not GroupPhase.STABLE:
        return None
    return Place(newest.group_id, newest.epoch, leads=number == 0, shared=len(newest.members) > 1)


def stored_groups(directory: Directory[record_pb2.GroupRecord]) -> tuple[StoredGroup, ...]:
    """The groups of the valid records, with the revisions that fence changes by old leaders."""
    return tuple(
        StoredGroup(group, directory.entries[key].mod_revision)
        for key, record in directory.records.items()
        if (group := to_group(record)) is not None
    )
