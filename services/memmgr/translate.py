"""Protobuf to the memory manager's vocabulary and back; no stub is seen beyond this file."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields

from services.common.etcd import Listing
from services.common.membership import GROUPS, WORKERS, decode_record
from services.core.demand import ModelDemand
from services.core.memory.group import Group, GroupPhase, Member, StoredGroup, Worker
from services.core.memory.layer_map import ModelShape
from services.core.memory.overload_events import Action, Cause
from services.memmgr.relief import LoggedDecision
from services.memmgr.worker_facts import WorkerFacts
from services.memmgr.worker_memory import WorkerMemory
from tideserve.common.v1 import record_pb2
from tideserve.memmgr.v1 import memmgr_pb2

_PHASES = {
    GroupPhase.STABLE: record_pb2.GROUP_PHASE_STABLE,
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
MODELS_MAX = 1_000
"""Most models that a scheduler may report demand for."""

_PHASES_BACK = {number: phase for phase, number in _PHASES.items()}


class InvalidReport(ValueError):
    """A report with a number that cannot be."""


def to_workers(records: Mapping[str, record_pb2.WorkerRecord]) -> tuple[Worker, ...]:
    """Registered workers; a record that contradicts its key is left out."""
    return tuple(
        Worker(record.worker_id, record.incarnation, record.model)
        for key, record in records.items()
        if record.worker_id and record.incarnation and key == f"{WORKERS}{record.worker_id}"
    )


def to_stored_groups(listing: Listing) -> tuple[StoredGroup, ...]:
    """All group records, tombstones included.

    A record that cannot be read counts as a tombstone at its modification revision: no epoch of
    the group can be above that, as every epoch was a write, so the next one is safe.
    """
    stored = []
    for key, entry in listing.items():
        group_id = key.removeprefix(GROUPS)
        group = _to_group(decode_record(record_pb2.GroupRecord, entry.value), group_id)
        if group is None:
            group = Group(group_id, entry.mod_revision, GroupPhase.DISSOLVED, (), "")
        stored.append(StoredGroup(group, entry.mod_revision))
    return tuple(stored)


def to_record(group: Group) -> record_pb2.GroupRecord:
    """The record of a group."""
    return record_pb2.GroupRecord(
        group_id=group.group_id,
        epoch=group.epoch,
        phase=_PHASES[group.phase],
        members=[
            record_pb2.GroupMember(worker_id=member.worker_id, incarnation=member.incarnation)
            for member in group.members
        ],
        model=group.model,
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


def to_worker_facts(
    records: Mapping[str, record_pb2.WorkerRecord],
) -> dict[str, WorkerFacts]:
    """What registered workers say about their memory, by id; impossible ones are left out."""
    return {
        record.worker_id: WorkerFacts(
            worker_id=record.worker_id,
            model=record.model,
            block_size=record.block_size,
            kv_blocks_total=record.kv_blocks_total,
            arena_bytes=record.arena_bytes,
            shape=_to_shape(record.shape),
            location=(record.address.rpartition(":")[0],),
        )
        for record in records.values()
        if min(record.block_size, record.kv_blocks_total) >= 1
    }


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


def _to_group(record: record_pb2.GroupRecord | None, group_id: str) -> Group | None:
    if record is None or record.group_id != group_id or record.epoch < 1:
        return None
    phase = _PHASES_BACK.get(record.phase)
    if phase is None:
        return None
    members = tuple(Member(member.worker_id, member.incarnation) for member in record.members)
    return Group(group_id, record.epoch, phase, members, record.model)
