"""A few places, in which guests take turns."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from services.core.fair_line import FairLine
from services.gateway.vocabulary.errors import QueueFull


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    guest: str
    called: asyncio.Future[None]


@dataclass(slots=True)
class Turn:
    """A place that a guest has."""

    work: asyncio.Future[Any] | None = None
    """What it is kept for when the guest leaves before that is done."""


class Turns:
    """So many may work at once; others wait, those of one guest in the order in which they came."""

    def __init__(self, places: int, each_max: int, waiting_max: int) -> None:
        """`each_max`: places that one guest may have; `waiting_max`: how many of one may wait."""
        self._places = places
        self._each_max = each_max
        self._inside = Counter[str]()
        self._line = FairLine[_Waiter](waiting_max)

    @property
    def taken(self) -> int:
        """Places that somebody has."""
        return self._inside.total()

    @contextlib.asynccontextmanager
    async def turn(self, guest: str) -> AsyncIterator[Turn]:
        """Have a place meanwhile, and until its `work` is done, once it is the guest's turn.

        Raises:
            QueueFull: if many of the guest wait already.
        """
        await self._enter(guest)
        turn = Turn()
        try:
            yield turn
        finally:
            if turn.work is None or turn.work.done():
                self._hand_on(guest)
            else:
                turn.work.add_done_callback(lambda _: self._hand_on(guest))

    async def _enter(self, guest: str) -> None:
        # A guest that waits while a place is free has as many as one guest may have.
        if self.taken < self._places and self._inside[guest] < self._each_max:
            self._inside[guest] += 1
            return
        waiter = _Waiter(guest, asyncio.get_running_loop().create_future())
        if not self._line.join(guest, waiter):
            raise QueueFull("many grammars of yours are being checked; try again")
        try:
            await waiter.called
        except asyncio.CancelledError:
            # A waiter that is called in the same moment has the place.
            if not self._line.leave(guest, waiter):
                self._hand_on(guest)
            raise

    def _hand_on(self, guest: str) -> None:
        self._inside[guest] -= 1
        if not self._inside[guest]:
            del self._inside[guest]
        full = [one for one, count in self._inside.items() if count >= self._each_max]
        if (waiter := self._line.next(full)) is not None:
            self._inside[waiter.guest] += 1
            # A cancelled waiter that has not run since hands the place on when it runs.
            if not waiter.called.done():
                waiter.called.set_result(None)
