"""The codec of etcd records: round trips and invalid records."""

from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import Message

from services.common.etcd import Entry
from services.common.membership import ASSIGNMENTS, GROUPS, ROLES, WORKERS
from services.common.records import (
    CAN_DROP,
    GENERATE,
    build_of,
    can_serve,
    capabilities_of,
    decode_record,
    encode_record,
    engine_of,
    is_valid,
    paced_of,
    read_record,
    scheduling_fault,
    to_assignment,
    to_assignment_record,
    to_cost_model,
    to_cost_record,
    to_facts,
    to_group,
    to_group_record,
    to_role,
    to_role_number,
    to_role_record,
    to_shape,
    to_shape_record,
    to_worker,
)
from services.core.cost.model import Coefficients, CostModel
from services.core.engine_kind import EngineKind
from services.core.groups.layer_map import ModelShape
from services.core.groups.vocabulary import Assignment, Group, GroupPhase, Member
from services.core.role import Role
from services.memmgr.translate_record import RecordReader
from services.scheduler import translate as scheduler
from tests.support.control_plane import group_record, worker_record
from tideserve.common.v1 import adapter_pb2, record_pb2

MEMBERS = (Member("w0", "w0-a", 0, 2), Member("w1", "w1-a", 2, 4))
GROUP = Group("group-w0", 4, GroupPhase.STABLE, MEMBERS, "m", "7-1", "00-1-2-01")
WHOLE = worker_record()
STABLE = record_pb2.GROUP_PHASE_STABLE


@pytest.mark.parametrize("phase", GroupPhase)
def test_a_group_round_trips(phase: GroupPhase) -> None:
    group = replace(GROUP, phase=phase)
    value = encode_record(to_group_record(group))
    record = read_record(record_pb2.GroupRecord, f"{GROUPS}group-w0", value)
    assert record is not None and to_group(record) == group


@pytest.mark.parametrize("role", Role)
def test_a_role_round_trips(role: Role) -> None:
    value = encode_record(to_role_record("w0", role, 12.5))
    record = read_record(record_pb2.RoleRecord, f"{ROLES}w0", value)
    assert record is not None and to_role(record) == role and record.since_s == 12.5
    assert to_role(worker_record(role=to_role_number(role))) == role
    assert to_role(worker_record()) is None


def test_invalid_role_records_are_skipped() -> None:
    entries = {
        f"{ROLES}w0": Entry(encode_record(to_role_record("w0", Role.PREFILL, 1.0)), 3, 3),
        f"{ROLES}w1": Entry(encode_record(to_role_record("w0", Role.DECODE, 1.0)), 4, 4),
        f"{ROLES}w2": Entry(b"{}", 5, 5),
    }
    assert RecordReader().read(entries).roles == {"w0": Role.PREFILL}


def test_an_assignment_round_trips() -> None:
    assignment = Assignment("w0", "w0-a", "group-w1", 4, 2, 5)
    value = encode_record(to_assignment_record(assignment))
    record = read_record(record_pb2.AssignmentRecord, f"{ASSIGNMENTS}w0", value)
    assert record is not None and to_assignment(record) == assignment


def test_a_shape_round_trips() -> None:
    shape = ModelShape(30, 7, 5, 3, True, 2, 7.0, 0.0, 5.0)
    record = to_shape_record(shape)
    assert record is not None and to_shape(record) == shape
    assert to_shape_record(None) is None


@pytest.mark.parametrize(
    "model",
    [
        CostModel(1e-8, 1e-4, 0.02, 0.01),
        CostModel(1e-8, 1e-4, 0.02, 0.01, Coefficients(1e-7, 1e-5, 0.01), 1e-9, 64, 1e-5),
    ],
)
def test_a_cost_model_round_trips(model: CostModel) -> None:
    value = encode_record(worker_record(cost_model=to_cost_record(model)))
    record = read_record(record_pb2.WorkerRecord, f"{WORKERS}w0", value)
    assert record is not None and to_cost_model(record) == model


@pytest.mark.parametrize(
    "costs",
    [
        None,
        record_pb2.CostModel(),
        record_pb2.CostModel(alpha_s=-1.0, beta_s=1.0),
        record_pb2.CostModel(beta_s=float("inf")),
        record_pb2.CostModel(beta_s=float("nan")),
        record_pb2.CostModel(alpha_s=1e307, beta_s=1.0),
        record_pb2.CostModel(beta_s=1e308),
        record_pb2.CostModel(beta_s=1.0, decode=record_pb2.DecodeCosts(alpha_s=1.0, beta_s=1e308)),
        record_pb2.CostModel(beta_s=1.0, gamma_s=0.1, lambda_s=0.2),
        record_pb2.CostModel(beta_s=1.0, decode=record_pb2.DecodeCosts()),
        record_pb2.CostModel(beta_s=1.0, knee_tokens=-1),
    ],
)
def test_workers_without_coefficients_have_no_cost_model(
    costs: record_pb2.CostModel | None,
) -> None:
    """Workers of earlier releases publish none."""
    assert to_cost_model(worker_record(cost_model=costs)) is None
    assert to_cost_record(None) is None


@pytest.mark.parametrize("engine", EngineKind)
@pytest.mark.parametrize("paced", [None, "A100-14B"])
@pytest.mark.parametrize("hands_over", [False, True])
@pytest.mark.parametrize("can_drop", [False, True])
def test_capabilities_list_engine_and_build(
    can_drop: bool, hands_over: bool, paced: str | None, engine: EngineKind
) -> None:
    capabilities = capabilities_of(can_drop, paced, engine, hands_over)
    record = worker_record(capabilities=capabilities)
    facts = to_facts(record)
    assert facts is not None and facts.hands_over == hands_over
    assert GENERATE in record.capabilities
    assert (CAN_DROP in record.capabilities) == can_drop
    assert to_worker(record, 9).can_drop == can_drop
    assert paced_of(record) == paced
    assert engine_of(record) == engine


def test_a_vllm_worker_cannot_merge() -> None:
    record = worker_record(capabilities=capabilities_of(False, None, EngineKind.VLLM))
    facts = to_facts(record)
    assert facts is not None and not facts.can_drop and facts.shape is None
    assert (to_worker(record, 9).num_layers, can_serve(record)) == (0, True)


def test_a_record_without_an_engine_means_tideserve() -> None:
    assert engine_of(worker_record()) == EngineKind.TIDESERVE


def test_the_build_of_a_worker_is_its_protocol_and_its_code() -> None:
    assert build_of(worker_record()) == ""
    record = worker_record(protocol_version=3, code_digest="abc")
    assert build_of(record) == to_worker(record, 9).build == "3:abc"
    facts = to_facts(record)
    assert facts is not None and facts.build == "3:abc"


INVALID_GROUPS: list[dict[str, Any]] = [
    {"group_id": ""},
    {"group_id": "group-w9"},
    {"epoch": 0},
    {"epoch": -3},
    {"phase": record_pb2.GROUP_PHASE_UNSPECIFIED},
    {"phase": 77},
]


@pytest.mark.parametrize("changes", INVALID_GROUPS)
def test_all_readers_agree_which_groups_there_are(changes: dict[str, Any]) -> None:
    """A worker's directory, the gateway's, the scheduler's, and the memory manager's reader."""
    record = group_record(WHOLE, epoch=4)
    key = f"{GROUPS}group-w0"
    assert read_record(record_pb2.GroupRecord, key, encode_record(record)) == record
    assert scheduler.to_group(record, {"w0": WHOLE}) is not None
    for name, value in changes.items():
        setattr(record, name, value)
    value = encode_record(record)
    assert read_record(record_pb2.GroupRecord, key, value) is None
    # For the fence it is a tombstone above every epoch that it may have had.
    (stored,) = RecordReader().read({key: Entry(value, 3, 9)}).groups
    assert stored.group == Group("group-w0", 9, GroupPhase.DISSOLVED, (), "")


@pytest.mark.parametrize(
    ("name", "changes"),
    [("w0", {"incarnation": ""}), ("w0", {"worker_id": "w1"}), ("", {"worker_id": ""})],
)
def test_all_readers_agree_which_workers_there_are(name: str, changes: dict[str, Any]) -> None:
    key, value = f"{WORKERS}{name}", encode_record(worker_record(**({"worker_id": name} | changes)))
    assert read_record(record_pb2.WorkerRecord, key, value) is None
    assert RecordReader().read({key: Entry(value, 3, 9)}).workers == ()


@pytest.mark.parametrize("name", ["block_size", "kv_blocks_total", "max_model_len"])
def test_all_readers_agree_which_workers_can_serve(name: str) -> None:
    record = worker_record(**{name: 0})
    assert can_serve(WHOLE) and not can_serve(record)
    assert to_facts(WHOLE) is not None and to_facts(record) is None
    assert scheduler.to_group(group_record(WHOLE), {"w0": record}) is None


def adapter_record(**changes: Any) -> adapter_pb2.AdapterRecord:
    given = {"name": "org/a", "base": "m", "source": "/a", "digest": "0f" * 32, "rank": 8}
    return adapter_pb2.AdapterRecord(**(given | changes))


@pytest.mark.parametrize(
    ("record", "name", "valid"),
    [
        (record_pb2.ServiceRecord(name="gateway", incarnation="a"), "a", True),
        (record_pb2.ServiceRecord(name="gateway", incarnation="a"), "b", False),
        (record_pb2.ServiceRecord(name="gateway"), "", False),
        (record_pb2.AssignmentRecord(worker_id="w0"), "w0", True),
        (record_pb2.AssignmentRecord(worker_id="w0", epoch=-1), "w0", False),
        (record_pb2.AssignmentRecord(worker_id="w0"), "w1", False),
        (to_role_record("w0", Role.DECODE, 1.5), "w0", True),
        (to_role_record("w0", Role.DECODE, 1.5), "w1", False),
        (record_pb2.RoleRecord(worker_id="w0"), "w0", False),
        (record_pb2.EpochFloorRecord(epoch=3), "epoch_floor", True),
        (record_pb2.EpochFloorRecord(epoch=-3), "epoch_floor", False),
        (adapter_record(), "org%2Fa", True),
        (adapter_record(), "org", False),
        (adapter_record(base=""), "org%2Fa", False),
        (adapter_record(digest="0"), "org%2Fa", False),
        (adapter_record(rank=0), "org%2Fa", False),
    ],
)
def test_other_records_are_validated(record: Message, name: str, valid: bool) -> None:
    assert is_valid(record, name) == valid


def test_malformed_records_are_ignored() -> None:
    for value in (b"", b"{", b"\xff", b"[" * 100_000):
        assert decode_record(record_pb2.WorkerRecord, value) is None
    with pytest.raises(TypeError, match="GroupMember is not an etcd record"):
        is_valid(record_pb2.GroupMember(), "")


@pytest.mark.parametrize(
    ("wish", "valid"),
    [
        ({}, True),
        ({"requests_per_s": 1.5, "tokens_per_s": 2, "running": 3}, True),
        ({"requests_per_s": -1}, False),
        ({"tokens_per_s": float("nan")}, False),
        ({"requests_spilt": float("inf")}, False),
        ({"minute_tokens": -1.0}, False),
        ({"running": -1}, False),
    ],
)
def test_gateway_numbers_are_finite_and_not_negative(wish: dict[str, float], valid: bool) -> None:
    record = record_pb2.QuotaRecord(incarnation="a")
    record.owners["alice"].CopyFrom(record_pb2.QuotaWish(**wish))
    value = encode_record(record)
    assert (read_record(record_pb2.QuotaRecord, "quotas/a", value) is not None) is valid
    assert read_record(record_pb2.QuotaRecord, "quotas/b", value) is None


def test_workers_with_another_scheduling_are_named() -> None:
    workers = [
        worker_record("w3", scheduling="fcfs"),
        worker_record("w1", scheduling="fcfs"),
        worker_record("w2", scheduling="slo"),
        worker_record("w4", scheduling="priority"),
        worker_record("old"),
        worker_record("leaves", scheduling="fcfs", draining=True),
    ]
    fault = scheduling_fault("slo", workers)
    assert fault is not None and "workers with fcfs (w1, w3), priority (w4):" in fault
    assert "TIDESERVE__SCHEDULING" in fault, "the remedy"
    assert scheduling_fault("slo", workers[2:3] + workers[4:]) is None
    assert scheduling_fault("", workers) is None, "a scheduler without this field"
