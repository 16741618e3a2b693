"""Transactions of the group protocol against a real etcd, also with lost answers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from services.common.errors import StoreTimeout
from services.common.etcd import Condition, SameCreation, Store
from services.common.membership import EPOCH_FLOOR, LEADERS, WORKERS
from services.core.groups.vocabulary import (
    Assignment,
    Group,
    GroupPhase,
    Member,
    StoredAssignment,
    StoredGroup,
    Transact,
)
from services.core.role import Role
from services.memmgr.cluster_store import ClusterStore
from tests.support.control_plane import delete

LEADER = f"{LEADERS}memmgr"
GROUP = Group("group-w0", 1, GroupPhase.STABLE, (Member("w0", "w0-a", 0, 4),), "m")
ASSIGNMENT = Assignment("w0", "w0-a", "group-w0", 1, 0, 4)


class LosingStore(Store):
    """A store that applies transactions or not, and never answers."""

    def __init__(self, store: Store, applies: bool) -> None:
        self.__dict__ = store.__dict__
        self._applies = applies
        self.transactions = 0

    async def transact(
        self,
        conditions: Sequence[Condition],
        writes: Mapping[str, bytes],
        deletes: Sequence[str] = (),
    ) -> int:
        self.transactions += 1
        if self._applies:
            await super().transact(conditions, writes, deletes)
        raise StoreTimeout("no answer")


def condition(token: int) -> SameCreation:
    return SameCreation(LEADER, token)


async def elect(store: Store) -> int:
    await store.put_if(LEADER, b"{}", 0)
    return (await store.list_prefix(LEADER))[LEADER].create_revision


def write_of(token: int) -> Transact:
    return Transact(1, token, (GROUP,), (ASSIGNMENT,), {"group-w0": 0}, {"w0": 0}, {})


async def test_a_write_round_trips(store: Store) -> None:
    records = ClusterStore(store, condition)
    revision = await records.write(write_of(await elect(store)))
    assert revision is not None
    cluster = await records.list_until_answered()
    assert cluster.listing.groups == (StoredGroup(GROUP, revision),)
    assert cluster.listing.assignments == (StoredAssignment(ASSIGNMENT, revision),)
    assert cluster.revision == revision


async def test_a_stale_leaders_token_writes_nothing(store: Store) -> None:
    records = ClusterStore(store, condition)
    token = await elect(store)
    await delete(store, LEADER)
    assert await elect(store) > token
    assert await records.write(write_of(token)) is None
    assert (await records.list_until_answered()).listing.groups == ()


@pytest.mark.parametrize("applies", [True, False])
async def test_a_transaction_without_an_answer_is_looked_up_and_not_repeated(
    store: Store, applies: bool
) -> None:
    losing = LosingStore(store, applies)
    revision = await ClusterStore(losing, condition).write(write_of(await elect(store)))
    assert losing.transactions == 1
    (*stored,) = (await ClusterStore(store, condition).list_until_answered()).listing.groups
    assert [group.mod_revision for group in stored] == ([revision] if applies else [])
    assert [group.group for group in stored] == ([GROUP] if applies else [])
    assert (revision is not None) == applies


async def test_an_equal_older_record_is_not_mistaken_for_the_write(store: Store) -> None:
    """Removing a mark restores a record's content; only its revision differs."""
    records = ClusterStore(store, condition)
    token = await elect(store)
    first = await records.write(write_of(token))
    assert first is not None
    again = replace(
        write_of(token), group_revisions={"group-w0": first}, assignment_revisions={"w0": first}
    )
    assert await ClusterStore(LosingStore(store, applies=False), condition).write(again) is None
    later = await ClusterStore(LosingStore(store, applies=True), condition).write(again)
    assert later is not None and later > first


async def test_a_worker_may_update_its_record_but_not_register_again(store: Store) -> None:
    records, key = ClusterStore(store, condition), f"{WORKERS}w0"
    token = await elect(store)
    await store.put_if(key, b"{}", 0)
    entry = (await store.list_prefix(key))[key]
    assert await store.put_if(key, b'{"a": 1}', entry.mod_revision)
    write = replace(write_of(token), worker_revisions={"w0": entry.create_revision})
    written = await records.write(write)
    assert written is not None
    await delete(store, key)
    await store.put_if(key, b"{}", 0)
    revisions = {"group_revisions": {"group-w0": written}, "assignment_revisions": {"w0": written}}
    assert await records.write(replace(write, **revisions)) is None


@pytest.mark.parametrize("answers", [True, False])
async def test_departed_workers_are_removed_above_a_floor(store: Store, answers: bool) -> None:
    records = ClusterStore(store, condition)
    token = await elect(store)
    written = await records.write(write_of(token))
    assert written is not None
    removal = Transact(
        2,
        token,
        (),
        group_revisions={"group-w0": written},
        assignment_revisions={"w0": written},
        worker_revisions={"w0": 0},
        removed_workers=("w0",),
        epoch_floor=7,
    )
    stale = replace(removal, floor_revision=written)
    assert await records.write(stale) is None
    # A worker that has registered meanwhile is not removed.
    key = f"{WORKERS}w0"
    await store.put_if(key, b"{}", 0)
    assert await records.write(removal) is None
    await delete(store, key)
    writer = records if answers else ClusterStore(LosingStore(store, applies=True), condition)
    revision = await writer.write(removal)
    assert revision is not None and revision > written
    cluster = await records.list_until_answered()
    assert (cluster.listing.groups, cluster.listing.assignments) == ((), ())
    assert (cluster.listing.epoch_floor, cluster.listing.floor_revision) == (7, revision)
    # A delayed earlier attempt finds another floor.
    assert await records.write(removal) is None


async def test_an_unreadable_floor_is_above_every_epoch(store: Store) -> None:
    records = ClusterStore(store, condition)
    await store.put_if(EPOCH_FLOOR, b"junk", 0)
    listing = (await records.list_until_answered()).listing
    assert listing.epoch_floor == listing.floor_revision > 0


async def test_roles_are_written_and_removed_by_the_leader_alone(store: Store) -> None:
    records = ClusterStore(store, condition)
    token = await elect(store)
    assert await records.write_roles(token, {"w0": Role.PREFILL, "w1": Role.DECODE}, 12.5)
    listing = (await records.list_until_answered()).listing
    assert listing.roles == {"w0": Role.PREFILL, "w1": Role.DECODE}
    assert await records.write_roles(token, {"w0": Role.MIXED, "w1": Role.PREFILL}, 13.5)
    assert (await records.list_until_answered()).listing.roles == {"w1": Role.PREFILL}

    await delete(store, LEADER)
    later = await elect(store)
    assert not await records.write_roles(token, {"w1": Role.DECODE}, 14.5)
    assert (await records.list_until_answered()).listing.roles == {"w1": Role.PREFILL}
    assert await records.write_roles(later, {"w1": Role.DECODE}, 15.5)
    assert (await records.list_until_answered()).listing.roles == {"w1": Role.DECODE}
