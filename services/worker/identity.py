"""A worker's identity: its name and folder, its record in etcd, and when it may register."""

import contextlib
import re
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from services.common.errors import ConfigError, ServiceError
from services.common.etcd import Condition, Store, Unchanged
from services.common.membership import ASSIGNMENTS
from services.common.protocol import PROTOCOL_VERSION
from services.common.records import capabilities_of, read_record, to_shape_record
from services.worker.config import WorkerConfig
from services.worker.engine_participant import can_drop
from services.worker.ipc import EngineReady
from tideserve.common.v1 import record_pb2

# Worker names are part of etcd keys and of file names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


class Forgotten(ServiceError):
    """The cluster has removed this process after a long absence; a restarted one may register."""

    exit_code = 1


async def registration_conditions(
    store: Store, worker_id: str, incarnation: str, epoch: int
) -> tuple[Condition, ...]:
    """Conditions in etcd under which the process may register.

    `epoch` is that of its last group configuration, 0 if it was in no group yet. A process that was
    in a group may register again only while the record of its assigned layers exists; see
    `services.core.groups.singleton_groups`.

    Raises:
        Forgotten: if the assignment is gone, or belongs to another process.
        StoreError: if etcd does not respond.
    """
    if not epoch:
        return ()
    # Only the assignment record has the layers that the cluster expects on this worker.
    key = f"{ASSIGNMENTS}{worker_id}"
    entry = (await store.list_prefix(key)).get(key)
    is_own = (
        entry is not None
        and (record := read_record(record_pb2.AssignmentRecord, key, entry.value)) is not None
        and record.incarnation == incarnation
    )
    if entry is None or not is_own:
        raise Forgotten(
            f"{worker_id} was disconnected for too long and lost its place in the cluster; it exits"
            " so that it can be restarted"
        )
    return (Unchanged(key, entry.mod_revision),)


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
        kv_blocks_total=facts.kv_blocks_total,
        capabilities=capabilities_of(can_drop(facts), config.paced, config.engine),
        shape=to_shape_record(facts.shape),
        arena_bytes=facts.arena_bytes,
        activation_address=facts.activation_address,
        bulk_address=facts.bulk_address,
        model_digest=facts.model_digest,
        protocol_version=PROTOCOL_VERSION,
        code_digest=code_digest,
        scheduling=config.planner.scheduling,
    )
