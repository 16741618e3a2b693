"""Which committed configuration this worker serves, read from the group records."""

from collections.abc import Iterable
from typing import NamedTuple

from tideserve.common.v1 import record_pb2


class Place(NamedTuple):
    """A group at an epoch, and whether this worker leads it; the default is none."""

    group_id: str = ""
    epoch: int = 0
    leads: bool = False


NOWHERE = Place()


def place_of(groups: Iterable[record_pb2.GroupRecord], worker_id: str, incarnation: str) -> Place:
    """The stable group that has this incarnation as a member, or `NOWHERE`."""
    for group in groups:
        if group.phase == record_pb2.GROUP_PHASE_STABLE:
            for number, member in enumerate(group.members):
                if member.worker_id == worker_id and member.incarnation == incarnation:
                    return Place(group.group_id, group.epoch, leads=number == 0)
    return NOWHERE
