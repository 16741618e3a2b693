"""The cluster as rows of JSON, for the status and the live page. Pure."""

from collections.abc import Mapping
from typing import Any

from services.common.report import memory_values
from services.core.groups.vocabulary import Group, GroupPhase
from services.core.report import MemoryReport
from services.gateway.cluster import translate
from services.gateway.vocabulary.message import ClusterStatus
from tideserve.common.v1 import record_pb2


def cluster_rows(
    cluster: ClusterStatus, records: Mapping[str, record_pb2.WorkerRecord]
) -> dict[str, Any]:
    """Workers, groups, decisions, shortfalls and losses; `records`: registrations by worker id."""
    held = {
        member.worker_id: member.end_layer - member.first_layer
        for group in cluster.groups
        if _has_layers(group)
        for member in group.members
    }
    return {
        "workers": [
            _worker(one, records.get(one.worker_id), held.get(one.worker_id))
            for one in cluster.workers
        ],
        "groups": [_group(group) for group in cluster.groups],
        "decisions": list(cluster.decisions),
        "shortfalls": [
            {"model": model, "tokens": tokens} for model, tokens in cluster.shortfalls.items()
        ],
        "losses": list(cluster.losses),
    }


def _worker(
    worker: MemoryReport, record: record_pb2.WorkerRecord | None, layers: int | None
) -> dict[str, Any]:
    """`layers`: how many of the model's the worker runs, None if nobody says: then it is all."""
    load, block_bytes = worker.engine.load, worker.kv_block_bytes
    if layers is not None and record is not None and record.shape.num_layers:
        block_bytes = block_bytes * layers // record.shape.num_layers
    told = memory_values(worker)
    return {
        "id": told.pop("worker_id"),
        **told,
        "kv_used_bytes": (load.kv_blocks_total - load.kv_blocks_free) * block_bytes,
        "kv_free_bytes": load.kv_blocks_free * block_bytes,
    } | translate.worker_facts(record)


def _has_layers(group: Group) -> bool:
    """Whether its record says which layers the members have."""
    return all(member.end_layer > member.first_layer for member in group.members)


def _group(group: Group) -> dict[str, Any]:
    layers = [[member.first_layer, member.end_layer] for member in group.members]
    return {
        "id": group.group_id,
        "epoch": group.epoch,
        "model": group.model,
        "members": [member.worker_id for member in group.members],
        "layers": layers if _has_layers(group) else [],
        "changing": bool(group.attempt),
        "degraded": group.phase is GroupPhase.DEGRADED,
    }
