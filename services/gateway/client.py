"""The sending side of a response, and whether its client still takes what is sent."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from services.gateway.serving import ClientGone

M = TypeVar("M")


class Client(Generic[M]):
    """One client, to whom `send` sends messages of type M and waits until there is room."""

    def __init__(self, send: Callable[[M], Awaitable[None]], stall_s: float) -> None:
        """`stall_s`: how long it may take nothing."""
        self._send = send
        self._stall_s = stall_s
        self._waiting = 0
        self._done = 0
        self.started = False

    async def send(self, message: M) -> None:
        """Wait until the client has taken enough that there is room for more.

        Several may wait at once; they go out one after the other.
        """
        self.started = True
        self._waiting += 1
        try:
            await self._send(message)
            self._done += 1
        finally:
            self._waiting -= 1

    async def watch(self) -> None:
        """Raise ClientGone when sends wait, and none ends for as long as the client may stall.

        One timer for the whole response: a timeout around every send would cost as much as the
        send itself. So the cut may come a quarter late.
        """
        stalled_s, waiting, seen = 0.0, False, 0
        while stalled_s < self._stall_s:
            await asyncio.sleep(self._stall_s / 4)
            # That waited all the time: those that wait now may be others.
            stalled = waiting and self._done == seen
            stalled_s = stalled_s + self._stall_s / 4 if stalled else 0.0
            waiting, seen = self._waiting > 0, self._done
        raise ClientGone
