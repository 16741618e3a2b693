"""Records in etcd to the memory manager's vocabulary and back; see also `translate`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.common.address import host_of
from services.common.etcd import Entry
from services.common.membership import ASSIGNMENTS, EPOCH_FLOOR, GROUPS, WORKERS, decode_record
from services.core.memory.group_vocabulary import (
    Assignment,
    Group,
    GroupPhase,
    Member,
    StoredAssignment,
    StoredGroup,
    Worker,
)
from services.core.memory.layer_map import ModelShape
from services.core.memory.worker_facts import WorkerFacts
from services.memmgr.worker_place import WorkerPlace
from tideserve.common.v1 import record_pb2

T = TypeVar("T")
_PHASES = {
    GroupPhase.STABLE: record_pb2.GROUP_PHASE_STABLE,
    GroupPhase.DEGRADED: record_pb2.GROUP_PHASE_DEGRADED,
    GroupPhase.DISSOLVED: record_pb2.GROUP_PHASE_DISSOLVED,
}
_PHASES_BACK = {number: phase for phase, number in _PHASES.items()}
CAN_DROP = "parameter_drop"
"""A worker's capability: it can run part of the layers, as a member of a larger group."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Records as core and the driver see them."""

    workers: tuple[Worker, ...]
    groups: tuple[StoredGroup, ...]
    assignments: tuple[StoredAssignment, ...]
    places: dict[str, WorkerPlace]
    facts: dict[str, WorkerFacts]
    epoch_floor: int = 0
    floor_revision: int = 0


class RecordReader:
    """Reads whole listings; a record that has not changed since the last one is not read again."""

    def __init__(self) -> None:
        self._workers = _Reader(WORKERS, _to_worker)
        self._groups = _Reader(GROUPS, _to_stored_group)
        self._assignments = _Reader(ASSIGNMENTS, _to_stored_assignment)

    def read(self, entries: Mapping[str, Entry]) -> Listing:
        """The records in `entries`; what is none is left out.

        A group record that cannot be read counts as a tombstone at its modification revision: no
        epoch can be above that, as every epoch was a write, so the next one is safe. So it is with
        the epoch floor.
        """
        workers = self._workers.read(entries)
        return Listing(
            tuple(one.worker for one in workers),
            tuple(self._groups.read(entries)),
            tuple(self._assignments.read(entries)),
            {one.worker.worker_id: one.place for one in workers},
            {one.facts.worker_id: one.facts for one in workers if one.facts is not None},
            *_to_floor(entries.get(EPOCH_FLOOR)),
        )


@dataclass(frozen=True, slots=True)
class _Registered:
    """All that a worker's record says."""

    worker: Worker
    place: WorkerPlace
    facts: WorkerFacts | None


class _Reader(Generic[T]):
    def __init__(self, prefix: str, decode: Callable[[str, Entry], T | None]) -> None:
        self._prefix = prefix
        self._decode = decode
        self._known: dict[str, tuple[int, T | None]] = {}

    def read(self, entries: Mapping[str, Entry]) -> list[T]:
        known = {}
        for key, entry in entries.items():
            if not key.startswith(self._prefix):
                continue
            revision, value = self._known.get(key, (0, None))
            if revision != entry.mod_revision:
                value = self._decode(key.removeprefix(self._prefix), entry)
            known[key] = (entry.mod_revision, value)
        self._known = known
        return [value for _, value in known.values() if value is not None]


def to_record(group: Group) -> record_pb2.GroupRecord:
    """The record of a group."""
    return record_pb2.GroupRecord(
        group_id=group.group_id,
        epoch=group.epoch,
        phase=_PHASES[group.phase],
        members=[
            record_pb2.GroupMember(
                worker_id=member.worker_id,
                incarnation=member.incarnation,
                first_layer=member.first_layer,
                end_layer=member.end_layer,
            )
            for member in group.members
        ],
        model=group.model,
        attempt=group.attempt,
        traceparent=group.traceparent,
    )


def to_floor_record(epoch: int) -> record_pb2.EpochFloorRecord:
    """The record of the epoch floor."""
    return record_pb2.EpochFloorRecord(epoch=epoch)


def to_assignment_record(assignment: Assignment) -> record_pb2.AssignmentRecord:
    """The record of an assignment."""
    return record_pb2.AssignmentRecord(
        worker_id=assignment.worker_id,
        incarnation=assignment.incarnation,
        group_id=assignment.group_id,
        epoch=assignment.epoch,
        first_layer=assignment.first_layer,
        end_layer=assignment.end_layer,
    )


def _to_worker(worker_id: str, entry: Entry) -> _Registered | None:
    """None for a record that contradicts its key."""
    record = decode_record(record_pb2.WorkerRecord, entry.value)
    if record is None or record.worker_id != worker_id or not worker_id or not record.incarnation:
        return None
    worker = Worker(
        worker_id,
        record.incarnation,
        record.model,
        max(0, record.shape.num_layers),
        entry.mod_revision,
        CAN_DROP in record.capabilities,
        record.model_digest,
        _to_build(record),
    )
    place = WorkerPlace(
        record.address, record.activation_address, record.bulk_address, record.draining
    )
    return _Registered(worker, place, _to_facts(record))


def _to_build(record: record_pb2.WorkerRecord) -> str:
    """What code the worker runs; "" of a release that did not tell."""
    if not record.protocol_version:
        return ""
    return f"{record.protocol_version}:{record.code_digest}"


def _to_shape(shape: record_pb2.ModelShape) -> ModelShape | None:
    """The shape, or None if it was not told or cannot be."""
    sizes = (shape.num_layers, shape.layer_bytes, shape.kv_bytes)
    rest = (shape.embedding_bytes, shape.head_bytes)
    costs = (shape.layer_cost, shape.embedding_cost, shape.head_cost)
    if min(sizes) < 1 or min(rest) < 0 or not all(0 <= cost < math.inf for cost in costs):
        return None
    return ModelShape(
        num_layers=shape.num_layers,
        layer_bytes=shape.layer_bytes,
        embedding_bytes=shape.embedding_bytes,
        head_bytes=shape.head_bytes,
        tied_embeddings=shape.tied_embeddings,
        kv_bytes=shape.kv_bytes,
        layer_cost=shape.layer_cost,
        embedding_cost=shape.embedding_cost,
        head_cost=shape.head_cost,
    )


def _to_facts(record: record_pb2.WorkerRecord) -> WorkerFacts | None:
    """What the record says about the worker's memory; None if that cannot be."""
    if min(record.block_size, record.kv_blocks_total) < 1:
        return None
    return WorkerFacts(
        worker_id=record.worker_id,
        model=record.model,
        block_size=record.block_size,
        kv_blocks_total=record.kv_blocks_total,
        arena_bytes=record.arena_bytes,
        shape=_to_shape(record.shape),
        location=(host_of(record.address),),
        can_drop=CAN_DROP in record.capabilities,
        draining=record.draining,
        model_digest=record.model_digest,
        build=_to_build(record),
    )


def _to_floor(entry: Entry | None) -> tuple[int, int]:
    """The floor, and the revision of its record; 0 and 0 if there is none."""
    if entry is None:
        return 0, 0
    record = decode_record(record_pb2.EpochFloorRecord, entry.value)
    return record.epoch if record is not None else entry.mod_revision, entry.mod_revision


def _to_stored_group(group_id: str, entry: Entry) -> StoredGroup:
    group = _to_group(decode_record(record_pb2.GroupRecord, entry.value), group_id)
    if group is None:
        group = Group(group_id, entry.mod_revision, GroupPhase.DISSOLVED, (), "")
    return StoredGroup(group, entry.mod_revision)


def _to_group(record: record_pb2.GroupRecord | None, group_id: str) -> Group | None:
    if record is None or record.group_id != group_id or record.epoch < 1:
        return None
    phase = _PHASES_BACK.get(record.phase)
    if phase is None:
        return None
    members = tuple(
        Member(member.worker_id, member.incarnation, member.first_layer, member.end_layer)
        for member in record.members
    )
    return Group(
        group_id,
        record.epoch,
        phase,
        members,
        record.model,
        record.attempt,
        record.traceparent,
    )


def _to_stored_assignment(worker_id: str, entry: Entry) -> StoredAssignment:
    """An assignment that cannot be read is one to nowhere: it still fences."""
    record = decode_record(record_pb2.AssignmentRecord, entry.value)
    if record is None or record.worker_id != worker_id or record.epoch < 0:
        return StoredAssignment(Assignment(worker_id, "", "", 0), entry.mod_revision)
    assignment = Assignment(
        worker_id,
        record.incarnation,
        record.group_id,
        record.epoch,
        record.first_layer,
        record.end_layer,
    )
    return StoredAssignment(assignment, entry.mod_revision)
