"""Bounded queue of frames to write to a peer."""

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

from google.protobuf.message import Message

from services.common.timeouts import timeout
from services.gateway.vocabulary.errors import QueueFull

T = TypeVar("T", bound=Message)

FRAMES_MAX = 16_384
"""Most queued frames; a peer that reads too slowly for that counts as hung."""
BYTES_MAX = 16 * 2**20
"""Queued bytes at which callers of `room` block."""
ROOM_TIMEOUT_S = 10.0


class Outbox(Generic[T]):
    """Frames for a peer; their bytes count until they are written."""

    def __init__(self, bytes_max: int = BYTES_MAX, room_timeout_s: float = ROOM_TIMEOUT_S) -> None:
        self._bytes_max = bytes_max
        self._room_timeout_s = room_timeout_s
        self._frames: deque[tuple[T, int]] = deque()
        self._nonempty = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._room_lock = asyncio.Lock()
        self._size_bytes = 0

    @property
    def full(self) -> bool:
        """Whether the outbox has reached `FRAMES_MAX` frames."""
        return len(self._frames) >= FRAMES_MAX

    def put(self, frame: T) -> None:
        """Add a frame; the outbox must not be full."""
        frame_bytes = frame.ByteSize()
        self._frames.append((frame, frame_bytes))
        self._count(frame_bytes)
        self._nonempty.set()

    @contextlib.asynccontextmanager
    async def room(self) -> AsyncIterator[None]:
        """Wait until there is room for a frame of any size; only a single caller enters at a time.

        So the outbox exceeds its bound by at most a frame. Urgent frames are put without waiting.

        Raises:
            QueueFull: if there is no room within the timeout.
        """
        if self._room_lock.locked() or not self._room.is_set():
            await self._wait_for_room()
        else:
            # The lock is free, so this does not block and needs no timeout.
            await self._room_lock.acquire()
        try:
            yield
        finally:
            self._room_lock.release()

    async def _wait_for_room(self) -> None:
        """Acquire the lock of `room` once there is room; raises QueueFull on timeout."""
        try:
            async with timeout(self._room_timeout_s), contextlib.AsyncExitStack() as stack:
                await stack.enter_async_context(self._room_lock)
                await self._room.wait()
                # Keep the lock on success: `room` releases it.
                stack.pop_all()
        except TimeoutError:
            raise QueueFull("the worker accepts requests too slowly; retry later") from None

    def close(self) -> None:
        """Release all callers of `room`, because nothing is written any more."""
        self._bytes_max = sys.maxsize
        self._room.set()

    async def take(self, many: Callable[[], bool]) -> tuple[list[T], int]:
        """Wait for frames; remove the oldest, or all if `many`; returns them and their bytes."""
        while not self._frames:
            self._nonempty.clear()
            await self._nonempty.wait()
        taken = [self._frames.popleft() for _ in range(len(self._frames) if many() else 1)]
        return [frame for frame, _ in taken], sum(frame_bytes for _, frame_bytes in taken)

    def written(self, size_bytes: int) -> None:
        """Note that taken frames of `size_bytes` have been written."""
        self._count(-size_bytes)

    def _count(self, size_bytes: int) -> None:
        self._size_bytes += size_bytes
        if self._size_bytes < self._bytes_max:
            self._room.set()
        else:
            self._room.clear()
