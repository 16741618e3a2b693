"""The records in etcd: one codec, and one notion of what a valid record is.

Every service reads them by this file, so that all agree which workers, groups and assignments there
are. A record that is malformed, contradicts its key, or lacks a required field is
invalid: it is ignored, with a warning if it cannot even be read. Records are protobuf JSON, so
that etcdctl shows them; unknown fields, those of a later release, are ignored.
"""

import logging
import math
from collections.abc import Iterable
from typing import TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

from services.common.address import host_of
from services.common.report import Codec
from services.common.wire_enum import numbers
from services.core.engine_kind import EngineKind
from services.core.groups.layer_map import ModelShape
from services.core.groups.vocabulary import Assignment, Group, GroupPhase, Member, Worker
from services.core.overload.worker_facts import WorkerFacts
from tideserve.common.v1 import record_pb2

GENERATE = "generate"
"""A worker's capability: it generates tokens."""
CAN_DROP = "parameter_drop"
"""A worker's capability: it can run part of the layers, as a member of a larger group."""
PACED = "paced:"
"""Prefix of a worker's capability; the device whose times it keeps follows."""
ENGINE = "engine:"
"""Prefix of a worker's capability; the engine that runs the model follows, if it is not ours."""

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)
_PHASES = numbers(GroupPhase, record_pb2.GroupPhase, "GROUP_PHASE")
_PHASES_BACK = {number: phase for phase, number in _PHASES.items()}
_MEMBER = Codec(Member, record_pb2.GroupMember)
_ASSIGNMENT = Codec(Assignment, record_pb2.AssignmentRecord)
_SHAPE = Codec(ModelShape, record_pb2.ModelShape)

# --- any record


def encode_record(record: Message) -> bytes:
    """A record as it stands in etcd."""
    return json_format.MessageToJson(record, indent=None).encode()


def decode_record(kind: type[M], value: bytes) -> M | None:
    """The record in an etcd value, whatever it says; None when it is not one, with a warning."""
    try:
        return json_format.Parse(value, kind(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        log.warning("ignoring a malformed %s in etcd: %s", kind.__name__, error)
        return None


def read_record(kind: type[M], key: str, value: bytes) -> M | None:
    """The valid record at a key, None if there is none."""
    record = decode_record(kind, value)
    return record if record is not None and is_valid(record, key.rpartition("/")[2]) else None


def is_valid(record: Message, name: str) -> bool:
    """Whether the record is one of that name, which is the last part of its key."""
    match record:
        case record_pb2.WorkerRecord():
            return bool(name) and record.worker_id == name and record.incarnation != ""
        case record_pb2.GroupRecord():
            return record.group_id == name and to_group(record) is not None
        case record_pb2.AssignmentRecord():
            return bool(name) and record.worker_id == name and record.epoch >= 0
        case record_pb2.ServiceRecord():
            return bool(name) and record.incarnation == name
        case record_pb2.EpochFloorRecord():
            return record.epoch >= 0
        case record_pb2.QuotaRecord():
            return bool(name) and record.incarnation == name and _are_amounts(record)
    raise TypeError(f"{type(record).__name__} is no record of etcd")


def _are_amounts(record: record_pb2.QuotaRecord) -> bool:
    """Whether all numbers are finite and not negative."""
    return all(
        math.isfinite(amount) and amount >= 0
        for wish in record.owners.values()
        for amount in (
            wish.requests_per_s,
            wish.tokens_per_s,
            wish.running,
            wish.requests_spilt,
            wish.tokens_spilt,
        )
    )


# --- groups and assignments


def to_group(record: record_pb2.GroupRecord) -> Group | None:
    """The group; None without an id, an epoch or a phase that this release knows."""
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
    """The record of the epoch floor."""
    return record_pb2.EpochFloorRecord(epoch=epoch)


# --- workers


def capabilities_of(
    can_drop: bool, paced: str | None, engine: str = EngineKind.TIDESERVE
) -> tuple[str, ...]:
    """What planners may ask of a worker, the device that it is paced to, and its engine."""
    drop = (CAN_DROP,) if can_drop else ()
    pace = () if paced is None else (f"{PACED}{paced}",)
    other = () if engine == EngineKind.TIDESERVE else (f"{ENGINE}{engine}",)
    return (GENERATE, *drop, *pace, *other)


def paced_of(record: record_pb2.WorkerRecord) -> str | None:
    """The device whose times the worker's iterations are padded to, None for its own."""
    return _named(record, PACED)


def engine_of(record: record_pb2.WorkerRecord) -> str:
    """The engine that runs the worker's model."""
    return _named(record, ENGINE) or EngineKind.TIDESERVE


def _named(record: record_pb2.WorkerRecord, prefix: str) -> str | None:
    """What follows a prefix in the worker's capabilities; None if none has it."""
    named = [one for one in record.capabilities if one.startswith(prefix)]
    return named[0].removeprefix(prefix) if named else None


def can_serve(record: record_pb2.WorkerRecord) -> bool:
    """Whether its numbers allow it to hold sequences."""
    return min(record.max_model_len, record.block_size, record.kv_blocks_total) >= 1


def to_worker(record: record_pb2.WorkerRecord, mod_revision: int) -> Worker:
    """The worker of a valid record, as the group protocol sees it."""
    return Worker(
        record.worker_id,
        record.incarnation,
        record.model,
        max(0, record.shape.num_layers),
        mod_revision,
        CAN_DROP in record.capabilities,
        record.model_digest,
        build_of(record),
        settings_of(record),
    )


def to_facts(record: record_pb2.WorkerRecord) -> WorkerFacts | None:
    """What a valid record says about the worker's memory; None if that cannot be."""
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
    )


def settings_of(record: record_pb2.WorkerRecord) -> str:
    """The settings in which the members of a group must agree, for people."""
    return (
        f"block_size {record.block_size}, max_batch_tokens {record.max_batch_tokens},"
        f" max_model_len {record.context_tokens}"
    )


def scheduling_fault(scheduling: str, workers: Iterable[record_pb2.WorkerRecord]) -> str | None:
    """What is wrong if workers were told another `scheduling` than the scheduler, and the remedy.

    Those that leave or do not tell are left out; so is a scheduler that does not tell.
    """
    others: dict[str, list[str]] = {}
    for worker in workers:
        if scheduling and worker.scheduling not in ("", scheduling) and not worker.draining:
            others.setdefault(worker.scheduling, []).append(worker.worker_id)
    if not others:
        return None
    told = ", ".join(f"{one} ({', '.join(sorted(ids))})" for one, ids in sorted(others.items()))
    return (
        f"the scheduler runs with scheduling {scheduling}, but workers with {told}, so classes of"
        " requests are not served as either says; set the same 'scheduling'"
        " (TIDESERVE__SCHEDULING) for both, and restart what differs"
    )


def build_of(record: record_pb2.WorkerRecord) -> str:
    """What code the worker runs; "" of a release that did not tell."""
    if not record.protocol_version:
        return ""
    return f"{record.protocol_version}:{record.code_digest}"


def to_shape(shape: record_pb2.ModelShape) -> ModelShape | None:
    """The shape, or None if it was not told or cannot be."""
    sizes = (shape.num_layers, shape.layer_bytes, shape.kv_bytes)
    rest = (shape.embedding_bytes, shape.head_bytes)
    costs = (shape.layer_cost, shape.embedding_cost, shape.head_cost)
    if min(sizes) < 1 or min(rest) < 0 or not all(0 <= cost < math.inf for cost in costs):
        return None
    return _SHAPE.report(shape)


def to_shape_record(shape: ModelShape | None) -> record_pb2.ModelShape | None:
    """The sizes of the model, as the worker's record has them."""
    return _SHAPE.message(shape) if shape is not None else None
