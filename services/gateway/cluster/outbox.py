"""Frames that wait to be written to a peer."""

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
"""Most frames that wait; a peer that lets more pile up counts as frozen."""
BYTES_MAX = 16 * 2**20
"""Bytes of waiting frames from which on callers of `room` wait."""
ROOM_TIMEOUT_S = 10.0


class Outbox(Generic[T]):
    """Frames for one peer, their bytes counted until they are written."""

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
        """Whether the outbox holds as many frames as it may."""
        return len(self._frames) >= FRAMES_MAX

    def put(self, frame: T) -> None:
        """Add a frame; the outbox must not be full."""
        frame_bytes = frame.ByteSize()
        self._frames.append((frame, frame_bytes))
        self._count(frame_bytes)
        self._nonempty.set()

    @contextlib.asynccontextmanager
    async def room(self) -> AsyncIterator[None]:
        """Begins when there is room for another frame of any size; one caller enters at a time.

        So the outbox exceeds its bound by one frame at most. Urgent frames are put without it.

        Raises:
            QueueFull: if there is no room for a time.
        """
        if self._room_lock.locked() or not self._room.is_set():
            await self._wait_for_room()
        else:
            await self._room_lock.acquire()
        try:
            yield
        finally:
            self._room_lock.release()

    async def _wait_for_room(self) -> None:
        """Take the turn when there is room; raises QueueFull if that lasts too long."""
        try:
            async with timeout(self._room_timeout_s), contextlib.AsyncExitStack() as stack:
                await stack.enter_async_context(self._room_lock)
                await self._room.wait()
                # `room` gives the turn back.
                stack.pop_all()
        except TimeoutError:
            raise QueueFull("the worker takes requests too slowly; try again later") from None

    def close(self) -> None:
        """Nothing is written any more: callers of `room` go on."""
        self._bytes_max = sys.maxsize
        self._room.set()

    async def take(self, many: Callable[[], bool]) -> tuple[list[T], int]:
        """The oldest frame, or all if there may be `many`, and their bytes; waits for one."""
        while not self._frames:
            self._nonempty.clear()
            await self._nonempty.wait()
        taken = [self._frames.popleft() for _ in range(len(self._frames) if many() else 1)]
        return [frame for frame, _ in taken], sum(frame_bytes for _, frame_bytes in taken)

    def written(self, size_bytes: int) -> None:
        """Frames of `size_bytes` that were taken have been written."""
        self._count(-size_bytes)

    def _count(self, size_bytes: int) -> None:
        self._size_bytes += size_bytes
        if self._size_bytes < self._bytes_max:
            self._room.set()
        else:
            self._room.clear()
