"""Owns the group state: feeds it listings, carries out its writes."""

import asyncio
import logging

from services.common.errors import StoreError
from services.common.etcd import RETRY_S, Store
from services.common.membership import GROUPS, WORKERS, Directory
from services.core.memory.group import (
    Event,
    Group,
    GroupPhase,
    GroupsListed,
    GroupState,
    WorkersListed,
    WriteFinished,
    WriteGroup,
)
from services.memmgr.group_store import GroupStore
from services.memmgr.translate import to_stored_groups, to_worker_facts, to_workers
from services.memmgr.worker_facts import WorkerFacts
from services.memmgr.worker_memory import MemoryView
from tideserve.common.v1 import record_pb2

log = logging.getLogger(__name__)


class Driver:
    """Keeps group records in step with the registered workers.

    All methods run on the event loop's thread. While etcd is away nothing changes.
    """

    def __init__(self, state: GroupState, store: Store, memory: MemoryView) -> None:
        self._state = state
        self._memory = memory
        self._group_store = GroupStore(store)
        self._workers = Directory(store, WORKERS, record_pb2.WorkerRecord, self._list_workers)
        self._groups = Directory(store, GROUPS, record_pb2.GroupRecord, self._list_groups)
        # One task per outstanding write, of which a group has at most one.
        self._writes: asyncio.TaskGroup | None = None
        # What the registered workers say about their memory, by id.
        self.facts: dict[str, WorkerFacts] = {}
        # The groups that serve, ordered by id.
        self.stable_groups: tuple[Group, ...] = ()

    @property
    def loaded(self) -> bool:
        """Whether workers and groups have been listed."""
        return self._workers.loaded.is_set() and self._groups.loaded.is_set()

    async def run(self) -> None:
        """Follow etcd and write groups until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._writes = tasks
            tasks.create_task(self._workers.run())
            tasks.create_task(self._groups.run())

    def _list_workers(self) -> None:
        workers = to_workers(self._workers.records)
        self.facts = to_worker_facts(self._workers.records)
        self._memory.set_registered({worker.worker_id: worker.incarnation for worker in workers})
        self._apply(WorkersListed(workers))

    def _list_groups(self) -> None:
        stored = to_stored_groups(self._groups.entries)
        stable = [one.group for one in stored if one.group.phase is GroupPhase.STABLE]
        self.stable_groups = tuple(sorted(stable, key=lambda group: group.group_id))
        self._apply(GroupsListed(stored))

    def _apply(self, event: Event) -> None:
        assert self._writes is not None
        for command in self._state.handle(event):
            self._writes.create_task(self._write(command))

    async def _write(self, command: WriteGroup) -> None:
        group = command.group
        committed = await self._group_store.write(command)
        log.info(
            "%s %s at epoch %d: %s",
            group.group_id,
            group.phase,
            group.epoch,
            "committed" if committed else "not committed, reading again",
        )
        self._apply(WriteFinished(group.group_id, committed))
        if not committed:
            # The directory tells changes only; this may have been none.
            await asyncio.sleep(RETRY_S)
            self._apply(await self._list_until_answered())

    async def _list_until_answered(self) -> GroupsListed:
        while True:
            try:
                return await self._group_store.list()
            except StoreError:
                await asyncio.sleep(RETRY_S)
