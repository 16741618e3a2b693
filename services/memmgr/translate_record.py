"""Whole listings of the records in etcd, as the memory manager needs them; see also `translate`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.common.etcd import Entry
from services.common.membership import ASSIGNMENTS, EPOCH_FLOOR, GROUPS, WORKERS
from services.common.records import read_record, to_assignment, to_facts, to_group, to_worker
from services.core.groups.vocabulary import (
    Assignment,
    Group,
    GroupPhase,
    StoredAssignment,
    StoredGroup,
    Worker,
)
from services.core.overload.worker_facts import WorkerFacts
from tideserve.common.v1 import record_pb2


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The addresses of a registered worker: RPC, and its lanes to other members.

    `draining`: it is leaving.
    """

    address: str
    activation_address: str
    bulk_address: str
    draining: bool = False


T = TypeVar("T")


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
        """The records in `entries`; invalid ones are left out.

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
    """Everything in a worker's record."""

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
                value = self._decode(key, entry)
            known[key] = (entry.mod_revision, value)
        self._known = known
        return [value for _, value in known.values() if value is not None]


def _to_worker(key: str, entry: Entry) -> _Registered | None:
    """None for an invalid record."""
    record = read_record(record_pb2.WorkerRecord, key, entry.value)
    if record is None:
        return None
    place = WorkerPlace(
        record.address, record.activation_address, record.bulk_address, record.draining
    )
    return _Registered(to_worker(record, entry.mod_revision), place, to_facts(record))


def _to_floor(entry: Entry | None) -> tuple[int, int]:
    """The floor, and the revision of its record; 0 and 0 if there is none."""
    if entry is None:
        return 0, 0
    record = read_record(record_pb2.EpochFloorRecord, EPOCH_FLOOR, entry.value)
    return record.epoch if record is not None else entry.mod_revision, entry.mod_revision


def _to_stored_group(key: str, entry: Entry) -> StoredGroup:
    record = read_record(record_pb2.GroupRecord, key, entry.value)
    group = to_group(record) if record is not None else None
    if group is None:
        group_id = key.removeprefix(GROUPS)
        group = Group(group_id, entry.mod_revision, GroupPhase.DISSOLVED, (), "")
    return StoredGroup(group, entry.mod_revision)


def _to_stored_assignment(key: str, entry: Entry) -> StoredAssignment:
    """An assignment that cannot be read counts as one to no group: it still fences."""
    record = read_record(record_pb2.AssignmentRecord, key, entry.value)
    if record is None:
        nowhere = Assignment(key.removeprefix(ASSIGNMENTS), "", "", 0)
        return StoredAssignment(nowhere, entry.mod_revision)
    return StoredAssignment(to_assignment(record), entry.mod_revision)
