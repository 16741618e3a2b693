"""Which committed configuration this worker serves, read from the group records."""

from collections.abc import Iterable
from typing import NamedTuple

from services.common.membership import Directory
from services.common.records import to_group
from services.core.groups.vocabulary import StoredGroup
from tideserve.common.v1 import record_pb2


class Place(NamedTuple):
    """A group at an epoch, and whether this worker leads it; the default is none.

    `shared`: with other workers.
    """

    group_id: str = ""
    epoch: int = 0
    leads: bool = False
    shared: bool = False


NOWHERE = Place()


def place_of(groups: Iterable[record_pb2.GroupRecord], worker_id: str, incarnation: str) -> Place:
    """The newest group that has this incarnation as a member, if it is stable, or `NOWHERE`."""
    mine = [
        (group, number)
        for group in groups
        for number, member in enumerate(group.members)
        if member.worker_id == worker_id and member.incarnation == incarnation
    ]
    if not mine:
        return NOWHERE
    newest, number = max(mine, key=lambda found: found[0].epoch)
    if newest.phase != record_pb2.GROUP_PHASE_STABLE:
        return NOWHERE
    return Place(newest.group_id, newest.epoch, leads=number == 0, shared=len(newest.members) > 1)


def traceparent_of(groups: Iterable[record_pb2.GroupRecord], group_id: str, epoch: int) -> str:
    """The trace of the change that made this configuration of a group; "" if it has none."""
    for group in groups:
        if (group.group_id, group.epoch) == (group_id, epoch):
            return group.traceparent
    return ""


def stored_groups(directory: Directory[record_pb2.GroupRecord]) -> tuple[StoredGroup, ...]:
    """The group records as the member's fence reads them."""
    return tuple(
        StoredGroup(group, directory.entries[key].mod_revision)
        for key, record in directory.records.items()
        if (group := to_group(record)) is not None
    )
