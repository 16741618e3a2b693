"""The election of a leader, against a real etcd."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.common.election import Election, leader_key
from services.common.etcd import Store
from tests.support.control_plane import SHORT_LEASE_TTL_S
from tests.support.etcd_server import EtcdServer
from tests.support.waiting import eventually
from tideserve.common.v1 import record_pb2

KEY = leader_key("memmgr")


class Candidate:
    """A campaign, with all tokens it received."""

    def __init__(self, store: Store, name: str) -> None:
        record = record_pb2.ServiceRecord(name="memmgr", incarnation=name)
        self.tokens: list[int] = []
        self.election = Election(store, "memmgr", record, SHORT_LEASE_TTL_S, self.tokens.append)

    @property
    def leads(self) -> bool:
        return self.election.token != 0


@asynccontextmanager
async def candidate(store: Store, name: str) -> AsyncIterator[Candidate]:
    started = Candidate(store, name)
    task = asyncio.create_task(started.election.run())
    try:
        yield started
    finally:
        task.cancel()
        await asyncio.wait([task])
        await started.election.resign()


async def test_the_leaders_token_is_the_create_revision_of_the_key(store: Store) -> None:
    async with candidate(store, "a") as first, candidate(store, "b") as second:
        await eventually(lambda: first.leads or second.leads)
        leader, other = (first, second) if first.leads else (second, first)
        entry = (await store.list_prefix(KEY))[KEY]
        assert leader.election.token == entry.create_revision
        assert not other.leads


async def test_the_next_candidate_leads_at_once_after_a_resignation(store: Store) -> None:
    async with candidate(store, "b") as second:
        async with candidate(store, "a") as first:
            await eventually(lambda: first.leads or second.leads)
        await eventually(lambda: second.leads)
        assert first.tokens[-1:] in ([], [0])
        assert all(token < second.election.token for token in first.tokens)


async def test_a_deleted_key_ends_the_leadership(store: Store) -> None:
    async with candidate(store, "a") as first:
        await eventually(lambda: first.leads)
        before = first.election.token
        # Its lease has expired, as after a long pause.
        await store.revoke_lease(first.election._registration._lease)
        await eventually(lambda: first.election.token > before)
        assert first.tokens[:2] == [before, 0]


async def test_an_outage_of_etcd_longer_than_the_lease(store: Store, etcd: EtcdServer) -> None:
    async with candidate(store, "a") as first:
        await eventually(lambda: first.leads)
        etcd.kill()
        await eventually(lambda: not first.leads)
        etcd.start()
        await eventually(lambda: first.leads)
