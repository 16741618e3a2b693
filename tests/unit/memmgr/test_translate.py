"""Records to groups and back; unreadable records still fence."""

import math
from dataclasses import replace

import pytest

from services.common.etcd import Entry
from services.common.membership import ASSIGNMENTS, GROUPS, WORKERS
from services.common.records import (
    decode_record,
    encode_record,
    to_assignment_record,
    to_group_record,
    to_shape_record,
)
from services.common.report import InvalidReport, to_memory_report
from services.core.demand import ModelDemand
from services.core.groups.layer_map import ModelShape
from services.core.groups.vocabulary import (
    Assignment,
    Group,
    GroupPhase,
    Member,
    StoredAssignment,
    StoredGroup,
    Worker,
)
from services.core.overload.events import Action, Cause, Decision, DecisionReason, ModelLoad
from services.core.overload.worker_facts import WorkerFacts
from services.memmgr.overload_watch import LoggedDecision
from services.memmgr.translate import (
    MODELS_MAX,
    to_demands,
    to_get_cluster,
)
from services.memmgr.translate_record import Listing, RecordReader
from services.scheduler.translate import to_demand_report
from tests.support.control_plane import worker_record
from tideserve.common.v1 import record_pb2
from tideserve.memmgr.v1 import memmgr_pb2

STABLE = Group("group-w0", 4, GroupPhase.STABLE, (Member("w0", "w0-a", 2, 5),), "m", "7-1")
TOMBSTONE = Group("group-w0", 5, GroupPhase.DISSOLVED, (), "m")


def stored(value: bytes) -> StoredGroup:
    (group,) = RecordReader().read({f"{GROUPS}group-w0": Entry(value, 3, 9)}).groups
    return group


def listed(*workers: record_pb2.WorkerRecord) -> Listing:
    entries = {
        f"{WORKERS}{worker.worker_id}": Entry(encode_record(worker), 3, 9) for worker in workers
    }
    return RecordReader().read(entries)


@pytest.mark.parametrize("group", [STABLE, TOMBSTONE])
def test_a_group_round_trips(group: Group) -> None:
    assert stored(encode_record(to_group_record(group))) == StoredGroup(group, 9)


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
    settings = "block_size 16, max_batch_tokens 0, max_model_len 0"
    records = {
        "w0": worker_record(shape=record_pb2.ModelShape(num_layers=30)),
        "w1": worker_record("w2"),
        "w3": worker_record("w3", incarnation=""),
    }
    entries = {
        f"{WORKERS}{name}": Entry(encode_record(record), 3, 9) for name, record in records.items()
    }
    assert RecordReader().read(entries).workers == (
        Worker("w0", "w0-a", "m", 30, 3, settings=settings),
    )


ASSIGNMENT = Assignment("w0", "w0-a", "group-w1", 4, 2, 5)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (encode_record(to_assignment_record(ASSIGNMENT)), ASSIGNMENT),
        (b"{", Assignment("w0", "", "", 0)),
    ],
)
def test_an_assignment_round_trips_and_an_unreadable_one_fences(
    value: bytes, expected: Assignment
) -> None:
    listing = RecordReader().read({f"{ASSIGNMENTS}w0": Entry(value, 3, 9)})
    assert listing.assignments == (StoredAssignment(expected, 9),)


def test_a_memory_report_round_trips() -> None:
    """For its fields and validation see `tests/unit/common/test_report.py`."""
    memory = memmgr_pb2.WorkerMemory(worker_id="w0", incarnation="w0-a", budget_bytes=2**40)
    answer = to_get_cluster([to_memory_report(memory)], [STABLE])
    assert list(answer.workers) == [memory]
    assert list(answer.groups) == [to_group_record(STABLE)]


def demand(**changes: object) -> memmgr_pb2.ModelDemand:
    fields: dict[str, object] = {
        "model": "m",
        "queued": 1,
        "queued_tokens": 2,
        "refused": 3,
        "refused_tokens": 2**40,
        "arriving_tokens_per_s": 5.5,
    }
    return memmgr_pb2.ModelDemand(**(fields | changes))  # type: ignore[arg-type]


def test_a_demand_report_round_trips() -> None:
    demands = (
        ModelDemand("m", 1, 2, 3, 2**40, 5.5),
        ModelDemand("n", 1, 1, batch_queued=7, batch_queued_tokens=2**40),
        ModelDemand("o", prompt_tokens_per_s=1.5, output_tokens_per_s=2.5, tpot_s=0.25),
    )
    assert to_demands(to_demand_report(demands)) == demands


@pytest.mark.parametrize(
    "demands",
    [
        [demand(queued=-1)],
        [demand(queued_tokens=-1)],
        [demand(refused_tokens=-1)],
        [demand(batch_queued=-1)],
        [demand(arriving_tokens_per_s=math.nan)],
        [demand(arriving_tokens_per_s=math.inf)],
        [demand(prompt_tokens_per_s=-1)],
        [demand(tpot_s=math.nan)],
        [demand(model="")],
        [demand(), demand()],
        [demand(model=f"m{number}") for number in range(MODELS_MAX + 1)],
    ],
)
def test_impossible_demands_are_refused(demands: list[memmgr_pb2.ModelDemand]) -> None:
    with pytest.raises(InvalidReport):
        to_demands(memmgr_pb2.ReportDemandRequest(demands=demands))


def test_decisions_are_shown_with_their_numbers() -> None:
    load = ModelLoad(2200, 100, 2000, 1900, 1800, 1, 398, 1, 7, 5)
    reason = DecisionReason(Cause.OVERLOAD, 2000, 0.25, 0.2, load)
    logged = LoggedDecision(9, Decision(1.0, "m", Action.MERGE, reason, 300, ("g",), (2,)))
    (shown,) = to_get_cluster([], [], [logged]).decisions
    assert shown == memmgr_pb2.Decision(
        decided_unix_s=9,
        model="m",
        action=memmgr_pb2.DECISION_ACTION_MERGE,
        cause=memmgr_pb2.DECISION_CAUSE_OVERLOAD,
        needed_tokens=300,
        group_ids=["g"],
        threshold_tokens=2000,
        held_s=0.25,
        dwell_s=0.2,
        demand_tokens=2200,
        forecast_tokens=100,
        capacity_tokens=2000,
        undropped_tokens=1900,
        used_tokens=1800,
        waiting_tokens=1,
        queued_tokens=398,
        refused_tokens=1,
        waiting=7,
        stuck_tokens=5,
        parts=[2],
    )


def test_memory_facts_of_a_worker_are_translated() -> None:
    shape = ModelShape(30, 7, 5, 3, True, 2, 7.0, 0.0, 5.0)
    record = worker_record(
        shape=to_shape_record(shape),
        arena_bytes=99,
        address="10.0.0.7:80",
        max_batch_tokens=256,
        max_model_len=512,
        context_tokens=4096,
    )
    facts = listed(record, worker_record("w1", block_size=0)).facts
    settings = "block_size 16, max_batch_tokens 256, max_model_len 4096"
    expected = WorkerFacts("w0", "m", 16, 100, 99, shape, ("10.0.0.7",), True, settings=settings)
    assert facts == {"w0": replace(expected, max_batch_tokens=256)}
    record.chunk_bytes = 11
    assert listed(record).facts["w0"].chunk_bytes == 11
    record.location.extend(["zone-a", "rack-3", "host-7"])
    assert listed(record).facts["w0"].location == ("zone-a", "rack-3", "host-7")
    silent = listed(worker_record(capabilities=[])).facts["w0"]
    assert (silent.shape, silent.can_drop, silent.draining) == (None, False, False)
    assert listed(worker_record(draining=True)).facts["w0"].draining
