"""Copies pieces of KV and parameters between the stage's memory and host memory.

The mover's thread copies from and to frames, that of the host copier from and to host copies. The
stage's lock is held while a piece's place is looked up. On a CPU the copy is made under the lock,
too. On a GPU it is only started there: the thread waits for the device without the lock, which the
engine needs in every turn.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.worker.engine.memory.device_copies import DeviceCopies, PinnedSlot
from services.worker.engine.pipeline.stage_runner import StageRunner
from services.worker.engine.transfer.errors import TransferRefused
from services.worker.engine.transfer.frame import Bytes
from services.worker.errors import WorkerError

Copy = Callable[[torch.Tensor | PinnedSlot], None]
"""Copies a piece to or from host memory; called with the lock held. Raises WorkerError."""


@dataclass(slots=True)
class PieceAhead:
    """A piece whose copy to the host was started before it is due."""

    copies: DeviceCopies
    slot: PinnedSlot

    def finish(self, target: Bytes) -> None:
        """Write the piece to `target`; blocks until the device has copied it."""
        self.slot.wait()
        target[:] = self.slot.bytes
        self.copies.give_back(self.slot)

    def discard(self) -> None:
        """Forget the piece."""
        self.copies.give_back(self.slot)


@dataclass(slots=True)
class PieceCopies:
    """The copies of an engine's mover, or of its host copier."""

    stage: StageRunner

    def pack(self, target: Bytes, read: Copy) -> None:
        """Copy a piece to `target`. Raises WorkerError as `read`."""
        copies = self._copies
        if copies is None:
            with self.stage.lock:
                read(torch.from_numpy(target))
        else:
            self._started(copies, copies.take(target.size), read).finish(target)

    def read_ahead(self, size_bytes: int, read: Copy) -> PieceAhead | None:
        """Start to copy a piece that is not due yet; None if it must be packed when it is due.

        Raises WorkerError as `read`.
        """
        copies = self._copies
        slot = None if copies is None else copies.take_ahead(size_bytes)
        if copies is None or slot is None:
            return None
        return self._started(copies, slot, read)

    def unpack(self, payload: Bytes, write: Copy) -> None:
        """Copy `payload` to the device; the engine's next iteration starts after the copy.

        Raises WorkerError as `write`.
        """
        copies = self._copies
        if copies is None:
            with self.stage.lock:
                write(torch.from_numpy(payload))
            return
        if payload.size > copies.slot_bytes:
            raise TransferRefused(
                f"a piece of {payload.size} bytes is larger than {copies.slot_bytes}; run the same"
                " version of tideserve on all workers"
            )
        slot = copies.take(payload.size)
        try:
            slot.bytes[:] = payload
            with self.stage.lock:
                write(slot)
        finally:
            copies.give_back(slot)

    def _started(self, copies: DeviceCopies, slot: PinnedSlot, read: Copy) -> PieceAhead:
        try:
            with self.stage.lock:
                read(slot)
        except WorkerError:
            copies.give_back(slot)
            raise
        return PieceAhead(copies, slot)

    @property
    def reads_ahead(self) -> bool:
        """Whether `read_ahead` can start copies."""
        return self._copies is not None

    @property
    def _copies(self) -> DeviceCopies | None:
        return self.stage.runner.stage_memory.copies
