"""Serves batches at this gateway: opens the store, campaigns, and leads while elected."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from services.common.election import Election
from services.common.etcd import Store
from services.common.timeouts import timeout
from services.core.batches.window import ClaimWindow
from services.gateway.batches.errors import BatchStoreDown, Fenced
from services.gateway.batches.leader import RETRY_S, BatchLeader
from services.gateway.batches.metrics import BatchMetrics
from services.gateway.batches.object_files import ObjectFiles
from services.gateway.batches.output import conclude, sweep
from services.gateway.batches.protocols import Door
from services.gateway.batches.rows import BatchRow
from services.gateway.batches.settings import BatchSettings
from services.gateway.batches.store import BatchStore
from services.gateway.batches.validation import BatchRules, validate
from tideserve.common.v1 import record_pb2

ELECTION = "batches"
# After the leader was fenced: its lease ends soon, or etcd has lost its data.
FENCED_S = 1.0
# The live page waits for it.
OPEN_TIMEOUT_S = 1.0

log = logging.getLogger(__name__)


class BatchService:
    """The batches of a gateway: any gateway serves the API, and the elected one runs lines."""

    def __init__(
        self,
        settings: BatchSettings,
        store: BatchStore,
        files: ObjectFiles,
        door: Door,
        metrics: BatchMetrics,
        etcd: Store,
        record: record_pb2.ServiceRecord,
        ttl_s: int,
    ) -> None:
        """`record` identifies this gateway in the election, whose lease lasts `ttl_s`."""
        self.settings, self.store, self.files = settings, store, files
        self._door, self._metrics = door, metrics
        self._changed = asyncio.Event()
        self._leader: BatchLeader | None = None
        self._claiming = True
        self._election = Election(etcd, ELECTION, record, ttl_s, self._note_election)

    async def run(self) -> None:
        """Campaign, and lead while elected, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._election.run())
            while True:
                self._changed.clear()
                if token := self._election.token:
                    leading = asyncio.create_task(self._lead(token))
                    try:
                        await self._changed.wait()
                    finally:
                        leading.cancel()
                        await asyncio.wait([leading])
                else:
                    await self._changed.wait()

    async def open_batches(self) -> Sequence[BatchRow]:
        """The batches that have not ended; none while the store is down or slow."""
        try:
            async with timeout(OPEN_TIMEOUT_S):
                return await self.store.open()
        except (BatchStoreDown, TimeoutError):
            return ()

    def stop_claiming(self) -> None:
        """Claim no more lines, as this gateway is about to stop."""
        self._claiming = False
        if self._leader is not None:
            self._leader.claiming = False

    async def close(self) -> None:
        """Let another gateway lead, and close the store; call after `run` was cancelled."""
        await self._election.resign()
        await self.store.close()
        self.files.close()

    async def validate(self, token: int, batch: BatchRow) -> None:
        """See `Jobs`."""
        rules = BatchRules(
            batch.endpoint,
            self.settings.batch_lines_max,
            partial(self._door.check_model, batch),
            self.settings.batch_order,
            self._door.tokens_max(batch),
        )
        await validate(self.store, self.files, token, batch, rules)

    async def write_files(self, token: int, batch: BatchRow) -> None:
        """See `Jobs`."""
        await conclude(self.store, self.files, token, batch, self.settings.batch_keep_s)

    async def sweep(self, token: int) -> None:
        """See `Jobs`."""
        await sweep(self.store, self.files, token, self.settings.batch_keep_s)

    def _note_election(self, token: int) -> None:
        self._changed.set()

    async def _lead(self, election: int) -> None:
        """Lead until cancelled; after an error, lead again if no other gateway does."""
        while True:
            try:
                token = await self.store.lead(election)
                log.info("leads the batches with token %d", token)
                self._leader = self._new_leader(token)
                await self._leader.run()
            except Fenced:
                log.info("another gateway leads the batches")
                await asyncio.sleep(FENCED_S)
            except BatchStoreDown:
                await asyncio.sleep(RETRY_S)
            except Exception:
                log.exception("the leader of the batches failed; it starts again")
                await asyncio.sleep(RETRY_S)
            finally:
                self._leader = None

    def _new_leader(self, token: int) -> BatchLeader:
        leader = BatchLeader(
            self.store,
            self.files,
            self._door,
            self,
            ClaimWindow(self.settings.batch_window),
            self._metrics,
            token,
        )
        leader.claiming = self._claiming
        return leader
