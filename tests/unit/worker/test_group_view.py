"""A worker reads its place from the group records."""

import pytest

from services.worker.group_view import NOWHERE, Place, place_of
from tideserve.common.v1 import record_pb2


def group(group_id: str, epoch: int, *worker_ids: str, dissolved: bool = False):
    return record_pb2.GroupRecord(
        group_id=group_id,
        epoch=epoch,
        phase=record_pb2.GROUP_PHASE_DISSOLVED if dissolved else record_pb2.GROUP_PHASE_STABLE,
        members=[
            record_pb2.GroupMember(worker_id=worker_id, incarnation=f"{worker_id}-a")
            for worker_id in worker_ids
        ],
    )


@pytest.mark.parametrize(
    ("worker_id", "place"),
    [
        ("w0", Place("group-w0", 3, leads=True, shared=True)),
        ("w1", Place("group-w0", 3, leads=False, shared=True)),
        ("w2", NOWHERE),
    ],
)
def test_the_first_member_of_a_merged_group_leads(worker_id: str, place: Place) -> None:
    records = [
        group("group-w0", 3, "w0", "w1"),
        group("group-w1", 3, "w1", dissolved=True),
        group("group-w2", 1),
    ]
    assert place_of(records, worker_id, f"{worker_id}-a") == place


def test_another_incarnation_is_not_a_member() -> None:
    assert place_of([group("group-w0", 3, "w0")], "w0", "w0-b") == NOWHERE
    assert not NOWHERE.leads
