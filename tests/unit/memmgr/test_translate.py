"""Records to groups and back; what cannot be read still fences."""

import pytest

from services.common.etcd import Entry
from services.common.membership import ASSIGNMENTS, GROUPS, WORKERS, decode_record, encode_record
from services.core.memory.group_vocabulary import (
    Assignment,
    Group,
    GroupPhase,
    Member,
    StoredAssignment,
    StoredGroup,
    Worker,
)
from services.memmgr.translate import (
    InvalidReport,
    RecordReader,
    to_assignment_record,
    to_get_cluster,
    to_record,
    to_worker_memory,
)
from tests.support.control_plane import worker_record
from tideserve.common.v1 import record_pb2
from tideserve.memmgr.v1 import memmgr_pb2

STABLE = Group("group-w0", 4, GroupPhase.STABLE, (Member("w0", "w0-a", 2, 5),), "m", "7-1")
TOMBSTONE = Group("group-w0", 5, GroupPhase.DISSOLVED, (), "m")


def stored(value: bytes) -> StoredGroup:
    (one,) = RecordReader().read({f"{GROUPS}group-w0": Entry(value, 3, 9)}).groups
    return one


@pytest.mark.parametrize("group", [STABLE, TOMBSTONE])
def test_a_group_survives_the_store(group: Group) -> None:
    assert stored(encode_record(to_record(group))) == StoredGroup(group, 9)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"{}",
        encode_record(record_pb2.GroupRecord(group_id="group-w0", epoch=3)),
        encode_record(
            record_pb2.GroupRecord(group_id="another", epoch=3, phase=record_pb2.GROUP_PHASE_STABLE)
        ),
        encode_record(
            record_pb2.GroupRecord(
                group_id="group-w0", epoch=-3, phase=record_pb2.GROUP_PHASE_STABLE
            )
        ),
        b'{"groupId": "group-w0", "epoch": "3", "phase": 77}',
    ],
)
def test_an_unreadable_record_counts_as_a_tombstone_at_its_revision(value: bytes) -> None:
    assert stored(value) == StoredGroup(Group("group-w0", 9, GroupPhase.DISSOLVED, (), ""), 9)


def test_unknown_fields_are_ignored() -> None:
    record = decode_record(record_pb2.GroupRecord, b'{"groupId": "g", "later": 1}')
    assert record == record_pb2.GroupRecord(group_id="g")


def test_workers_whose_record_contradicts_the_key_are_left_out() -> None:
    records = {
        "w0": worker_record(num_layers=30),
        "w1": worker_record("w2"),
        "w3": worker_record("w3", incarnation=""),
    }
    entries = {
        f"{WORKERS}{name}": Entry(encode_record(record), 3, 9) for name, record in records.items()
    }
    assert RecordReader().read(entries).workers == (Worker("w0", "w0-a", "m", 30, 9),)


ASSIGNMENT = Assignment("w0", "w0-a", "group-w1", 4, 2, 5)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (encode_record(to_assignment_record(ASSIGNMENT)), ASSIGNMENT),
        (b"{", Assignment("w0", "", "", 0)),
    ],
)
def test_an_assignment_survives_the_store_and_fences_if_it_does_not(
    value: bytes, found: Assignment
) -> None:
    listing = RecordReader().read({f"{ASSIGNMENTS}w0": Entry(value, 3, 9)})
    assert listing.assignments == (StoredAssignment(found, 9),)


def memory(**changes: object) -> memmgr_pb2.WorkerMemory:
    fields: dict[str, object] = {
        "worker_id": "w0",
        "incarnation": "w0-a",
        "budget_bytes": 2**40,
        "parameter_bytes": 5,
        "staging_bytes": 6,
        "kv_blocks_total": 10,
        "kv_blocks_free": 7,
        "kv_block_bytes": 8,
        "running": 1,
        "waiting": 2,
        "preemptions_total": 3,
        "pids": [11, 12],
    }
    return memmgr_pb2.WorkerMemory(**(fields | changes))  # type: ignore[arg-type]


def test_a_memory_report_survives() -> None:
    report = memmgr_pb2.ReportMemoryRequest(memory=memory())
    answer = to_get_cluster([to_worker_memory(report)], [STABLE])
    assert list(answer.workers) == [memory()]
    assert list(answer.groups) == [to_record(STABLE)]


@pytest.mark.parametrize(
    "changes",
    [
        {"worker_id": ""},
        {"incarnation": ""},
        {"budget_bytes": -1},
        {"preemptions_total": -1},
        {"kv_blocks_free": 11},
    ],
)
def test_impossible_reports(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidReport):
        to_worker_memory(memmgr_pb2.ReportMemoryRequest(memory=memory(**changes)))
