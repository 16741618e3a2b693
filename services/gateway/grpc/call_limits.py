"""Limits the gRPC calls of each client that occupy no request slot.

A client may hold calls open without sending or reading a message, and gRPC's server cannot end such
calls. So they are counted by client (`limit_key`: the owner of the API key, or an address).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from weakref import WeakValueDictionary

from services.common.timeouts import timeout
from services.gateway.bounds.concurrency_limit import ConcurrencyLimit
from services.gateway.vocabulary.errors import QueueFull

WAITING_MAX = 2048
"""Maximum calls per client that wait for their message."""
READING_MAX = 32
"""Maximum waiting calls per client whose message gRPC may read into memory at a time."""
STREAMS_MAX = 32
"""Maximum open streams of requests per client; gRPC reads each of them at all times."""
PARKED_MAX = 64
"""Maximum parked calls per client: completed calls whose client does not read the response."""
PARKED_BYTES = 256 * 2**10
"""Unread bytes of a parked call for which it counts as one more call."""
ALL_MAX = 8192
"""Maximum calls of each kind of all clients; beyond it, a client may still have a single call."""
READ_SLOT_TIMEOUT_S = 30.0


class CallLimits:
    """The limits of waiting calls, open streams and parked calls."""

    def __init__(self, reading_max: int = READING_MAX, slot_timeout_s: float = READ_SLOT_TIMEOUT_S):
        self._waiting = ConcurrencyLimit(WAITING_MAX, ALL_MAX)
        self._streams = ConcurrencyLimit(STREAMS_MAX, ALL_MAX)
        self._parked = ConcurrencyLimit(PARKED_MAX, ALL_MAX)
        self._reading_max = reading_max
        self._slot_timeout_s = slot_timeout_s
        # Slots for reading messages, by client; an entry is removed with its last user.
        self._read_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @property
    def by_kind(self) -> Mapping[str, ConcurrencyLimit]:
        """The limits by the kind of call, for metrics."""
        return {"waiting": self._waiting, "streams": self._streams, "parked": self._parked}

    def check(self, limit_key: str) -> None:
        """Raise QueueFull if the client has too many parked calls."""
        if self._parked.full(limit_key):
            raise QueueFull("too many of your calls have unread responses; read or cancel them")

    @contextlib.asynccontextmanager
    async def waiting(self, limit_key: str) -> AsyncIterator[None]:
        """Count a call that waits for its message; enters once the message may be read.

        Raises:
            QueueFull: if the client has too many waiting calls, or got no read slot in time.
        """
        if self._waiting.full(limit_key):
            raise QueueFull("too many of your calls have sent no message yet; retry later")
        slots = self._read_slots.setdefault(limit_key, asyncio.Semaphore(self._reading_max))
        with self._waiting.entered(limit_key):
            try:
                async with timeout(self._slot_timeout_s):
                    await slots.acquire()
            except TimeoutError:
                raise QueueFull(
                    "other calls of yours that send no message block this call; end them"
                ) from None
            try:
                yield
            finally:
                slots.release()

    @contextlib.contextmanager
    def stream(self, limit_key: str) -> Iterator[None]:
        """Count an open stream of requests. Raises QueueFull."""
        if self._streams.full(limit_key):
            raise QueueFull("you have too many open streams; send more requests on each stream")
        with self._streams.entered(limit_key):
            yield

    def parked(
        self, limit_key: str, unread_bytes: int = 0
    ) -> contextlib.AbstractContextManager[None]:
        """Count a parked call, which only its client can end.

        `unread_bytes`: bytes that were sent and that the client has not read.
        """
        return self._parked.entered(limit_key, 1 + unread_bytes // PARKED_BYTES)
