"""Time the copies of the mover's thread during decodes of 64 on a GPU, and check their content.

    python -m benchmarks.gpu_copies FILE [--size 14B] [--layers 24] [--memory-gib 40]

The model has random weights. `--device cpu --size tiny --memory-gib 0.1` runs the same steps
without a GPU, where the thread copies under the lock.
"""

import argparse
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_engine import SIZES, load
from services.core.planner.block_pool import BlockPool
from services.core.planner.block_table import StageTable
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.memory.device_copies import SLOT_BYTES
from services.worker.engine.pipeline.piece_copies import Copy, PieceCopies
from services.worker.engine.pipeline.stage_runner import StageRunner
from services.worker.engine.profile.measurer import Measurer
from services.worker.engine.transfer.frame import Bytes

GIB = float(1 << 30)
ROWS, CONTEXT = 64, 1000


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="output file of the figures")
    parser.add_argument("--size", default="14B", choices=SIZES)
    parser.add_argument("--layers", type=int, help="layers of the model; default: of the size")
    parser.add_argument("--memory-gib", type=float, default=40, help="budget of the engine")
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each measurement")
    parser.add_argument("--device", default="cuda")
    chosen = parser.parse_args()
    size = SIZES[chosen.size]
    if chosen.layers is not None:
        size = size | {"num_hidden_layers": chosen.layers}
    runner = load(size, torch.device(chosen.device), int(chosen.memory_gib * GIB))
    figures = mover_copies(runner, chosen.seconds)
    runner.close()
    chosen.file.write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures, indent=1))


def mover_copies(runner: ModelRunner, seconds: float = 2.0) -> dict[str, Any]:
    """Measure each kind of copy for `seconds` alone and beside decodes.

    Rates are in GiB/s, times in ms. `lock_ms` is the longest wait for the stage's lock before a
    decode. Raises AssertionError if a copy changes bytes.
    """
    trial = CopyTrial(runner)
    trial.check()
    alone_ms, _ = trial.decodes(seconds)
    result: dict[str, Any] = {
        "rows": trial.rows,
        "context": trial.context,
        "piece_bytes": trial.piece_bytes,
        "decode_ms": alone_ms,
    }
    for name, act in trial.kinds.items():
        with Repeated(act) as idle:
            time.sleep(seconds)
        with Repeated(act) as beside:
            decode_ms, lock_ms = trial.decodes(seconds)
        result[name] = {
            "idle_gib_per_s": idle.bytes_per_s / GIB,
            "beside_gib_per_s": beside.bytes_per_s / GIB,
            "decode_beside_ms": decode_ms,
            "lock_ms": lock_ms,
            "failure": idle.failure or beside.failure,
        }
        trial.forget_ahead()
    return result


class CopyTrial:
    """Copies as a mover makes them, of blocks that the decodes do not use."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        memory = runner.stage_memory
        each = memory.kv_ranges[0].shape.size_bytes
        count = max(1, min(SLOT_BYTES // each, runner.num_blocks // 4))
        self.piece_bytes = count * each
        # Decodes use the first blocks, copies the last ones.
        pool = BlockPool(runner.num_blocks - 2 * count)
        self._first = list(range(pool.usable, pool.usable + count))
        self._second = [block + count for block in self._first]
        tokens = pool.usable * runner.block_size
        self.context = min(CONTEXT, tokens // 4)
        self.rows = max(1, min(ROWS, tokens // (self.context + runner.block_size + 1)))
        self._measurer = Measurer(runner, pool.borrow)
        self._stage = StageRunner(runner, StageTable(BlockPool(runner.num_blocks)))
        self._copies = PieceCopies(self._stage)
        self._slab = next(iter(memory.slabs))
        self._layer = 0
        self.kinds: dict[str, Callable[[], int]] = {
            "pack_kv": lambda: self._read(self._kv_reader(self._next_layer()), self._target),
            "unpack_kv": lambda: self._write(self._kv_writer(self._next_layer())),
            "pack_slab": lambda: self._read(self._pack_slab, self._part),
        }
        self._ahead: Any = None
        self._target: Bytes = np.empty(self.piece_bytes, np.uint8)
        slab_bytes = memory.slabs[self._slab].layout.size_bytes
        self._part: Bytes = self._target[: min(self.piece_bytes, slab_bytes)]

    def check(self) -> None:
        """Write a piece, read it back, and compare it with the memory's content."""
        memory = self._runner.stage_memory
        payload = np.random.default_rng(0).integers(0, 256, self.piece_bytes, dtype=np.uint8)
        read = np.empty_like(payload)
        for layer in (0, memory.num_layers - 1):
            self._copies.unpack(payload, self._kv_writer(layer))
            self._copies.pack(read, self._kv_reader(layer))
            assert np.array_equal(read, payload), "a piece of KV changed"
            with memory.work():
                stored = memory.pack_kv(layer, self._first)
            assert np.array_equal(stored.numpy(), payload), "KV was stored elsewhere"
        self._copies.pack(self._part, self._pack_slab)
        there = memory.pack_slab(self._slab, 0, torch.empty(self._part.size, dtype=torch.uint8))
        assert np.array_equal(self._part, there.numpy()), "a piece of a slab changed"

    def decodes(self, seconds: float) -> tuple[float, float]:
        """Run decodes; returns their median duration and the longest wait for the lock, in ms."""
        chunks = ((self.context, 1),) * self.rows
        times_s, waits_s = [], [0.0]
        for _ in range(3):
            self._measurer.duration_s(chunks)
        ends_s = time.perf_counter() + seconds
        while time.perf_counter() < ends_s:
            began_s = time.perf_counter()
            with self._stage.lock:
                waits_s.append(time.perf_counter() - began_s)
            duration_s = self._measurer.duration_s(chunks)
            assert duration_s is not None
            times_s.append(duration_s)
        return 1e3 * median(times_s), 1e3 * max(waits_s)

    def forget_ahead(self) -> None:
        """Forget the piece that was read early; the next kind has pieces of another size."""
        if self._ahead is not None:
            self._ahead.discard()
        self._ahead = None

    def _next_layer(self) -> int:
        self._layer = (self._layer + 1) % self._runner.stage_memory.num_layers
        return self._layer

    def _kv_reader(self, layer: int) -> Copy:
        return lambda target: self._pack_kv(layer, target)

    def _pack_kv(self, layer: int, target: Any) -> None:
        self._runner.stage_memory.pack_kv(layer, self._first, target)

    def _kv_writer(self, layer: int) -> Copy:
        return lambda source: self._runner.stage_memory.unpack_kv(layer, self._first, source)

    def _pack_slab(self, target: Any) -> None:
        self._runner.stage_memory.pack_slab(self._slab, 0, target)

    def _read(self, read: Copy, target: Bytes) -> int:
        """Read a piece, and start to read the next, as the mover's sender does."""
        due, self._ahead = self._ahead, self._copies.read_ahead(target.size, read)
        if due is None:
            self._copies.pack(target, read)
        else:
            due.finish(target)
        return target.size

    def _write(self, write: Copy) -> int:
        self._copies.unpack(self._target, write)
        return self.piece_bytes


class Repeated:
    """Repeats `act`, which returns bytes, in a thread."""

    def __init__(self, act: Callable[[], int]) -> None:
        self.failure = ""
        self.bytes_per_s = 0.0
        self._act = act
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Repeated":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        copied, began_s = 0, time.perf_counter()
        try:
            while not self._stop.is_set():
                copied += self._act()
        except Exception as error:  # noqa: BLE001 - the figures name it
            self.failure = f"{type(error).__name__}: {error}"
        self.bytes_per_s = copied / (time.perf_counter() - began_s)


if __name__ == "__main__":
    main()
