"""Reads the records of workers, groups and assignments in etcd, and writes them in transactions.

A *fencing token* identifies the leadership of an instance; transactions compare it, so that a
former leader cannot write.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from services.common.errors import StoreError
from services.common.etcd import RETRY_S, SameCreation, Store, StoreSnapshot, Unchanged
from services.common.membership import ASSIGNMENTS, EPOCH_FLOOR, GROUPS, ROLES, WORKERS
from services.common.records import (
    encode_record,
    to_assignment_record,
    to_floor_record,
    to_group_record,
    to_role_record,
)
from services.core.groups.vocabulary import Transact
from services.core.role import Role
from services.memmgr.translate_record import Listing, RecordReader

ROOT = ""  # prefix of all keys


@dataclass(frozen=True, slots=True)
class ClusterRecords:
    """All records at a revision; `rollbacks`: how often etcd had lost writes before."""

    revision: int
    listing: Listing
    rollbacks: int = 0


class ClusterStore:
    """Reads consistent snapshots of all records, and writes atomically."""

    def __init__(self, store: Store, leader: Callable[[int], SameCreation]) -> None:
        """`leader` converts a fencing token to the condition that this leadership still holds."""
        self._store = store
        self._leader = leader
        self._reader = RecordReader()

    async def follow(self) -> AsyncIterator[ClusterRecords]:
        """Yield all records now and after every change; yields nothing while etcd is down."""
        async for snapshot in self._store.follow_prefix(ROOT):
            yield self._read(snapshot)

    async def list_until_answered(self) -> ClusterRecords:
        """Read all records; retries until etcd answers."""
        return self._read(await self._snapshot_until_answered())

    async def write(self, command: Transact) -> int | None:
        """Execute a transaction; returns its revision, or None if rejected or uncertain.

        If etcd does not answer, the outcome is determined by reading the records. The write is
        never retried, because it may have been applied, or may be applied even after the read.
        """
        writes, deletes = _writes(command), _deletes(command)
        conditions = _conditions(command)
        try:
            workers = [
                SameCreation(f"{WORKERS}{name}", created)
                for name, created in command.worker_revisions.items()
            ]
            revision = await self._store.transact(
                [self._leader(command.token), *workers, *conditions], writes, deletes
            )
            return revision or None
        except StoreError:
            return await self._read_back(writes, deletes, conditions)

    async def write_roles(self, token: int, roles: Mapping[str, Role], since_s: float) -> bool:
        """Write the roles of workers, without those that are mixed; False if another leads.

        `since_s`: seconds since 1970.

        Raises:
            StoreError: without an answer; the records may have been written.
        """
        mixed = [worker_id for worker_id, role in roles.items() if role is Role.MIXED]
        writes = {
            f"{ROLES}{worker_id}": encode_record(to_role_record(worker_id, role, since_s))
            for worker_id, role in roles.items()
            if role is not Role.MIXED
        }
        deletes = [f"{ROLES}{worker_id}" for worker_id in mixed]
        return bool(await self._store.transact([self._leader(token)], writes, deletes))

    async def _read_back(
        self, writes: dict[str, bytes], deletes: list[str], conditions: list[Unchanged]
    ) -> int | None:
        """The revision of a write with an unknown outcome, or None if it is not applied yet."""
        # Applied if and only if every written key has its new value at the same new revision.
        entries = (await self._snapshot_until_answered()).entries
        before = {condition.key: condition.mod_revision for condition in conditions}
        revisions = set()
        if any(key in entries for key in deletes):
            return None
        for key, value in writes.items():
            entry = entries.get(key)
            if entry is None or entry.value != value or entry.mod_revision <= before[key]:
                return None
            revisions.add(entry.mod_revision)
        return revisions.pop() if len(revisions) == 1 else None

    async def _snapshot_until_answered(self) -> StoreSnapshot:
        while True:
            try:
                return await self._store.snapshot(ROOT)
            except StoreError:
                await asyncio.sleep(RETRY_S)

    def _read(self, snapshot: StoreSnapshot) -> ClusterRecords:
        listing = self._reader.read(snapshot.entries)
        return ClusterRecords(snapshot.revision, listing, snapshot.rollbacks)


def _deletes(command: Transact) -> list[str]:
    """Keys of the existing records of the workers that the transaction removes."""
    return [
        f"{prefix}{key}"
        for prefix, revisions in (
            (GROUPS, command.group_revisions),
            (ASSIGNMENTS, command.assignment_revisions),
        )
        for key, revision in revisions.items()
        if command.removed_workers and revision
    ]


def _writes(command: Transact) -> dict[str, bytes]:
    writes = {
        f"{GROUPS}{group.group_id}": encode_record(to_group_record(group))
        for group in command.groups
    }
    for assignment in command.assignments:
        value = encode_record(to_assignment_record(assignment))
        writes[f"{ASSIGNMENTS}{assignment.worker_id}"] = value
    if command.removed_workers:
        writes[EPOCH_FLOOR] = encode_record(to_floor_record(command.epoch_floor))
    return writes


def _conditions(command: Transact) -> list[Unchanged]:
    """The conditions on the records that the memory manager writes."""
    floor = [Unchanged(EPOCH_FLOOR, command.floor_revision)] if command.removed_workers else []
    return floor + [
        Unchanged(f"{prefix}{key}", revision)
        for prefix, revisions in (
            (GROUPS, command.group_revisions),
            (ASSIGNMENTS, command.assignment_revisions),
        )
        for key, revision in revisions.items()
    ]
