"""A few places, in which owners take turns."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from services.core.fair_line import FairLine
from services.gateway.errors import QueueFull


class Turns:
    """So many may work at once; others wait, those of one owner in the order in which they came."""

    def __init__(self, places: int, owned_max: int) -> None:
        """`owned_max`: how many of one owner may wait."""
        self._free = places
        self._line = FairLine[asyncio.Future[None]](owned_max)

    @contextlib.asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Have a place meanwhile, once it is the owner's turn.

        Raises:
            QueueFull: if many of the owner wait already.
        """
        await self._enter(owner)
        try:
            yield
        finally:
            self._hand_on()

    async def _enter(self, owner: str) -> None:
        # Nobody waits while a place is free.
        if self._free:
            self._free -= 1
            return
        called = asyncio.get_running_loop().create_future()
        if not self._line.join(owner, called):
            raise QueueFull("many grammars of yours are being checked; try again")
        try:
            await called
        except asyncio.CancelledError:
            # Who is called in the same moment has the place.
            if not self._line.leave(owner, called):
                self._hand_on()
            raise

    def _hand_on(self) -> None:
        called = self._line.next()
        if called is None:
            self._free += 1
        else:
            called.set_result(None)
