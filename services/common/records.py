"""Encodes, decodes and validates the records in etcd, for all services.

All services read records with this module, so that they agree on workers, groups and assignments. A
record is invalid, and ignored, if it is malformed, contradicts its key or lacks a required field.
Records are protobuf JSON, readable with etcdctl; unknown fields, from a later release, are ignored.
An incarnation is the id of a process; an epoch numbers the configurations of a group of workers.
"""

import logging
import math
from collections.abc import Iterable
from typing import TypeVar
from urllib.parse import quote

from google.protobuf import json_format
from google.protobuf.message import Message

from services.common.adapter_messages import adapter_of_record
from services.common.address import host_of
from services.common.report import Codec
from services.common.wire_enum import numbers
from services.core.cost.model import Coefficients, CostModel
from services.core.engine_kind import EngineKind
from services.core.groups.layer_map import ModelShape
from services.core.groups.vocabulary import Assignment, Group, GroupPhase, Member, Worker
from services.core.overload.worker_facts import WorkerFacts
from services.core.role import Role
from tideserve.common.v1 import adapter_pb2, record_pb2

GENERATE = "generate"
"""Capability of a worker: it generates tokens."""
CAN_DROP = "parameter_drop"
"""Capability of a worker: it can run part of the layers, as a member of a merged group."""
HAND_OVER = "hand_over"
"""Capability of a worker: after a prompt it can hand the request over, and take such requests."""
PACED = "paced:"
"""Prefix of a capability, before a device profile: iterations are padded to that device's times."""
ENGINE = "engine:"
"""Prefix of a capability, before the engine that runs the model; absent for tideserve's own."""
COST_MAX_S = 1e6
"""Maximum coefficient of a cost model, in seconds: predictions of any batch stay finite."""

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)
_PHASES = numbers(GroupPhase, record_pb2.GroupPhase, "GROUP_PHASE")
_PHASES_BACK = {number: phase for phase, number in _PHASES.items()}
_ROLES = numbers(Role, record_pb2.WorkerRole, "WORKER_ROLE")
_ROLES_BACK = {number: role for role, number in _ROLES.items()}
_MEMBER = Codec(Member, record_pb2.GroupMember)
_ASSIGNMENT = Codec(Assignment, record_pb2.AssignmentRecord)
_SHAPE = Codec(ModelShape, record_pb2.ModelShape)

# --- all records


def encode_record(record: Message) -> bytes:
    """The etcd value of a record."""
    return json_format.MessageToJson(record, indent=None).encode()


def decode_record(kind: type[M], value: bytes) -> M | None:
    """Parse an etcd value without validation; returns None and warns if it is malformed."""
    try:
        return json_format.Parse(value, kind(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        log.warning("ignoring a malformed %s in etcd: %s", kind.__name__, error)
        return None


def read_record(kind: type[M], key: str, value: bytes) -> M | None:
    """Parse and validate the record at a key; returns None if it is invalid."""
    record = decode_record(kind, value)
    return record if record is not None and is_valid(record, key.rpartition("/")[2]) else None


def is_valid(record: Message, name: str) -> bool:
    """Whether the record is valid and belongs to `name`, the last part of its key."""
    match record:
        case record_pb2.WorkerRecord():
            valid = bool(name) and record.worker_id == name and record.incarnation != ""
        case record_pb2.GroupRecord():
            valid = record.group_id == name and to_group(record) is not None
        case record_pb2.AssignmentRecord() | record_pb2.RoleRecord():
            valid = bool(name) and record.worker_id == name and _is_known(record)
        case record_pb2.ServiceRecord():
            valid = bool(name) and record.incarnation == name
        case record_pb2.EpochFloorRecord():
            valid = record.epoch >= 0
        case record_pb2.QuotaRecord():
            valid = bool(name) and record.incarnation == name and _are_amounts(record)
        case adapter_pb2.AdapterRecord():
            has_name = bool(record.base) and quote(record.name, safe="") == name
            valid = has_name and adapter_of_record(record).fault() is None
        case _:
            raise TypeError(f"{type(record).__name__} is not an etcd record type")
    return valid


def _is_known(record: record_pb2.AssignmentRecord | record_pb2.RoleRecord) -> bool:
    """Whether the record has an epoch, or a role of this release."""
    if isinstance(record, record_pb2.RoleRecord):
        return to_role(record) is not None
    return record.epoch >= 0


def _are_amounts(record: record_pb2.QuotaRecord) -> bool:
    """Whether all amounts are finite and not negative."""
    return all(
        math.isfinite(amount) and amount >= 0
        for demand in record.owners.values()
        for amount in (
            demand.requests_per_s,
            demand.tokens_per_s,
            demand.running,
            demand.requests_spilt,
            demand.tokens_spilt,
            demand.minute_tokens,
        )
    )


# --- groups and assignments


def to_group(record: record_pb2.GroupRecord) -> Group | None:
    """The group of a record; None if id or epoch is missing or this release lacks its phase."""
    phase = _PHASES_BACK.get(record.phase)
    if phase is None or not record.group_id or record.epoch < 1:
        return None
    members = tuple(map(_MEMBER.report, record.members))
    return Group(
        record.group_id,
        record.epoch,
        phase,
        members,
        record.model,
        record.attempt,
        record.traceparent,
    )


def to_group_record(group: Group) -> record_pb2.GroupRecord:
    """The record of a group."""
    return record_pb2.GroupRecord(
        group_id=group.group_id,
        epoch=group.epoch,
        phase=_PHASES[group.phase],
        members=map(_MEMBER.message, group.members),
        model=group.model,
        attempt=group.attempt,
        traceparent=group.traceparent,
    )


def to_assignment(record: record_pb2.AssignmentRecord) -> Assignment:
    """The assignment of a valid record."""
    return _ASSIGNMENT.report(record)


def to_assignment_record(assignment: Assignment) -> record_pb2.AssignmentRecord:
    """The record of an assignment."""
    return _ASSIGNMENT.message(assignment)


def to_floor_record(epoch: int) -> record_pb2.EpochFloorRecord:
    """The record of the epoch floor, above which every new epoch must be."""
    return record_pb2.EpochFloorRecord(epoch=epoch)


# --- roles


def to_role(record: record_pb2.RoleRecord | record_pb2.WorkerRecord) -> Role | None:
    """The role of a record; None if it has none, or one that this release lacks."""
    return _ROLES_BACK.get(record.role)


def to_role_record(worker_id: str, role: Role, since_s: float) -> record_pb2.RoleRecord:
    """The record of a worker's role; `since_s`: seconds since 1970."""
    return record_pb2.RoleRecord(worker_id=worker_id, role=_ROLES[role], since_s=since_s)


def to_role_number(role: Role) -> "record_pb2.WorkerRole.ValueType":
    """The role in a worker's record, as the worker is configured."""
    number: record_pb2.WorkerRole.ValueType = _ROLES[role]
    return number


# --- workers


def capabilities_of(
    can_drop: bool,
    paced: str | None,
    engine: str = EngineKind.TIDESERVE,
    hands_over: bool = False,
) -> tuple[str, ...]:
    """The capabilities of a worker; `paced`: the device whose times it simulates, if any."""
    drop = (CAN_DROP,) if can_drop else ()
    hand_over = (HAND_OVER,) if hands_over else ()
    pace = () if paced is None else (f"{PACED}{paced}",)
    other = () if engine == EngineKind.TIDESERVE else (f"{ENGINE}{engine}",)
    return (GENERATE, *drop, *hand_over, *pace, *other)


def paced_of(record: record_pb2.WorkerRecord) -> str | None:
    """The device whose times the worker simulates by padding; None if it does not pad."""
    return _named(record, PACED)


def engine_of(record: record_pb2.WorkerRecord) -> str:
    """The engine that runs the worker's model."""
    return _named(record, ENGINE) or EngineKind.TIDESERVE


def _named(record: record_pb2.WorkerRecord, prefix: str) -> str | None:
    """The first capability with `prefix`, without the prefix; None if there is none."""
    named = [capability for capability in record.capabilities if capability.startswith(prefix)]
    return named[0].removeprefix(prefix) if named else None


def can_serve(record: record_pb2.WorkerRecord) -> bool:
    """Whether the worker's published sizes are positive, so that it can hold sequences."""
    return min(record.max_model_len, record.block_size, record.kv_blocks_total) >= 1


def to_worker(record: record_pb2.WorkerRecord, create_revision: int) -> Worker:
    """The worker of a valid record, for the group protocol."""
    return Worker(
        record.worker_id,
        record.incarnation,
        record.model,
        max(0, record.shape.num_layers),
        create_revision,
        CAN_DROP in record.capabilities,
        record.model_digest,
        build_of(record),
        settings_of(record),
        record.draining,
    )


def to_facts(record: record_pb2.WorkerRecord) -> WorkerFacts | None:
    """A worker's memory and model, for planning merges; None if the record's sizes are invalid."""
    if not can_serve(record):
        return None
    return WorkerFacts(
        worker_id=record.worker_id,
        model=record.model,
        block_size=record.block_size,
        kv_blocks_total=record.kv_blocks_total,
        arena_bytes=record.arena_bytes,
        shape=to_shape(record.shape),
        location=tuple(record.location) or (host_of(record.address),),
        can_drop=CAN_DROP in record.capabilities,
        draining=record.draining,
        model_digest=record.model_digest,
        build=build_of(record),
        settings=settings_of(record),
        chunk_bytes=max(1, record.chunk_bytes),
        role=to_role(record) or Role.MIXED,
        hands_over=HAND_OVER in record.capabilities,
        cost_model=to_cost_model(record),
        max_batch_tokens=max(1, record.max_batch_tokens),
    )


def settings_of(record: record_pb2.WorkerRecord) -> str:
    """The settings that must be equal on all members of a group, as text."""
    return (
        f"block_size {record.block_size}, max_batch_tokens {record.max_batch_tokens},"
        f" max_model_len {record.context_tokens}"
    )


def scheduling_fault(scheduling: str, workers: Iterable[record_pb2.WorkerRecord]) -> str | None:
    """A warning if workers use another scheduling policy than the scheduler; None if all agree.

    Draining workers, and workers and schedulers that publish no policy, are ignored.
    """
    others: dict[str, list[str]] = {}
    for worker in workers:
        if scheduling and worker.scheduling not in ("", scheduling) and not worker.draining:
            others.setdefault(worker.scheduling, []).append(worker.worker_id)
    if not others:
        return None
    listed = ", ".join(
        f"{policy} ({', '.join(sorted(ids))})" for policy, ids in sorted(others.items())
    )
    return (
        f"the scheduler runs with scheduling {scheduling}, but workers with {listed}: neither"
        " policy is in force for the whole cluster; set the same 'scheduling'"
        " (TIDESERVE__SCHEDULING) for all, and restart the processes that differ"
    )


def build_of(record: record_pb2.WorkerRecord) -> str:
    """Protocol version and code digest of the worker; "" if its release publishes none."""
    if not record.protocol_version:
        return ""
    return f"{record.protocol_version}:{record.code_digest}"


def to_shape(shape: record_pb2.ModelShape) -> ModelShape | None:
    """The model's shape; None if it is missing or invalid."""
    sizes = (shape.num_layers, shape.layer_bytes, shape.kv_bytes)
    rest = (shape.embedding_bytes, shape.head_bytes)
    costs = (shape.layer_cost, shape.embedding_cost, shape.head_cost)
    if min(sizes) < 1 or min(rest) < 0 or not all(0 <= cost < math.inf for cost in costs):
        return None
    return _SHAPE.report(shape)


def to_cost_model(record: record_pb2.WorkerRecord) -> CostModel | None:
    """The worker's cost model; None if it publishes none, or an invalid one."""
    if not record.HasField("cost_model"):
        return None
    costs = record.cost_model
    values = [costs.alpha_s, costs.beta_s, costs.gamma_s, costs.lambda_s, costs.kappa_s, costs.mu_s]
    decode = None
    if costs.HasField("decode"):
        decode = Coefficients(costs.decode.alpha_s, costs.decode.beta_s, costs.decode.gamma_s)
        values += [decode.alpha, decode.beta, decode.gamma]
    if not all(0 <= value <= COST_MAX_S for value in values) or costs.knee_tokens < 0:
        return None
    alpha, beta, gamma, lam, kappa, mu = values[:6]
    model = CostModel(alpha, beta, gamma, lam, decode, kappa, costs.knee_tokens, mu)
    # A model that predicts no time at all is useless, and a batch costs at least one chunk.
    valid = lam <= gamma and model.chunk_s(0, 2) > 0 and model.chunk_s(0, 1) > 0
    return model if valid else None


def to_cost_record(model: CostModel | None) -> record_pb2.CostModel | None:
    """The cost model in a worker's record."""
    if model is None:
        return None
    record = record_pb2.CostModel(
        alpha_s=model.alpha,
        beta_s=model.beta,
        gamma_s=model.gamma,
        lambda_s=model.lam,
        kappa_s=model.kappa,
        knee_tokens=model.knee,
        mu_s=model.mu,
    )
    if (decode := model.decode) is not None:
        costs = record_pb2.DecodeCosts(
            alpha_s=decode.alpha, beta_s=decode.beta, gamma_s=decode.gamma
        )
        record.decode.CopyFrom(costs)
    return record


def to_shape_record(shape: ModelShape | None) -> record_pb2.ModelShape | None:
    """The model's shape in a worker's record."""
    return _SHAPE.message(shape) if shape is not None else None
