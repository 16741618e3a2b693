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
        self._sends = 0
        self._sending = False
        self.started = False

    async def send(self, message: M) -> None:
        """Wait until the client has taken enough that there is room for more."""
        self.started = True
        self._sends += 1
        self._sending = True
        await self._send(message)
        self._sending = False

    async def watch(self) -> None:
        """Raise ClientGone when a send takes longer than the client may stall.

        One timer for the whole response: a timeout around every send would cost as much as the
        send itself. So the cut may come a quarter late.
        """
        stalled_s, seen = 0.0, 0
        while stalled_s < self._stall_s:
            await asyncio.sleep(self._stall_s / 4)
            stalled = self._sending and self._sends == seen
            stalled_s = stalled_s + self._stall_s / 4 if stalled else 0.0
            seen = self._sends
        raise ClientGone
