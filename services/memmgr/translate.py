"""Protobuf to the memory manager's vocabulary and back; no stub is seen beyond this file."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Generic, TypeVar

from services.common.etcd import Entry
from services.common.membership import ASSIGNMENTS, GROUPS, WORKERS, decode_record
from services.core.demand import ModelDemand
from services.core.memory.group_vocabulary import (
    AbortMember,
    Assignment,
    Group,
    GroupPhase,
    Member,
    StoredAssignment,
    StoredGroup,
    Worker,
)
from services.core.memory.layer_map import ModelShape
from services.core.memory.member import PrepareAsked
from services.core.memory.overload_events import Action, Cause
from services.core.memory.worker_facts import WorkerFacts
from services.memmgr.relief import LoggedDecision
from services.memmgr.step import Step, StepPhase
from services.memmgr.worker_memory import WorkerMemory
from tideserve.common.v1 import record_pb2
from tideserve.memmgr.v1 import memmgr_pb2
from tideserve.worker.v1 import worker_pb2

T = TypeVar("T")
_PHASES = {
    GroupPhase.STABLE: record_pb2.GROUP_PHASE_STABLE,
    GroupPhase.DEGRADED: record_pb2.GROUP_PHASE_DEGRADED,
    GroupPhase.DISSOLVED: record_pb2.GROUP_PHASE_DISSOLVED,
}
_ACTIONS = {
    Action.MERGE: memmgr_pb2.DECISION_ACTION_MERGE,
    Action.RESTORE: memmgr_pb2.DECISION_ACTION_RESTORE,
    Action.EXHAUSTED: memmgr_pb2.DECISION_ACTION_EXHAUSTED,
}
_CAUSES = {
    Cause.OVERLOAD: memmgr_pb2.DECISION_CAUSE_OVERLOAD,
    Cause.RELIEF: memmgr_pb2.DECISION_CAUSE_RELIEF,
    Cause.MANUAL: memmgr_pb2.DECISION_CAUSE_MANUAL,
}
CAN_DROP = "parameter_drop"
"""A worker's capability: it can run part of the layers, as a member of a larger group."""
MODELS_MAX = 1_000
"""Most models that a scheduler may report demand for."""

_PHASES_BACK = {number: phase for phase, number in _PHASES.items()}
_STEPS = {
    StepPhase.PREPARING: memmgr_pb2.RECONFIGURATION_PHASE_PREPARING,
    StepPhase.COMMITTED: memmgr_pb2.RECONFIGURATION_PHASE_COMMITTED,
    StepPhase.STABLE: memmgr_pb2.RECONFIGURATION_PHASE_STABLE,
    StepPhase.FAILED: memmgr_pb2.RECONFIGURATION_PHASE_FAILED,
}


class InvalidReport(ValueError):
    """A report with a number that cannot be."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a registered worker is reached: RPC, and its lanes to other members."""

    address: str
    activation_address: str
    bulk_address: str


@dataclass(frozen=True, slots=True)
class Listing:
    """Records as core and the driver see them."""

    workers: tuple[Worker, ...]
    groups: tuple[StoredGroup, ...]
    assignments: tuple[StoredAssignment, ...]
    places: dict[str, WorkerPlace]
    facts: dict[str, WorkerFacts]


class RecordReader:
    """Reads whole listings; a record that has not changed since the last one is not read again."""

    def __init__(self) -> None:
        self._workers = _Reader(WORKERS, _to_worker)
        self._groups = _Reader(GROUPS, _to_stored_group)
        self._assignments = _Reader(ASSIGNMENTS, _to_stored_assignment)

    def read(self, entries: Mapping[str, Entry]) -> Listing:
        """The records in `entries`; what is none is left out.

        A group record that cannot be read counts as a tombstone at its modification revision: no
        epoch can be above that, as every epoch was a write, so the next one is safe.
        """
        workers = self._workers.read(entries)
        return Listing(
            tuple(one.worker for one in workers),
            tuple(self._groups.read(entries)),
            tuple(self._assignments.read(entries)),
            {one.worker.worker_id: one.place for one in workers},
            {one.facts.worker_id: one.facts for one in workers if one.facts is not None},
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
    )


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


def to_prepare_request(
    asked: PrepareAsked, peers: Iterable[worker_pb2.Peer], others: Iterable[Group]
) -> worker_pb2.PrepareRequest:
    """What a member is asked; `others` are made beside its own target."""
    return worker_pb2.PrepareRequest(
        token=asked.token,
        attempt=asked.attempt,
        incarnation=asked.incarnation,
        group_id=asked.group_id,
        epoch=asked.epoch,
        mod_revision=asked.mod_revision,
        target=to_record(asked.target),
        peers=peers,
        others=map(to_record, others),
    )


def to_peer(member: Member, place: WorkerPlace, nonces: tuple[bytes, bytes]) -> worker_pb2.Peer:
    """A member as it is before the change; `nonces` let others in, by lane."""
    return worker_pb2.Peer(
        worker_id=member.worker_id,
        incarnation=member.incarnation,
        activation_address=place.activation_address,
        bulk_address=place.bulk_address,
        activation_nonce=nonces[0],
        bulk_nonce=nonces[1],
        first_layer=member.first_layer,
        end_layer=member.end_layer,
        address=place.address,
    )


def to_abort_request(command: AbortMember) -> worker_pb2.AbortRequest:
    """The end of an attempt."""
    return worker_pb2.AbortRequest(
        token=command.token, attempt=command.attempt, incarnation=command.incarnation
    )


def to_step(step: Step) -> memmgr_pb2.ReconfigurationStep:
    """A step of a change of groups."""
    return memmgr_pb2.ReconfigurationStep(
        phase=_STEPS[step.phase], epoch=step.epoch, message=step.message
    )


def to_worker_memory(report: memmgr_pb2.ReportMemoryRequest) -> WorkerMemory:
    """A worker's memory.

    Raises:
        InvalidReport: if a number is negative, more is free than there is, or a name is missing.
    """
    memory = report.memory
    if not memory.worker_id or not memory.incarnation:
        raise InvalidReport("worker_id and incarnation must be set")
    result = WorkerMemory(
        worker_id=memory.worker_id,
        incarnation=memory.incarnation,
        budget_bytes=memory.budget_bytes,
        parameter_bytes=memory.parameter_bytes,
        staging_bytes=memory.staging_bytes,
        kv_blocks_total=memory.kv_blocks_total,
        kv_blocks_free=memory.kv_blocks_free,
        kv_blocks_wanted=memory.kv_blocks_wanted,
        kv_block_bytes=memory.kv_block_bytes,
        running=memory.running,
        waiting=memory.waiting,
        preemptions_total=memory.preemptions_total,
        pids=tuple(memory.pids),
        epoch=memory.epoch,
    )
    for name, number in result.numbers():
        if number < 0:
            raise InvalidReport(f"{name} is {number}, but must be 0 or more")
    if result.kv_blocks_free > result.kv_blocks_total:
        raise InvalidReport(
            f"kv_blocks_free is {result.kv_blocks_free}, but kv_blocks_total is "
            f"{result.kv_blocks_total}"
        )
    return result


def to_demands(report: memmgr_pb2.ReportDemandRequest) -> tuple[ModelDemand, ...]:
    """The demand at a scheduler.

    Raises:
        InvalidReport: if a number cannot be, a model is missing or named twice, or there are
            more than `MODELS_MAX`.
    """
    if len(report.demands) > MODELS_MAX:
        raise InvalidReport(f"{len(report.demands)} models, but at most {MODELS_MAX} are taken")
    demands = tuple(
        ModelDemand(
            model=demand.model,
            queued=demand.queued,
            queued_tokens=demand.queued_tokens,
            refused=demand.refused,
            refused_tokens=demand.refused_tokens,
            arriving_tokens_per_s=demand.arriving_tokens_per_s,
        )
        for demand in report.demands
    )
    for demand in demands:
        for item in fields(demand):
            number = getattr(demand, item.name)
            if item.name != "model" and not 0 <= number < math.inf:
                raise InvalidReport(f"{item.name} is {number}, but must be 0 or more")
    names = {demand.model for demand in demands}
    if len(names) < len(demands) or "" in names:
        raise InvalidReport("every demand must name another model")
    return demands


def to_list_groups(groups: Iterable[Group]) -> memmgr_pb2.ListGroupsResponse:
    """The answer to ListGroups."""
    return memmgr_pb2.ListGroupsResponse(groups=map(to_record, groups))


def to_get_cluster(
    workers: Iterable[WorkerMemory],
    groups: Iterable[Group],
    decisions: Iterable[LoggedDecision] = (),
) -> memmgr_pb2.GetClusterResponse:
    """The answer to GetCluster."""
    return memmgr_pb2.GetClusterResponse(
        workers=map(_to_memory, workers),
        groups=map(to_record, groups),
        decisions=map(_to_decision, decisions),
    )


def _to_decision(logged: LoggedDecision) -> memmgr_pb2.Decision:
    decision = logged.decision
    why, numbers = decision.why, decision.why.numbers
    return memmgr_pb2.Decision(
        decided_unix_s=logged.unix_s,
        model=decision.model,
        action=_ACTIONS[decision.action],
        cause=_CAUSES[why.cause],
        needed_tokens=decision.needed_tokens,
        group_ids=decision.group_ids,
        threshold_tokens=why.threshold_tokens,
        held_s=why.held_s,
        dwell_s=why.dwell_s,
        **asdict(numbers),
        outcome=logged.outcome,
    )


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


def _to_memory(memory: WorkerMemory) -> memmgr_pb2.WorkerMemory:
    return memmgr_pb2.WorkerMemory(
        worker_id=memory.worker_id,
        incarnation=memory.incarnation,
        pids=memory.pids,
        **dict(memory.numbers()),
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
    )
    place = WorkerPlace(record.address, record.activation_address, record.bulk_address)
    return _Registered(worker, place, _to_facts(record))


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
        location=(record.address.rpartition(":")[0],),
        can_drop=CAN_DROP in record.capabilities,
    )


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
    return Group(group_id, record.epoch, phase, members, record.model, record.attempt)


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
