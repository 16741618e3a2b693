"""Copies between device memory and pinned host memory, beside the iterations of the engine.

The *work stream* is torch's default stream: iterations and everything else that the engine's thread
launches. The *copy stream* carries the pieces of KV and parameters that the threads of the mover
and of the host copier copy. No thread waits for another's kernels; events order the two streams on
the device:

- A copy starts after all work that was launched before the present iteration. The iteration itself
  uses no block or slab that a copy uses: both look them up under the stage's lock, and tables
  change between iterations only.
- The next iteration starts after all copies that were started before it. So memory that a copy
  uses may change its owner at once, as long as the new owner is used by work or by other copies.
- Unmapping is not ordered with streams: `fence` is passed once nothing uses the memory.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

SLOTS = 8
SLOT_BYTES = 4 << 20
"""Size of a slot; the largest piece of KV and of parameters has this size, unless a block is larger
(`MoverConfig.chunk_bytes`)."""
AHEAD_MAX = SLOTS - 2
"""Maximum slots for pieces that are read ahead; the others serve the piece that each thread copies
now."""


class StreamEvent(Protocol):
    """A point in a stream; the interface of `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the stream has passed the point."""

    def synchronize(self) -> None:
        """Block until the stream has passed the point."""


class DeviceStreams(Protocol):
    """The work stream and the copy stream of a device; the interface of `CudaStreams`."""

    def bind(self) -> None:
        """Make the device current in the calling thread."""

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Return host memory that the device can access, uint8 [size_bytes]."""

    def record_work(self) -> StreamEvent:
        """Return an event after all work launched so far."""

    def record_copies(self) -> StreamEvent:
        """Return an event after all copies started so far."""

    def work_waits(self, event: StreamEvent) -> None:
        """Start work launched from now on after `event`."""

    def copies_wait(self, event: StreamEvent) -> None:
        """Start copies from now on after `event`."""

    def gather(self, rows: torch.Tensor, index: torch.Tensor, target: torch.Tensor) -> None:
        """Start to copy `rows[index]` to `target`; `index` and `target` are pinned."""

    def scatter(self, rows: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> None:
        """Start to copy `source` to `rows[index]`; `index` and `source` are pinned."""

    def read(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Start to copy device memory to pinned memory of the same size."""

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start to copy pinned memory to device memory of the same size."""


class Fence:
    """A point in both streams."""

    def __init__(self, *events: StreamEvent | None) -> None:
        self._events = [event for event in events if event is not None]

    def passed(self) -> bool:
        """Whether both streams have passed the point."""
        self._events = [event for event in self._events if not event.query()]
        return not self._events

    def wait(self) -> None:
        """Block until both streams have passed the point."""
        for event in self._events:
            event.synchronize()
        self._events = []


class PinnedSlot:
    """Pinned memory for a piece. A copy that uses it is started under the stage's lock."""

    def __init__(self, copies: "DeviceCopies", buffer: torch.Tensor, index: torch.Tensor) -> None:
        self._copies = copies
        self._buffer = buffer
        self._index = index
        self._ended: StreamEvent | None = None  # of the last copy
        self.piece = buffer

    def begin(self, size_bytes: int) -> None:
        """Set the size of the next piece."""
        self.piece = self._buffer[:size_bytes]

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The piece, as an array over the same memory."""
        array: npt.NDArray[np.uint8] = self.piece.numpy()
        return array

    @property
    def busy(self) -> bool:
        """Whether the device may still use the memory."""
        return self._ended is not None and not self._ended.query()

    def wait(self) -> None:
        """Block until the last copy has ended."""
        if self._ended is not None:
            self._ended.synchronize()

    def gather(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """Start to copy `rows[ids]` to the piece."""
        index = self._index_of(ids)
        with self._copies.started(self) as streams:
            streams.gather(rows, index, self.piece)

    def scatter(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """Start to copy the piece to `rows[ids]`."""
        index = self._index_of(ids)
        with self._copies.started(self) as streams:
            streams.scatter(rows, index, self.piece)

    def read(self, source: torch.Tensor) -> None:
        """Start to copy `source`, uint8 of the piece's size, to the piece."""
        with self._copies.started(self) as streams:
            streams.read(source, self.piece)

    def write(self, target: torch.Tensor) -> None:
        """Start to copy the piece to `target`, uint8 of the piece's size."""
        with self._copies.started(self) as streams:
            streams.write(target, self.piece)

    def set_ended(self, event: StreamEvent) -> None:
        """Note the event after the last copy."""
        self._ended = event

    def _index_of(self, ids: torch.Tensor) -> torch.Tensor:
        index = self._index[: len(ids)]
        index.copy_(ids)
        return index


class DeviceCopies:
    """Orders copies and work, and owns the slots. `block_bytes`: a KV block's size in one layer."""

    def __init__(self, streams: DeviceStreams, *, block_bytes: int) -> None:
        self._streams = streams
        self.slot_bytes = slot_bytes = max(SLOT_BYTES, block_bytes)
        index_bytes = slot_bytes // block_bytes * torch.int64.itemsize
        # Guards `_free`: slots that no piece occupies, the one with the oldest
        # copy first.
        self._lock = Lock()
        self._free = deque(
            PinnedSlot(
                self,
                streams.pinned(slot_bytes),
                streams.pinned(index_bytes).view(torch.int64),
            )
            for _ in range(SLOTS)
        )
        # Set by the engine's thread: copies wait for it.
        self._work = streams.record_work()
        # Set under the stage's lock: work waits for it.
        self._last_copy: StreamEvent | None = None
        self._bound: set[int] = set()  # threads that have the device as their current device

    # --- the engine's thread

    def begin_work(self) -> None:
        """Order the work that is launched from now on after all copies so far.

        Copies that start before `end_work` do not wait for it.
        """
        last = self._last_copy
        if last is not None and not last.query():
            self._streams.work_waits(last)
        self._work = self._streams.record_work()

    def end_work(self) -> None:
        """Order later copies after all work so far."""
        self._work = self._streams.record_work()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Order the work that is launched in the block with copies before and after it."""
        self.begin_work()
        try:
            yield
        finally:
            self.end_work()

    def fence(self) -> Fence:
        """Return a point after all work and copies so far; call it under the stage's lock."""
        return Fence(self._streams.record_work(), self._last_copy)

    def write(self, target: torch.Tensor, source: torch.Tensor) -> StreamEvent:
        """Start to copy pinned memory to device memory; returns the event after the copy.

        Call it under the stage's lock.
        """
        self._streams.copies_wait(self._work)
        self._streams.write(target, source)
        self._last_copy = self._streams.record_copies()
        return self._last_copy

    # --- the threads that copy

    def take(self, size_bytes: int) -> PinnedSlot:
        """Return a slot for a piece of at most `slot_bytes`; may block until a copy has ended.

        Call it without the stage's lock.
        """
        self._bind()
        with self._lock:
            slot = self._free.popleft()
        slot.wait()
        slot.begin(size_bytes)
        return slot

    def take_ahead(self, size_bytes: int) -> PinnedSlot | None:
        """As `take`, for a piece that is not due yet; returns None instead of blocking."""
        self._bind()
        with self._lock:
            if len(self._free) <= SLOTS - AHEAD_MAX or self._free[0].busy:
                return None
            slot = self._free.popleft()
        slot.begin(size_bytes)
        return slot

    def give_back(self, slot: PinnedSlot) -> None:
        """Return a slot, possibly before its copy has ended."""
        with self._lock:
            self._free.append(slot)

    @contextmanager
    def started(self, slot: PinnedSlot) -> Iterator[DeviceStreams]:
        """Start a copy of `slot` in the block, after the work before the present iteration."""
        self._streams.copies_wait(self._work)
        yield self._streams
        self._last_copy = self._streams.record_copies()
        slot.set_ended(self._last_copy)

    def _bind(self) -> None:
        # A new thread's current device is GPU 0, also where the engine uses another one.
        thread = threading.get_ident()
        if thread not in self._bound:
            self._streams.bind()
            self._bound.add(thread)
