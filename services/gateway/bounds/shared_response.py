"""A response that several readers share: each reads it from the beginning, live or replayed."""

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

    def ended(self, answer: "SharedResponse[M]") -> None:
        """Note that the response is complete."""

    def forget(self, answer: "SharedResponse[M]") -> None:
        """Remove the response from the cache."""


class SharedResponse(Generic[M]):
    """The messages of a response, in order.

    Theory of operation. While the response is *cached*, every message stays and readers may join.
    After eviction no reader joins: the response holds the messages that its slowest reader has not
    taken, and the producer waits for the readers (back-pressure). A response is evicted when the
    cache has no room, when it fails, and when it had no reader for the grace period; in the last
    case the producer is cancelled as well.
    """

    def __init__(
        self, keeper: ResponseCache[M], digest: bytes, response_id: str, grace_s: float
    ) -> None:
        """`digest`: of the request body. `grace_s`: seconds without a reader before eviction."""
        self.digest = digest
        self.response_id = response_id
        # ASCII sentences that every reader sends as headers.
        self.warnings: tuple[str, ...] = ()
        # The failure of a response that has not begun; its readers answer with it.
        self.error: GatewayError | None = None
        self._keeper = keeper
        self._grace_s = grace_s
        self._kept = True
        self._over = False
        self._messages: list[tuple[M, int]] = []
        # Number of messages dropped from the front of `_messages`.
        self._passed = 0
        self._readers: list[ResponseReader[M]] = []
        self._more = asyncio.Event()
        self._taken = asyncio.Event()
        self._abandoned = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def put(self, message: M, size_bytes: int, last: bool = False) -> None:
        """Add a message; return when the next may follow. `last`: none follows."""
        if self._kept and not self._keeper.has_room(size_bytes):
            self.evict()
        self._keeper.count(size_bytes)
        self._messages.append((message, size_bytes))
        self._over = last
        _wake(self._more)
        self._trim()
        # An uncached response applies back-pressure: the slowest reader sets the pace.
        while self._messages and not self._kept:
            await self._taken.wait()

    def end(self, whole: bool, error: GatewayError | None = None) -> None:
        """End the production. Only a `whole` (complete) response stays cached.

        `error`: the cause, for readers of a response that has not begun.
        """
        self._over, self.error = True, error
        if whole and self._kept:
            self._keeper.ended(self)
        else:
            self.evict()
        self._update_grace()
        _wake(self._more)

    def evict(self) -> None:
        """Accept no further readers, and keep only the messages that readers have yet to take."""
        self._kept = False
        self._keeper.forget(self)
        self._trim()
        self._update_grace()

    async def abandoned(self) -> None:
        """Raise ClientGone once the response has no reader and can get none."""
        await self._abandoned.wait()
        raise ClientGone

    @contextlib.contextmanager
    def reading(self) -> Iterator["ResponseReader[M]"]:
        """A reader that starts at the first message."""
        assert not self._passed, "an evicted response accepts no reader"
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
        """Wait for message `index`; None if the response has fewer. Frees the ones before it."""
        self._trim()
        while index == self._passed + len(self._messages):
            if self._over:
                return None
            await self._more.wait()
        return self._messages[index - self._passed][0]

    def _trim(self) -> None:
        """Drop the messages that all readers have taken, unless the response is cached."""
        if self._kept:
            return
        end = self._passed + len(self._messages)
        taken = min((reader.index for reader in self._readers), default=end) - self._passed
        self._keeper.count(-sum(size_bytes for _, size_bytes in self._messages[:taken]))
        del self._messages[:taken]
        self._passed += taken
        _wake(self._taken)

    def _update_grace(self) -> None:
        """Start or stop the grace timer, by the number of readers."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._readers or self._over:
            self._abandoned.clear()
            return
        if self._kept:
            self._timer = asyncio.get_running_loop().call_later(self._grace_s, self.evict)
        else:
            self._abandoned.set()


class ResponseReader(Generic[M]):
    """A reader of a response; `index` is its next message."""

    def __init__(self, answer: SharedResponse[M]) -> None:
        self.index = 0
        self._answer = answer

    async def next(self) -> M | None:
        """Wait for the next message; None at the end. Confirms the message before it."""
        message = await self._answer.message(self.index)
        self.index += 1
        return message


def _wake(event: asyncio.Event) -> None:
    """Wake all current waiters."""
    event.set()
    event.clear()
