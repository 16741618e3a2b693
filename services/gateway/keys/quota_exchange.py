"""Exchanges quota demand between gateways through etcd, so that they share each owner's quota.

Each gateway publishes a report of its demand per owner (tenant); from all reports it computes its
own share of each limit.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from services.common.clock import monotonic_s
from services.common.errors import StoreError
from services.common.etcd import Entry, Store
from services.common.membership import QUOTAS
from services.common.records import encode_record, read_record
from services.common.report import Codec
from services.core.quota.demand import OwnerDemand
from services.core.quota.state import QuotaReport, QuotaState
from tideserve.common.v1 import record_pb2

EXCHANGE_INTERVAL_S = 1.0

log = logging.getLogger(__name__)
_DEMAND = Codec(OwnerDemand, record_pb2.QuotaWish)


class QuotaExchange:
    """Publishes and reads demand reports every `EXCHANGE_INTERVAL_S`.

    While etcd is unreachable (`sharing` is False), each gateway keeps its last share.
    """

    def __init__(
        self,
        store: Store,
        incarnation: str,
        state: QuotaState,
        ttl_s: int,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._store = store
        self._incarnation = incarnation
        self._key = f"{QUOTAS}{incarnation}"
        self._state = state
        self._ttl_s = ttl_s
        self._now_s = now_s
        self._lease = 0
        self._renew_at_s = 0.0
        # The last report that etcd has; None if it must be written again.
        self._published: bytes | None = None
        # The reports of the other gateways, by etcd key.
        self._peers: dict[str, QuotaReport] = {}
        self.sharing = True

    async def run(self) -> None:
        """Exchange reports until cancelled."""
        while True:
            try:
                await self._exchange()
            except StoreError as error:
                self._fail(error)
            else:
                self._succeed()
            await asyncio.sleep(EXCHANGE_INTERVAL_S)

    async def withdraw(self) -> None:
        """Delete this gateway's report, so that others get its shares. Call after `run` ends."""
        lease, self._lease = self._lease, 0
        if lease:
            try:
                await self._store.revoke_lease(lease)
            except StoreError as error:
                log.warning(
                    "cannot withdraw this gateway's quota shares, they expire with its lease: %s",
                    error,
                )

    async def _exchange(self) -> None:
        await self._renew_lease()
        demands = self._state.report(self._now_s())
        # In a thread: a report of many owners takes long to encode.
        value = await asyncio.to_thread(_encoded, self._incarnation, demands)
        # Write an empty report once, to clear the previous demand; write others every time.
        if demands or value != self._published:
            await self._store.put(self._key, value, self._lease)
            self._published = value
        listing = await self._store.list_prefix(QUOTAS)
        own = listing.get(self._key)
        if own is None or own.lease != self._lease:
            self._published = None  # deleted or replaced in etcd
        others = {key: entry for key, entry in listing.items() if key != self._key}
        self._peers = await asyncio.to_thread(_decoded, others, self._peers)
        self._state.receive(self._peers, self._now_s())

    async def _renew_lease(self) -> None:
        now_s = self._now_s()
        if self._lease and now_s < self._renew_at_s:
            return
        if not self._lease or await self._store.keep_alive(self._lease) == 0:
            self._lease, self._published = await self._store.grant_lease(self._ttl_s), None
        self._renew_at_s = now_s + self._ttl_s / 4

    def _fail(self, error: StoreError) -> None:
        if self.sharing:
            log.warning("quotas are not shared; each gateway keeps its last share: %s", error)
        self.sharing = False
        self._state.hold(True, self._now_s())
        # Check the lease and write the report next time: both may have expired.
        self._renew_at_s, self._published = 0.0, None

    def _succeed(self) -> None:
        if not self.sharing:
            log.info("quotas are shared again")
        self.sharing = True
        self._state.hold(False, self._now_s())


def _encoded(incarnation: str, demands: Mapping[str, OwnerDemand]) -> bytes:
    record = record_pb2.QuotaRecord(incarnation=incarnation)
    for owner, demand in demands.items():
        record.owners[owner].CopyFrom(_DEMAND.message(demand))
    return encode_record(record)


def _decoded(
    listing: Mapping[str, Entry], before: Mapping[str, QuotaReport]
) -> dict[str, QuotaReport]:
    """The reports in the records. Unchanged records are not decoded again."""
    reports = {}
    for key, entry in listing.items():
        last = before.get(key)
        if last is None or last.revision != entry.mod_revision:
            record = read_record(record_pb2.QuotaRecord, key, entry.value)
            if record is None:
                continue
            demands = {owner: _DEMAND.report(wish) for owner, wish in record.owners.items()}
            last = QuotaReport(entry.mod_revision, demands)
        reports[key] = last
    return reports
