"""A bounded queue of protobuf frames, from which the writer of a gRPC stream takes them."""

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
"""Maximum number of queued frames. The owner of a full outbox treats its peer as hung."""
BYTES_MAX = 16 * 2**20
"""Bytes in the outbox from which callers of `room` wait."""
ROOM_TIMEOUT_S = 10.0


class Outbox(Generic[T]):
    """Frames for a peer. The bytes of taken frames count until `release`."""

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
        """Wait until a large frame may be put; the block is entered by a caller at a time.

        So large frames exceed the bound of bytes by at most a frame. Small, urgent frames (aborts)
        are put without `room`.

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
        """Let all callers of `room` enter, because the stream has ended."""
        self._bytes_max = sys.maxsize
        self._room.set()

    async def take(self, many: Callable[[], bool]) -> tuple[list[T], int]:
        """Wait for frames; remove and return the oldest, or all if `many()`, and their bytes."""
        while not self._frames:
            self._nonempty.clear()
            await self._nonempty.wait()
        taken = [self._frames.popleft() for _ in range(len(self._frames) if many() else 1)]
        return [frame for frame, _ in taken], sum(frame_bytes for _, frame_bytes in taken)

    def release(self, size_bytes: int) -> None:
        """Release the bytes of taken frames, which have been written."""
        self._count(-size_bytes)

    def _count(self, size_bytes: int) -> None:
        self._size_bytes += size_bytes
        if self._size_bytes < self._bytes_max:
            self._room.set()
        else:
            self._room.clear()
