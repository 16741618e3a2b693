"""The cluster as rows of JSON, for the status and the live page. Pure."""

from collections.abc import Mapping
from typing import Any

from services.common.report import memory_values
from services.core.report import MemoryReport
from services.gateway.cluster import translate
from services.gateway.vocabulary.message import ClusterStatus, GroupStatus
from tideserve.common.v1 import record_pb2


def cluster_rows(
    cluster: ClusterStatus, records: Mapping[str, record_pb2.WorkerRecord]
) -> dict[str, Any]:
    """Workers, groups, decisions and shortfalls; `records`: registrations by worker id."""
    held = {
        name: end - first
        for group in cluster.groups
        for name, (first, end) in zip(group.members, group.layers, strict=False)
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


def _group(group: GroupStatus) -> dict[str, Any]:
    return {
        "id": group.group_id,
        "epoch": group.epoch,
        "model": group.model,
        "members": list(group.members),
        "layers": [list(layers) for layers in group.layers],
        "changing": group.changing,
        "degraded": group.degraded,
    }
