"""Two gateways that both run lines of a batch while leadership moves between them at random.

A replaced leader is informed by the store alone, like a gateway process that was suspended.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.core.batches.vocabulary import BatchState
from services.gateway.batches.errors import Fenced
from services.gateway.batches.rows import ReturnedLine
from services.gateway.batches.store import BatchStore
from tests.support.batch_store import OWNER, begun_batch, result

LINES = 6
TURNS_MAX = 400


@dataclass(slots=True)
class Gateway:
    """A gateway: the fencing token it was elected with, and the lines it runs."""

    store: BatchStore
    name: str
    token: int = 0
    running: set[int] = field(default_factory=set)


class Takeovers:
    """A batch, and all results that the store accepted."""

    def __init__(
        self, stores: tuple[BatchStore, BatchStore], seed: int, elections: Iterator[int]
    ) -> None:
        self._random = random.Random(seed)
        self._gateways = [Gateway(store, name) for store, name in zip(stores, "ab", strict=True)]
        self._elections = elections
        self._batch_id = ""
        self.accepted: Counter[int] = Counter()
        self.bodies: dict[int, bytes] = {}

    async def run(self) -> None:
        """Run the batch to completion while leadership changes at random."""
        first = self._gateways[0]
        first.token = await first.store.lead(next(self._elections))
        self._batch_id = await begun_batch(first.store, first.token, LINES)
        for _ in range(TURNS_MAX):
            await asyncio.gather(*(self._act(gateway) for gateway in self._gateways))
            batch = await first.store.get(OWNER, self._batch_id)
            if batch.state is BatchState.IN_PROGRESS and not batch.open:
                break
        await self._check()

    async def _act(self, gateway: Gateway) -> None:
        try:
            await self._random.choice(
                [self._lead, self._claim, self._claim, self._finish, self._finish, self._return]
            )(gateway)
        except Fenced:
            gateway.token = 0
            gateway.running.clear()

    async def _lead(self, gateway: Gateway) -> None:
        # The current leader does not campaign; otherwise leadership would never be lost.
        if gateway.token == 0 or self._random.random() < 0.1:
            gateway.running.clear()
            gateway.token = await gateway.store.lead(next(self._elections))

    async def _claim(self, gateway: Gateway) -> None:
        if gateway.token:
            lines = await gateway.store.lines.claim(gateway.token, self._batch_id, 2)
            gateway.running |= {line.line for line in lines}

    async def _finish(self, gateway: Gateway) -> None:
        for line in sorted(gateway.running)[:2]:
            body = f'{{"by": "{gateway.name}{gateway.token}"}}'.encode()
            ended = await gateway.store.lines.finish(
                gateway.token, result(self._batch_id, line, body)
            )
            gateway.running.discard(line)
            if ended:
                self.accepted[line] += 1
                self.bodies[line] = body

    async def _return(self, gateway: Gateway) -> None:
        if gateway.running:
            line = gateway.running.pop()
            await gateway.store.lines.give_back(gateway.token, [ReturnedLine(self._batch_id, line)])

    async def _check(self) -> None:
        store = self._gateways[0].store
        batch = await store.get(OWNER, self._batch_id)
        assert batch.completed == LINES, f"{batch.open} lines are open, and no gateway runs them"
        assert self.accepted == Counter(range(1, LINES + 1)), self.accepted
        ended = await store.lines.ended(self._batch_id, 0)
        assert {line.line: line.body for line in ended} == self.bodies
        assert batch.output_tokens == 7 * LINES
