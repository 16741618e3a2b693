"""Sends the messages of a response and detects clients that stop reading."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, TypeVar

from services.gateway.bounds.cancel_scope import CancelScope

M = TypeVar("M")

CHECKS_PER_STALL = 4
"""Checks of a client within `stall_s`; a stall is detected late by at most a check interval."""


class ClientGone(Exception):
    """The client disconnected or stopped reading."""


class WatchedClient(Generic[M]):
    """A client. `send` sends a message of type M and waits for room in the send buffer."""

    def __init__(self, send: Callable[[M], Awaitable[None]], stall_s: float) -> None:
        """`stall_s`: seconds that the client may go without reading."""
        self._send = send
        self._stall_s = stall_s
        self._waiting = 0
        self._done = 0
        self.started = False

    async def send(self, message: M) -> None:
        """Send a message once the send buffer has room. Concurrent sends go out in order."""
        self.started = True
        self._waiting += 1
        try:
            await self._send(message)
            self._done += 1
        finally:
            self._waiting -= 1

    @contextlib.contextmanager
    def watched(self, cancel_scope: CancelScope) -> Iterator[None]:
        """Cancel the block with ClientGone when sends wait and none completes for `stall_s`."""
        # Use a single timer for the response: a timeout per send would cost as much as the send.
        loop, pause_s = asyncio.get_running_loop(), self._stall_s / CHECKS_PER_STALL
        timer: asyncio.TimerHandle

        def check(stalled: int, waited: bool, done_before: int) -> None:
            nonlocal timer
            # Count completed sends: other sends may wait now than at the last check.
            stalled = stalled + 1 if waited and self._done == done_before else 0
            if stalled == CHECKS_PER_STALL:
                cancel_scope.cancel(ClientGone())
            else:
                timer = loop.call_later(pause_s, check, stalled, self._waiting > 0, self._done)

        timer = loop.call_later(pause_s, check, 0, False, 0)
        try:
            yield
        finally:
            timer.cancel()
