"""One answer that several readers take, each from its beginning, while it is made or afterwards."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from services.gateway.bounds.client import ClientGone
from services.gateway.vocabulary.errors import GatewayError

M = TypeVar("M")


class ResponseCache(Protocol[M]):
    """Bounds the bytes of all answers, and knows the kept ones."""

    def has_room(self, size_bytes: int) -> bool:
        """Whether answers may hold so many bytes more; others may be forgotten for it."""

    def count(self, size_bytes: int) -> None:
        """Answers hold so many bytes more, or less."""

    def ended(self, answer: "SharedResponse[M]") -> None:
        """The answer is whole."""

    def forget(self, answer: "SharedResponse[M]") -> None:
        """Nobody else can find the answer from now on."""


class SharedResponse(Generic[M]):
    """The messages of one answer, in order.

    Theory of operation. While it is *kept*, every message stays, and readers may join. Once it is
    let go, nobody joins: it holds what its slowest reader has yet to take, and whoever makes it
    waits for its readers. It is let go when there is no room, when it fails, and when it has had no
    reader for the time of grace; then whoever makes it is told to stop.
    """

    def __init__(
        self, keeper: ResponseCache[M], digest: bytes, response_id: str, grace_s: float
    ) -> None:
        """`digest` is that of the request, `response_id` names the answer.

        `grace_s`: seconds without a reader after which nobody shall make it any more.
        """
        self.digest = digest
        self.response_id = response_id
        # For every reader beside the messages; ASCII sentences.
        self.warnings: tuple[str, ...] = ()
        # Why nothing has come, for readers whose client has been told nothing.
        self.error: GatewayError | None = None
        self._keeper = keeper
        self._grace_s = grace_s
        self._kept = True
        self._over = False
        self._messages: list[tuple[M, int]] = []
        # Messages before those that are held.
        self._passed = 0
        self._readers: list[ResponseReader[M]] = []
        self._more = asyncio.Event()
        self._taken = asyncio.Event()
        self._abandoned = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def put(self, message: M, size_bytes: int, last: bool = False) -> None:
        """Add a message; returns when there is room for the next one. None follows the `last`."""
        if self._kept and not self._keeper.has_room(size_bytes):
            self.evict()
        self._keeper.count(size_bytes)
        self._messages.append((message, size_bytes))
        self._over = last
        _wake(self._more)
        self._trim()
        while self._messages and not self._kept:
            await self._taken.wait()

    def end(self, whole: bool, error: GatewayError | None = None) -> None:
        """Nobody makes it any more. Only a `whole` answer stays kept.

        `error`: why, for readers of an answer that has not begun.
        """
        self._over, self.error = True, error
        if whole and self._kept:
            self._keeper.ended(self)
        else:
            self.evict()
        self._look()
        _wake(self._more)

    def evict(self) -> None:
        """Let nobody join any more, and hold no more than what readers have yet to take."""
        self._kept = False
        self._keeper.forget(self)
        self._trim()
        self._look()

    async def abandoned(self) -> None:
        """Raise ClientGone when nobody reads it and nobody is expected to."""
        await self._abandoned.wait()
        raise ClientGone

    @contextlib.contextmanager
    def reading(self) -> Iterator["ResponseReader[M]"]:
        """A reader of it, from the beginning."""
        assert not self._passed, "it could not be found any more"
        reader = ResponseReader(self)
        self._readers.append(reader)
        self._look()
        try:
            yield reader
        finally:
            self._readers.remove(reader)
            self._trim()
            self._look()

    async def message(self, index: int) -> M | None:
        """Message `index`, when it is there; None if there are fewer. All before it are taken."""
        self._trim()
        while index == self._passed + len(self._messages):
            if self._over:
                return None
            await self._more.wait()
        return self._messages[index - self._passed][0]

    def _trim(self) -> None:
        """Drop what all readers have taken, unless it is kept."""
        if self._kept:
            return
        end = self._passed + len(self._messages)
        taken = min((reader.index for reader in self._readers), default=end) - self._passed
        self._keeper.count(-sum(size_bytes for _, size_bytes in self._messages[:taken]))
        del self._messages[:taken]
        self._passed += taken
        _wake(self._taken)

    def _look(self) -> None:
        """Begin or end the time of grace."""
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
    """One reader of an answer, at message `index`."""

    def __init__(self, answer: SharedResponse[M]) -> None:
        self.index = 0
        self._answer = answer

    async def next(self) -> M | None:
        """The next message, None at the end; the one before has been taken then."""
        message = await self._answer.message(self.index)
        self.index += 1
        return message


def _wake(event: asyncio.Event) -> None:
    """Let all go on that wait now."""
    event.set()
    event.clear()
