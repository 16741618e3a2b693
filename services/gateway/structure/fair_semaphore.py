"""A semaphore for work that clients share fairly.

A client is a `limit_key`: the owner of the API key, else an address.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from services.core.round_robin_queue import RoundRobinQueue
from services.gateway.vocabulary.errors import QueueFull


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    limit_key: str
    granted: asyncio.Future[None]


@dataclass(slots=True)
class Slot:
    """An acquired slot of the semaphore."""

    work: asyncio.Future[Any] | None = None
    """If set, the slot is held until it is done, even if the caller is cancelled first."""


class FairSemaphore:
    """A semaphore whose waiters take turns by client, and in order of arrival within a client."""

    def __init__(self, slots: int, client_max: int, waiting_max: int, work: str) -> None:
        """`slots`: slots in all; `client_max`, `waiting_max`: slots and waiters per client.

        `work`: what the slots are for, in errors.
        """
        self._slots = slots
        self._client_max = client_max
        self._work = work
        # Slots that each client holds.
        self._held = Counter[str]()
        self._waiting = RoundRobinQueue[_Waiter](waiting_max)

    @property
    def taken(self) -> int:
        """Number of slots in use."""
        return self._held.total()

    @contextlib.asynccontextmanager
    async def slot(self, limit_key: str) -> AsyncIterator[Slot]:
        """Wait for a slot and hold it until the block ends and the slot's `work`, if set, is done.

        Raises:
            QueueFull: if too many callers of this client wait already.
        """
        await self._acquire(limit_key)
        slot = Slot()
        try:
            yield slot
        finally:
            # The limit is on concurrent work, which continues when its caller is cancelled.
            if slot.work is None or slot.work.done():
                self._release(limit_key)
            else:
                slot.work.add_done_callback(lambda _: self._release(limit_key))

    async def _acquire(self, limit_key: str) -> None:
        # This does not overtake waiters: while a slot is free, all waiters' clients are at their
        # limit.
        if self.taken < self._slots and self._held[limit_key] < self._client_max:
            self._held[limit_key] += 1
            return
        waiter = _Waiter(limit_key, asyncio.get_running_loop().create_future())
        if not self._waiting.join(limit_key, waiter):
            raise QueueFull(f"too many of your {self._work}; try again")
        try:
            await waiter.granted
        except asyncio.CancelledError:
            # If the slot was granted in the same iteration of the event loop, release it.
            if not self._waiting.leave(limit_key, waiter):
                self._release(limit_key)
            raise

    def _release(self, limit_key: str) -> None:
        self._held[limit_key] -= 1
        if not self._held[limit_key]:
            del self._held[limit_key]
        full = [client for client, count in self._held.items() if count >= self._client_max]
        if (waiter := self._waiting.next(full)) is not None:
            self._held[waiter.limit_key] += 1
            # A waiter that is already cancelled releases the slot when its task runs.
            if not waiter.granted.done():
                waiter.granted.set_result(None)
