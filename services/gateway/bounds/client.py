"""The sending side of a response, and whether its client still takes what is sent."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, TypeVar

from services.gateway.bounds.interruption import Interruption

M = TypeVar("M")

CHECKS_PER_STALL = 4
"""Looks at a client within `stall_s`; it is cut off at most one interval between looks late."""


class ClientGone(Exception):
    """The client hung up, or takes nothing any more."""


class WatchedClient(Generic[M]):
    """One client; `send` sends it a message of type M and waits until there is room."""

    def __init__(self, send: Callable[[M], Awaitable[None]], stall_s: float) -> None:
        """`stall_s`: how long the client may accept nothing."""
        self._send = send
        self._stall_s = stall_s
        self._waiting = 0
        self._done = 0
        self.started = False

    async def send(self, message: M) -> None:
        """Send a message when the client has taken enough that there is room for more.

        Several may wait at once; they go out one after the other.
        """
        self.started = True
        self._waiting += 1
        try:
            await self._send(message)
            self._done += 1
        finally:
            self._waiting -= 1

    @contextlib.contextmanager
    def watched(self, interruption: Interruption) -> Iterator[None]:
        """Interrupt with ClientGone when sends wait, and none ends for as long as it may stall.

        One timer for the whole response: a timeout around every send would cost as much as the
        send itself.
        """
        loop, pause_s = asyncio.get_running_loop(), self._stall_s / CHECKS_PER_STALL
        timer: asyncio.TimerHandle

        def look(stalled: int, waited: bool, seen: int) -> None:
            nonlocal timer
            # No send has ended since the last look; the sends that wait now may be others.
            stalled = stalled + 1 if waited and self._done == seen else 0
            if stalled == CHECKS_PER_STALL:
                interruption.interrupt(ClientGone())
            else:
                timer = loop.call_later(pause_s, look, stalled, self._waiting > 0, self._done)

        timer = loop.call_later(pause_s, look, 0, False, 0)
        try:
            yield
        finally:
            timer.cancel()
