"""A worker's identity: its name and folder, its record in etcd, and when it may register."""

import contextlib
import logging
import re
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from services.common.errors import ConfigError, ServiceError, StoreError
from services.common.etcd import Condition, Entry, SameCreation, Store, Unchanged
from services.common.membership import ASSIGNMENTS, EPOCH_FLOOR, WORKERS, read_floor
from services.common.protocol import PROTOCOL_VERSION
from services.common.records import (
    capabilities_of,
    encode_record,
    read_record,
    to_assignment,
    to_assignment_record,
    to_cost_record,
    to_role_number,
    to_shape_record,
)
from services.core.groups.fence import MemberState, is_removed, restored
from services.core.groups.vocabulary import Assignment
from services.worker.config import WorkerConfig
from services.worker.engine_participant import can_drop
from services.worker.ipc import EngineReady
from tideserve.common.v1 import adapter_pb2, record_pb2

# Worker names are part of etcd keys and of file names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


log = logging.getLogger(__name__)


class Forgotten(ServiceError):
    """The cluster has removed this process after a long absence; a restarted one may register."""

    exit_code = 1


async def registration_conditions(
    store: Store, member: MemberState, registered: Entry | None
) -> tuple[Condition, ...]:
    """Conditions in etcd under which the process may register.

    `registered` is its registration, if it has any.

    A process that was in a group may register again only while the record of its assigned layers
    exists; see `services.core.groups.singleton_groups`. A record that etcd has lost is written
    again: only the process knows its layers then.

    Raises:
        Forgotten: if the memory manager has removed the assignment, or another process has it.
        StoreError: if etcd does not respond, or the assignment changes meanwhile.
    """
    # Taken before the read: an older record then shows that etcd has lost a newer one.
    own = member.assignment
    if own is None:
        return ()
    key = f"{ASSIGNMENTS}{member.worker_id}"
    entry = await store.read(key)
    revision = entry.mod_revision if entry is not None else 0
    stored = _read_assignment(key, entry) if entry is not None else None
    if stored is not None and member.agrees(stored):
        return (Unchanged(key, revision),)
    epoch_floor, floor_revision = read_floor(await store.read(EPOCH_FLOOR))
    unchanged: list[Condition] = [Unchanged(key, revision), Unchanged(EPOCH_FLOOR, floor_revision)]
    if registered is not None:
        # The memory manager removes no registered worker, whatever the floor.
        epoch_floor = 0
        worker = SameCreation(f"{WORKERS}{member.worker_id}", registered.create_revision)
        unchanged.append(worker)
    if is_removed(own, stored, epoch_floor):
        raise Forgotten(
            f"{member.worker_id} was disconnected for too long and lost its place in the cluster;"
            " it exits so that it can be restarted"
        )
    written = to_assignment_record(restored(own, stored))
    revision = await store.transact(unchanged, {key: encode_record(written)})
    if not revision:
        raise StoreError(f"the assignment of {member.worker_id} changes; it is read again")
    log.warning("etcd had lost the assignment of %s; it is written again", member.worker_id)
    return (Unchanged(key, revision),)


def _read_assignment(key: str, entry: Entry) -> Assignment | None:
    """The stored assignment; None if it is unreadable."""
    record = read_record(record_pb2.AssignmentRecord, key, entry.value)
    return to_assignment(record) if record is not None else None


@contextlib.contextmanager
def completed_config(config: WorkerConfig) -> Iterator[WorkerConfig]:
    """The configuration with defaults for name and folder; removes a temporary folder at exit.

    Raises:
        ConfigError: if the name is invalid.
    """
    name = config.worker_id or socket.gethostname()
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"'worker_id' is '{name}', but may have only letters, digits, dots, dashes and"
            " underscores; choose another (the default is the host name)"
        )
    if config.run_dir is not None:
        yield replace(config, worker_id=name)
        return
    with tempfile.TemporaryDirectory(prefix="tideserve-") as folder:
        yield replace(config, worker_id=name, run_dir=Path(folder))


def worker_record(
    config: WorkerConfig, incarnation: str, code_digest: str, address: str, facts: EngineReady
) -> record_pb2.WorkerRecord:
    """The etcd record of a worker that is not draining."""
    return record_pb2.WorkerRecord(
        worker_id=config.worker_id,
        incarnation=incarnation,
        address=address,
        model=config.model_name,
        max_model_len=facts.max_model_len,
        context_tokens=facts.context_tokens,
        block_size=facts.block_size,
        max_batch_tokens=config.planner.max_batch_tokens,
        location=config.location_parts,
        role=to_role_number(config.role),
        kv_blocks_total=facts.kv_blocks_total,
        capabilities=capabilities_of(
            can_drop(facts),
            config.paced,
            config.engine,
            hands_over=can_drop(facts) and config.planner.prefix_caching,
        ),
        shape=to_shape_record(facts.shape),
        arena_bytes=facts.arena_bytes,
        chunk_bytes=facts.chunk_bytes,
        activation_address=facts.activation_address,
        bulk_address=facts.bulk_address,
        model_digest=facts.model_digest,
        protocol_version=PROTOCOL_VERSION,
        code_digest=code_digest,
        scheduling=config.planner.scheduling,
        cost_model=to_cost_record(facts.cost_model),
        no_drops=facts.no_drops,
        adapters=_adapter_limits(facts),
    )


def _adapter_limits(facts: EngineReady) -> adapter_pb2.AdapterLimits | None:
    if not facts.adapter_slots:
        return None
    return adapter_pb2.AdapterLimits(slots=facts.adapter_slots, rank_max=facts.adapter_rank_max)
