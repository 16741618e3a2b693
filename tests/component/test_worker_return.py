"""A worker process whose lease has ended comes back, or ends if nobody knows what it holds."""

import asyncio
from collections.abc import Sequence

import pytest

from services.common.etcd import Condition, Store
from services.common.membership import ASSIGNMENTS, WORKERS, Registration
from services.worker.identity import Forgotten, registration_conditions
from tests.support.control_plane import LEASE_TTL_S, delete, put, worker_record
from tests.support.waiting import DEADLINE_S, eventually
from tideserve.common.v1 import record_pb2

KEY = f"{WORKERS}w0"


async def assigned(store: Store, incarnation: str) -> None:
    record = record_pb2.AssignmentRecord(worker_id="w0", incarnation=incarnation, epoch=5)
    await put(store, f"{ASSIGNMENTS}w0", record)


def returning(store: Store, epoch: int) -> Registration:
    async def claimed() -> Sequence[Condition]:
        return await registration_conditions(store, "w0", "w0-a", epoch)

    return Registration(store, KEY, worker_record("w0"), LEASE_TTL_S, claimed)


@pytest.mark.parametrize(("epoch", "incarnation"), [(0, None), (0, "w0-z"), (5, "w0-a")])
async def test_one_that_is_new_or_known_registers(
    store: Store, epoch: int, incarnation: str | None
) -> None:
    if incarnation is not None:
        await assigned(store, incarnation)
    registration = returning(store, epoch)
    running = asyncio.create_task(registration.run())
    async with asyncio.timeout(DEADLINE_S):
        await registration.registered.wait()
    running.cancel()
    await asyncio.wait([running])
    await registration.withdraw()


@pytest.mark.parametrize("incarnation", [None, "w0-b"])
async def test_one_that_is_forgotten_ends_and_does_not_register(
    store: Store, incarnation: str | None
) -> None:
    if incarnation is not None:
        await assigned(store, incarnation)
    with pytest.raises(Forgotten, match="w0 was disconnected for too long"):
        async with asyncio.timeout(DEADLINE_S):
            await returning(store, epoch=5).run()
    assert KEY not in await store.list_prefix(KEY)
    assert Forgotten.exit_code == 1


async def test_it_does_not_pass_by_a_removal_that_comes_between(store: Store) -> None:
    """Between its look at the assignment and its registration the assignment is removed."""
    await assigned(store, "w0-a")
    looks = 0

    async def claimed() -> Sequence[Condition]:
        nonlocal looks
        looks += 1
        found = await registration_conditions(store, "w0", "w0-a", 5)
        await delete(store, f"{ASSIGNMENTS}w0")
        return found

    registration = Registration(store, KEY, worker_record("w0"), LEASE_TTL_S, claimed)
    running = asyncio.create_task(registration.run())
    await eventually(running.done)
    assert isinstance(running.exception(), Forgotten)
    assert looks == 2
    assert KEY not in await store.list_prefix(KEY)
