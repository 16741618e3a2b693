"""Copies KV blocks between the device and the host store, on a thread of its own.

A job (`core.host.vocabulary`) is copied in pieces: a layer of some blocks. Before each piece its
blocks are looked up under the stage's lock, under which the planner changes them; so a piece never
touches a block of another prefix. A block that is gone is not intact and is left out from then on.
Every job ends with its result, in the order of the commands.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Protocol

import numpy as np
import torch

from services.common import failpoint
from services.common.clock import monotonic_s
from services.common.log_limiter import LOG_INTERVAL_S, LogLimiter
from services.core.host.vocabulary import RecallBlocks, SaveBlocks
from services.worker.engine.host.store import Bytes, HostMemoryError, HostStore
from services.worker.engine.memory.device_copies import PinnedSlot
from services.worker.engine.memory.stage_memory import StageMemory
from services.worker.engine.transfer.doorbell import Doorbell
from services.worker.errors import WorkerError

PIECE_BYTES = 1 << 20
TASKS_MAX = 64
"""Jobs and steps that wait; the planner has a few under way at a time."""
REST_S = 1.0
"""Maximum time between two looks at the queue."""
CLOSE_TIMEOUT_S = 10.0
SAVE_FAILPOINT, RECALL_FAILPOINT = "engine.host.save.leader", "engine.host.recall.leader"

Copy = Callable[[torch.Tensor | PinnedSlot], None]
"""Copies a piece to or from host memory."""
BlockOf = Callable[[int, int], int | None]
"""The device block of place i of a job, None if it is gone; called with the stage's lock held."""

log = logging.getLogger(__name__)


class LockedCopies(Protocol):
    """Copies of pieces under the stage's lock; the interface of `PieceCopies`."""

    def pack(self, target: Bytes, read: Copy) -> None:
        """Copy a piece to `target` with `read`, whose errors pass."""

    def unpack(self, payload: Bytes, write: Copy) -> None:
        """Copy `payload` to the device with `write`, whose errors pass."""


class BlocksGone(WorkerError):
    """Blocks of a piece belong to another prefix by now."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The result of a job: `intact[i]`: block i was copied completely.

    A recall has no entries for blocks from the first piece on that was refused: their copies may be
    intact. `sums`: checksums of the blocks, if the copier keeps them.
    """

    command: SaveBlocks | RecallBlocks
    intact: tuple[bool, ...]
    sums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The store has `slots` slots; `problem`: why it cannot grow further, "" if it can."""

    slots: int
    problem: str = ""


@dataclass(slots=True)
class _Job:
    command: SaveBlocks | RecallBlocks
    due_s: float  # it ends no earlier, unless it is cancelled
    cancelled: bool = False
    refused: int | None = None  # first block of the first piece that was refused
    intact: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self.intact = [True] * len(self.command.blocks)


class HostCopier:
    """Runs jobs and steps of the store in order; `memory` holds the device's blocks.

    It runs on its own thread (`start`), or its owner calls `step`, which is the same code.
    """

    def __init__(
        self, copies: LockedCopies, memory: StageMemory, store: HostStore, block_of: BlockOf
    ) -> None:
        self._copies = copies
        self._memory = memory
        self._store = store
        self._block_of = block_of
        self._wake = Condition()  # guards the attributes below
        self._tasks: deque[_Job | None] = deque()  # None: a step of the store
        self._jobs: dict[int, _Job] = {}  # that have not ended, by number
        self._ends: deque[JobEnd | StepEnd] = deque()
        self._stopping = False
        self.keeps_sums = False  # for audits
        self._bell = Doorbell()  # wakes the engine's thread
        # For the thread only: a buffer for a piece.
        self._piece_blocks = max(1, PIECE_BYTES // store.layer_bytes)
        self._buffer = np.empty((self._piece_blocks, store.layer_bytes), np.uint8)
        self._limiter = LogLimiter()
        self._thread: Thread | None = None

    # --- the engine's thread

    def start(self) -> None:
        """Start a thread that calls `step` until `close`."""
        self._thread = Thread(target=self._run, name="host-copier", daemon=True)
        self._thread.start()

    def submit(self, command: SaveBlocks | RecallBlocks, due_s: float) -> bool:
        """Queue a job that ends no earlier than `due_s`; False if too many wait."""
        with self._wake:
            if len(self._tasks) >= TASKS_MAX:
                return False
            job = self._jobs[command.job] = _Job(command, due_s)
            self._tasks.append(job)
            self._wake.notify()
        return True

    def grow(self) -> None:
        """Let the store grow by a step."""
        with self._wake:
            self._tasks.append(None)
            self._wake.notify()

    def cancel(self, job: int) -> None:
        """End a job at its next piece, without its other blocks; unknown ones are ignored."""
        with self._wake:
            if job in self._jobs:
                self._jobs[job].cancelled = True
                self._wake.notify()

    @property
    def is_busy(self) -> bool:
        """Whether a job has not ended."""
        return bool(self._jobs)

    @property
    def is_alive(self) -> bool:
        """Whether the thread has not failed."""
        return self._thread is None or self._thread.is_alive()

    def ends(self) -> list[JobEnd | StepEnd]:
        """The results since the last call, in order; clears `fileno`."""
        self._bell.clear()
        with self._wake:
            ends = list(self._ends)
            self._ends.clear()
        return ends

    def fileno(self) -> int:
        """A descriptor that is readable while there are results, or when the thread has ended."""
        return self._bell.fileno()

    def close(self) -> None:
        """Stop; jobs that have not ended have no result."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread is None or not self._thread.is_alive():
            self._bell.close()

    # --- the copier's thread

    def _run(self) -> None:
        try:
            while self.step(REST_S):
                pass
        except Exception:  # the engine goes on without host copies
            log.exception("the thread that copies KV to and from host memory has failed")
        finally:
            self._bell.ring()

    def step(self, wait_s: float) -> bool:
        """Run the next task, for which it waits up to `wait_s`; False if the copier stops."""
        with self._wake:
            if not (self._tasks or self._stopping):
                self._wake.wait(wait_s)
            if self._stopping:
                return False
            if not self._tasks:
                return True
            job = self._tasks.popleft()
        end = self._grown() if job is None else self._ran(job)
        with self._wake:
            if job is not None:
                del self._jobs[job.command.job]
            self._ends.append(end)
        self._bell.ring()
        return True

    def _grown(self) -> StepEnd:
        try:
            return StepEnd(self._store.grow())
        except HostMemoryError as error:
            return StepEnd(self._store.slots, str(error))

    def _ran(self, job: _Job) -> JobEnd:
        if isinstance(job.command, SaveBlocks):
            self._save(job, job.command)
        else:
            self._recall(job, job.command)
        with self._wake:
            while (rest_s := job.due_s - monotonic_s()) > 0 and not self._may_end(job):
                self._wake.wait(min(rest_s, REST_S))
        recalls = isinstance(job.command, RecallBlocks)
        intact = job.intact[: job.refused] if recalls else job.intact
        return JobEnd(job.command, tuple(intact), self._sums(job))

    def _sums(self, job: _Job) -> tuple[int, ...]:
        """The checksums of a save's blocks at their ends, or of a recall's blocks as they are."""
        if not self.keeps_sums:
            return ()
        store = self._store
        sum_of = store.sealed_sum if isinstance(job.command, SaveBlocks) else store.current_sum
        return tuple([sum_of(block.slot) for block in job.command.blocks])

    def _may_end(self, job: _Job) -> bool:
        return job.cancelled or self._stopping

    def _save(self, job: _Job, command: SaveBlocks) -> None:
        store = self._store
        slots = [block.slot for block in command.blocks]

        def save(layer: int, places: Sequence[int], rows: Bytes) -> None:
            failpoint.hit(SAVE_FAILPOINT)
            self._copies.pack(rows.reshape(-1), self._reader(job, layer, places))
            store.write(layer, [slots[place] for place in places], rows)

        self._copy(job, save)
        for place, slot in enumerate(slots):
            if job.intact[place]:
                store.seal(slot)

    def _recall(self, job: _Job, command: RecallBlocks) -> None:
        store = self._store
        slots = [block.slot for block in command.blocks]
        for place, slot in enumerate(slots):
            if not store.is_intact(slot):
                job.intact[place] = False
                log.warning("the host copy in slot %d is damaged: its KV is computed again", slot)

        def recall(layer: int, places: Sequence[int], rows: Bytes) -> None:
            failpoint.hit(RECALL_FAILPOINT)
            store.read(layer, [slots[place] for place in places], rows)
            self._copies.unpack(rows.reshape(-1), self._writer(job, layer, places))

        self._copy(job, recall)

    def _copy(self, job: _Job, copy: Callable[[int, Sequence[int], Bytes], None]) -> None:
        """Call `copy` for each piece: its layer, the places of its blocks and a buffer."""
        count = len(job.intact)
        for first in range(0, count, self._piece_blocks):
            span = range(first, min(first + self._piece_blocks, count))
            for layer in range(self._store.slot_bytes // self._store.layer_bytes):
                self._copy_piece(job, layer, span, copy)

    def _copy_piece(
        self,
        job: _Job,
        layer: int,
        span: Sequence[int],
        copy: Callable[[int, Sequence[int], Bytes], None],
    ) -> None:
        while not self._may_end(job):
            places = [place for place in span if job.intact[place]]
            if not places:
                return
            try:
                copy(layer, places, self._buffer[: len(places)])
                return
            except BlocksGone:
                continue  # without them
            except WorkerError as error:
                # The planner saves refused blocks again and again.
                if self._limiter.due("refused") is not None:
                    log.warning(
                        "KV is not copied to or from host memory: %s; the next such line follows"
                        " after %d s at the earliest",
                        error,
                        LOG_INTERVAL_S,
                    )
                if job.refused is None:
                    job.refused = span[0]
                for place in places:
                    job.intact[place] = False
        for place in span:
            job.intact[place] = False

    def _reader(self, job: _Job, layer: int, places: Sequence[int]) -> Copy:
        def read(target: torch.Tensor | PinnedSlot) -> None:
            self._memory.pack_kv(layer, self._device_blocks(job, places), target)

        return read

    def _writer(self, job: _Job, layer: int, places: Sequence[int]) -> Copy:
        def write(source: torch.Tensor | PinnedSlot) -> None:
            self._memory.unpack_kv(layer, self._device_blocks(job, places), source)

        return write

    def _device_blocks(self, job: _Job, places: Sequence[int]) -> list[int]:
        """The blocks of these places; marks those that are gone. Raises BlocksGone."""
        number = job.command.job
        blocks = [self._block_of(number, place) for place in places]
        present = [block for block in blocks if block is not None]
        if len(present) < len(places):
            for place, block in zip(places, blocks, strict=True):
                job.intact[place] = job.intact[place] and block is not None
            raise BlocksGone("blocks of the piece are gone")
        return present
