"""Calls that are no requests, bounded for each guest so that none fills the door.

A call costs its client nothing while it sends no message, or takes none. gRPC's server lets a
stalled call go only when its client does, so what stays is counted here, by
guest; see RequestRecord.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from urllib.parse import unquote
from weakref import WeakValueDictionary

from services.common.timeouts import timeout
from services.gateway.bounds.line import Line
from services.gateway.vocabulary.errors import QueueFull

WAITING_MAX = 2048
"""Most calls of one guest while their message has not come."""
READING_MAX = 32
"""Most of these calls whose message is read; each may fill gRPC's memory with a message."""
STREAMS_MAX = 32
"""Streams of requests that one guest may have open; each is read at all times, see above."""
PARKED_MAX = 64
"""Calls of one guest that have ended for all but their client, which takes nothing."""
PARKED_BYTES = 256 * 2**10
"""A message of so many bytes that nobody takes counts as one more call."""
ALL_MAX = 8192
"""Most calls of each kind of all guests together; a guest that has none still gets one."""
TURN_TIMEOUT_S = 30.0


def address_of(peer: str) -> str:
    """The address of a peer as gRPC has it, such as ipv4:192.0.2.1:5000, in HTTP's form."""
    return unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]")


class CallLimits:
    """The lines of a door."""

    def __init__(self, reading_max: int = READING_MAX, turn_timeout_s: float = TURN_TIMEOUT_S):
        self._waiting = Line(WAITING_MAX, ALL_MAX)
        self._streams = Line(STREAMS_MAX, ALL_MAX)
        self._parked = Line(PARKED_MAX, ALL_MAX)
        self._reading_max = reading_max
        self._turn_timeout_s = turn_timeout_s
        # While anybody holds one.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @property
    def lines(self) -> Mapping[str, Line]:
        """By what the calls in them do."""
        return {"waiting": self._waiting, "streams": self._streams, "parked": self._parked}

    def check(self, guest: str) -> None:
        """Raise QueueFull if too many of the guest's calls are parked."""
        if self._parked.full(guest):
            raise QueueFull(
                "too many of your calls take nothing of what they were sent; read or cancel them"
            )

    @contextlib.asynccontextmanager
    async def waiting(self, guest: str) -> AsyncIterator[None]:
        """Count a call in while its message is to come; begins when it may be read.

        Raises:
            QueueFull: if too many of its guest's calls wait already, or for too long.
        """
        if self._waiting.full(guest):
            raise QueueFull("too many of your calls have sent no message yet; try again later")
        turns = self._turns.setdefault(guest, asyncio.Semaphore(self._reading_max))
        with self._waiting.entered(guest):
            try:
                async with timeout(self._turn_timeout_s):
                    await turns.acquire()
            except TimeoutError:
                raise QueueFull(
                    "calls of yours that send no message are in the way of this one; end them"
                ) from None
            try:
                yield
            finally:
                turns.release()

    @contextlib.contextmanager
    def stream(self, guest: str) -> Iterator[None]:
        """Count a stream of requests in, and out at the end. Raises QueueFull."""
        if self._streams.full(guest):
            raise QueueFull("you have many streams open already; one takes many requests")
        with self._streams.entered(guest):
            yield

    def parked(self, guest: str, unread_bytes: int = 0) -> contextlib.AbstractContextManager[None]:
        """Count a call in that only its client can end, and out at the end.

        `unread_bytes`: of what was sent and is not taken.
        """
        return self._parked.entered(guest, 1 + unread_bytes // PARKED_BYTES)
