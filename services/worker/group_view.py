"""Which committed epoch this worker serves, read from the group records."""

from collections.abc import Iterable

from tideserve.common.v1 import record_pb2


def epoch_of(groups: Iterable[record_pb2.GroupRecord], worker_id: str, incarnation: str) -> int:
    """Epoch of the stable group that has this incarnation as a member, 0 if there is none."""
    for group in groups:
        if group.phase == record_pb2.GROUP_PHASE_STABLE and any(
            member.worker_id == worker_id and member.incarnation == incarnation
            for member in group.members
        ):
            return group.epoch
    return 0
