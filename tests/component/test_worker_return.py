"""A worker process with an expired lease registers again, or exits if it was removed."""

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest

from services.common.errors import StoreError
from services.common.etcd import Condition, Entry, SameCreation, Store
from services.common.membership import ASSIGNMENTS, EPOCH_FLOOR, WORKERS, Registration
from services.common.records import decode_record, encode_record, to_floor_record
from services.core.groups.fence import MemberState
from services.core.groups.vocabulary import Group, GroupPhase, Member, StoredGroup
from services.worker.identity import Forgotten, registration_conditions
from tests.support.control_plane import LEASE_TTL_S, delete, put, registered, worker_record
from tests.support.waiting import DEADLINE_S, eventually
from tideserve.common.v1 import record_pb2

KEY = f"{WORKERS}w0"
ASSIGNMENT = f"{ASSIGNMENTS}w0"
OWN = record_pb2.AssignmentRecord(
    worker_id="w0", incarnation="w0-a", group_id="group-w0", epoch=5, end_layer=2
)


def assignment(**changes: object) -> record_pb2.AssignmentRecord:
    record = record_pb2.AssignmentRecord()
    record.CopyFrom(OWN)
    record.MergeFrom(record_pb2.AssignmentRecord(**changes))
    return record


def member(epoch: int = 5) -> MemberState:
    """The fence of a process with the first two layers; epoch 0 is a new process."""
    state = MemberState("w0", "w0-a")
    if epoch:
        stage = Member("w0", "w0-a", 0, 2)
        group = Group("group-w0", epoch, GroupPhase.DEGRADED, (stage,), "m")
        state.observe([StoredGroup(group, 1)])
    return state


async def stored(store: Store) -> record_pb2.AssignmentRecord | None:
    entry = await store.read(ASSIGNMENT)
    return decode_record(record_pb2.AssignmentRecord, entry.value) if entry is not None else None


async def remove_assignment(store: Store, epoch_floor: int = 5) -> None:
    """Remove the assignment as the memory manager does."""
    floor = {EPOCH_FLOOR: encode_record(to_floor_record(epoch_floor))}
    entry = await store.read(ASSIGNMENT)
    conditions = [SameCreation(ASSIGNMENT, entry.create_revision)] if entry is not None else []
    assert await store.transact(conditions, floor, [ASSIGNMENT])


def returning(store: Store, state: MemberState) -> Registration:
    claim = partial(registration_conditions, store, state)
    return Registration(store, KEY, worker_record("w0"), LEASE_TTL_S, claim)


async def registers(store: Store, state: MemberState) -> None:
    registration = returning(store, state)
    running = asyncio.create_task(registration.run())
    async with asyncio.timeout(DEADLINE_S):
        await registration.registered.wait()
    running.cancel()
    await asyncio.wait([running])
    await registration.withdraw()


@pytest.mark.parametrize(("epoch", "incarnation"), [(0, None), (0, "w0-z"), (5, "w0-a")])
async def test_a_new_or_known_process_registers(
    store: Store, epoch: int, incarnation: str | None
) -> None:
    before = assignment(incarnation=incarnation) if incarnation is not None else None
    if before is not None:
        await put(store, ASSIGNMENT, before)
    await registers(store, member(epoch))
    assert await stored(store) == before


@pytest.mark.parametrize("incarnation", [None, "w0-b"])
async def test_a_removed_process_exits_without_registering(
    store: Store, incarnation: str | None
) -> None:
    if incarnation is not None:
        await put(store, ASSIGNMENT, assignment(incarnation=incarnation))
    else:
        await remove_assignment(store)
    with pytest.raises(Forgotten, match="w0 was disconnected for too long"):
        async with asyncio.timeout(DEADLINE_S):
            await returning(store, member()).run()
    assert KEY not in await store.list_prefix(KEY)
    assert Forgotten.exit_code == 1


async def test_a_removal_before_the_registration_is_respected(store: Store) -> None:
    """The assignment is removed between its read and the registration."""
    await put(store, ASSIGNMENT, OWN)
    reads = 0

    async def claim(registered: Entry | None) -> Sequence[Condition]:
        nonlocal reads
        reads += 1
        conditions = await registration_conditions(store, member(), registered)
        await remove_assignment(store)
        return conditions

    registration = Registration(store, KEY, worker_record("w0"), LEASE_TTL_S, claim)
    running = asyncio.create_task(registration.run())
    await eventually(running.done)
    assert isinstance(running.exception(), Forgotten)
    assert reads == 2
    assert KEY not in await store.list_prefix(KEY)


@pytest.mark.parametrize(
    ("before", "epoch"),
    [
        (None, 5),
        (assignment(epoch=3, end_layer=4), 5),  # from a backup
        (assignment(epoch=3, incarnation="w0-z"), 5),  # of a predecessor, restored from a backup
        (assignment(epoch=7, end_layer=4), 7),  # of a memory manager without the latest state
    ],
)
async def test_a_lost_assignment_is_rewritten(
    store: Store, before: record_pb2.AssignmentRecord | None, epoch: int
) -> None:
    if before is not None:
        await put(store, ASSIGNMENT, before)
    await registers(store, member())
    assert await stored(store) == assignment(epoch=epoch)


async def test_an_unreadable_assignment_is_rewritten(store: Store) -> None:
    await store.put(ASSIGNMENT, b"{")
    await registers(store, member())
    assert await stored(store) == OWN


async def test_a_concurrently_changed_assignment_is_kept(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = store.read

    async def read_before_a_removal(key: str) -> object:
        entry = await read(key)
        if key == EPOCH_FLOOR:
            await remove_assignment(store, epoch_floor=9)
        return entry

    monkeypatch.setattr(store, "read", read_before_a_removal)
    with pytest.raises(StoreError, match="the assignment of w0 changes"):
        await registration_conditions(store, member(), None)
    assert await stored(store) is None


@pytest.mark.parametrize("epoch_floor", [None, 9])
async def test_a_registered_worker_restores_its_assignment(
    store: Store, epoch_floor: int | None
) -> None:
    """At any floor, which other workers may raise: registered workers are never removed."""
    await put(store, ASSIGNMENT, OWN)
    if epoch_floor is not None:
        await put(store, EPOCH_FLOOR, to_floor_record(epoch_floor))
    claim = partial(registration_conditions, store, member())
    async with registered(store, KEY, worker_record("w0"), claim=claim):
        created = (await store.list_prefix(KEY))[KEY].create_revision
        await delete(store, ASSIGNMENT)

        async def restored() -> bool:
            return await stored(store) == OWN

        await eventually(restored)
        assert (await store.list_prefix(KEY))[KEY].create_revision == created
