"""Converts the records in etcd to the types of core; `translate` converts RPC messages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.common.etcd import Entry
from services.common.membership import ASSIGNMENTS, EPOCH_FLOOR, GROUPS, ROLES, WORKERS, read_floor
from services.common.records import (
    read_record,
    to_assignment,
    to_facts,
    to_group,
    to_role,
    to_worker,
)
from services.core.groups.vocabulary import (
    Assignment,
    Group,
    GroupPhase,
    StoredAssignment,
    StoredGroup,
    Worker,
)
from services.core.overload.worker_facts import WorkerFacts
from services.core.role import Role
from tideserve.common.v1 import record_pb2


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """The addresses of a registered worker, and whether it is shutting down."""

    address: str  # gRPC
    activation_address: str  # lane for activations between members
    bulk_address: str  # lane for parameters and KV between members
    draining: bool = False  # the worker is leaving


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listing:
    """All records, converted to the types of core and the driver."""

    workers: tuple[Worker, ...]
    groups: tuple[StoredGroup, ...]
    assignments: tuple[StoredAssignment, ...]
    endpoints: dict[str, WorkerEndpoint]
    facts: dict[str, WorkerFacts]
    epoch_floor: int = 0
    floor_revision: int = 0
    roles: dict[str, Role] = field(default_factory=dict)


class RecordReader:
    """Converts snapshots of all records; parses only records that have changed."""

    def __init__(self) -> None:
        self._workers = _Reader(WORKERS, _to_worker)
        self._groups = _Reader(GROUPS, _to_stored_group)
        self._assignments = _Reader(ASSIGNMENTS, _to_stored_assignment)
        self._roles = _Reader(ROLES, _to_role)

    def read(self, entries: Mapping[str, Entry]) -> Listing:
        """The records in `entries`, without invalid worker records."""
        # An unreadable group record counts as a dissolved group with its revision as the epoch:
        # every epoch requires a write, so no earlier epoch exceeds the revision, and the next epoch
        # is higher than all of them. The same holds for an unreadable epoch floor.
        workers = self._workers.read(entries)
        return Listing(
            tuple(entry.worker for entry in workers),
            tuple(self._groups.read(entries)),
            tuple(self._assignments.read(entries)),
            {entry.worker.worker_id: entry.endpoint for entry in workers},
            {entry.facts.worker_id: entry.facts for entry in workers if entry.facts is not None},
            *read_floor(entries.get(EPOCH_FLOOR)),
            roles=dict(self._roles.read(entries)),
        )


@dataclass(frozen=True, slots=True)
class _Registered:
    """The contents of a worker record."""

    worker: Worker
    endpoint: WorkerEndpoint
    facts: WorkerFacts | None


class _Reader(Generic[T]):
    """Converts the records with a key prefix; `decode` returns None for an invalid record."""

    def __init__(self, prefix: str, decode: Callable[[str, Entry], T | None]) -> None:
        self._prefix = prefix
        self._decode = decode
        self._known: dict[str, tuple[Entry, T | None]] = {}  # entry and value, by key

    def read(self, entries: Mapping[str, Entry]) -> list[T]:
        known = {}
        for key, entry in entries.items():
            if not key.startswith(self._prefix):
                continue
            last = self._known.get(key)
            # Compare all of it: an etcd that has lost writes may assign a revision again.
            value = last[1] if last and last[0] == entry else self._decode(key, entry)
            known[key] = (entry, value)
        self._known = known
        return [value for _, value in known.values() if value is not None]


def _to_worker(key: str, entry: Entry) -> _Registered | None:
    """The contents of a worker record; None if it is invalid."""
    record = read_record(record_pb2.WorkerRecord, key, entry.value)
    if record is None:
        return None
    endpoint = WorkerEndpoint(
        record.address, record.activation_address, record.bulk_address, record.draining
    )
    return _Registered(to_worker(record, entry.create_revision), endpoint, to_facts(record))


def _to_stored_group(key: str, entry: Entry) -> StoredGroup:
    record = read_record(record_pb2.GroupRecord, key, entry.value)
    group = to_group(record) if record is not None else None
    if group is None:
        group_id = key.removeprefix(GROUPS)
        group = Group(group_id, entry.mod_revision, GroupPhase.DISSOLVED, (), "")
    return StoredGroup(group, entry.mod_revision)


def _to_stored_assignment(key: str, entry: Entry) -> StoredAssignment:
    """The stored assignment; an unreadable one counts as an assignment to no group."""
    record = read_record(record_pb2.AssignmentRecord, key, entry.value)
    if record is None:
        nowhere = Assignment(key.removeprefix(ASSIGNMENTS), "", "", 0)
        return StoredAssignment(nowhere, entry.mod_revision)
    return StoredAssignment(to_assignment(record), entry.mod_revision)


def _to_role(key: str, entry: Entry) -> tuple[str, Role] | None:
    """Worker and role of a record; None if it is invalid."""
    record = read_record(record_pb2.RoleRecord, key, entry.value)
    role = to_role(record) if record is not None else None
    return None if role is None else (key.removeprefix(ROLES), role)
