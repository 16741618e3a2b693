"""A response with several readers, for repeated requests with an Idempotency-Key.

Each reader, a client's request, reads all messages from the beginning, live or replayed.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from services.gateway.bounds.client import ClientGone
from services.gateway.vocabulary.errors import GatewayError

M = TypeVar("M")


class ResponseCache(Protocol[M]):
    """Bounds the bytes of all responses, and holds the cached ones."""

    def has_room(self, size_bytes: int) -> bool:
        """Make room for `size_bytes` by evicting others; return whether that succeeded."""

    def count(self, size_bytes: int) -> None:
        """Add `size_bytes` to the bytes held; negative: subtract."""

    def complete(self, response: "SharedResponse[M]") -> None:
        """Start the lifetime of a response that is complete."""

    def remove(self, response: "SharedResponse[M]") -> None:
        """Remove the response from the cache."""


class SharedResponse(Generic[M]):
    """The messages of a response, in order.

    Theory of operation. While the response is *cached*, every message stays and readers may join.
    After eviction no reader joins: the response holds the messages that its slowest reader has not
    read, and the producer waits for the readers (back-pressure). A response is evicted when the
    cache has no room, when it fails, and when it has had no reader for the grace period. Once it is
    evicted and has no reader, the producer is cancelled.
    """

    def __init__(
        self, cache: ResponseCache[M], digest: bytes, response_id: str, grace_s: float
    ) -> None:
        """`digest`: of the request body. `grace_s`: seconds without a reader before eviction."""
        self.digest = digest
        self.response_id = response_id
        # ASCII sentences that every reader sends as headers.
        self.warnings: tuple[str, ...] = ()
        # The failure of a response that has not begun; readers send it as an error response.
        self.error: GatewayError | None = None
        self._cache = cache
        self._grace_s = grace_s
        self._cached = True
        self._over = False
        self._messages: list[tuple[M, int]] = []
        # Number of messages removed from the front of `_messages`.
        self._removed = 0
        self._readers: list[ResponseReader[M]] = []
        self._more = asyncio.Event()
        self._trimmed = asyncio.Event()
        self._abandoned = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def put(self, message: M, size_bytes: int, last: bool = False) -> None:
        """Add a message and wait until the next may be added. `last`: no message follows."""
        if self._cached and not self._cache.has_room(size_bytes):
            self.evict()
        self._cache.count(size_bytes)
        self._messages.append((message, size_bytes))
        self._over = last
        _wake(self._more)
        self._trim()
        # Back-pressure: without a cache, wait for the slowest reader.
        while self._messages and not self._cached:
            await self._trimmed.wait()

    def end(self, whole: bool, error: GatewayError | None = None) -> None:
        """End the response. Only a complete (`whole`) response stays cached.

        `error`: the failure of a response that has not begun.
        """
        self._over, self.error = True, error
        if whole and self._cached:
            self._cache.complete(self)
        else:
            self.evict()
        self._update_grace()
        _wake(self._more)

    def evict(self) -> None:
        """Remove the response from the cache; keep only messages that a reader has not read."""
        self._cached = False
        self._cache.remove(self)
        self._trim()
        self._update_grace()

    async def abandoned(self) -> None:
        """Wait until an evicted, incomplete response has no reader; then raise ClientGone."""
        await self._abandoned.wait()
        raise ClientGone

    @contextlib.contextmanager
    def reading(self) -> Iterator["ResponseReader[M]"]:
        """Add a reader that starts at the first message, for the duration of the block."""
        assert not self._removed, "an evicted response accepts no reader"
        reader = ResponseReader(self)
        self._readers.append(reader)
        self._update_grace()
        try:
            yield reader
        finally:
            self._readers.remove(reader)
            self._trim()
            self._update_grace()

    async def message(self, index: int) -> M | None:
        """Wait for message `index`; None after the last. Frees messages read by all readers."""
        self._trim()
        while index == self._removed + len(self._messages):
            if self._over:
                return None
            await self._more.wait()
        return self._messages[index - self._removed][0]

    def _trim(self) -> None:
        """Remove the messages that all readers have read, unless the response is cached."""
        if self._cached:
            return
        end = self._removed + len(self._messages)
        read = min((reader.index for reader in self._readers), default=end) - self._removed
        self._cache.count(-sum(size_bytes for _, size_bytes in self._messages[:read]))
        del self._messages[:read]
        self._removed += read
        _wake(self._trimmed)

    def _update_grace(self) -> None:
        """Start the grace timer if the response has no reader, else stop it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._readers or self._over:
            self._abandoned.clear()
            return
        if self._cached:
            self._timer = asyncio.get_running_loop().call_later(self._grace_s, self.evict)
        else:
            self._abandoned.set()


class ResponseReader(Generic[M]):
    """A reader of a response; `index` is its next message."""

    def __init__(self, response: SharedResponse[M]) -> None:
        self.index = 0
        self._response = response

    async def next(self) -> M | None:
        """Wait for the next message; None at the end. Frees the message before it."""
        message = await self._response.message(self.index)
        self.index += 1
        return message


def _wake(event: asyncio.Event) -> None:
    """Wake all current waiters."""
    event.set()
    event.clear()
