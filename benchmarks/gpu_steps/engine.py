"""An engine in this process: sampling, graph captures, and KV copies beside decodes.

The model has half of the layers of Qwen2.5-14B with random weights, the stage of a merged group of
two. Times are medians from the batch to its tokens on the host.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_copies import Repeated, mover_copies
from benchmarks.gpu_engine import SIZES, load
from benchmarks.gpu_steps.figures import Figures, step_parser
from services.core.planner.batch import Batch, Chunk, SampleSpec, SampleTerms
from services.core.request import Sampling, blocks_for
from services.worker.engine.compute.runner import ModelRunner

ROWS, CONTEXT, REPEATS, WARM_UPS = 64, 1000, 12, 3
DRY_ROWS, DRY_CONTEXT = 4, 40
PROMPT_IDS, OUTPUT_IDS = 800, 200
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "temperature": Sampling(temperature=0.7, seed=1),
    "top_p": Sampling(temperature=0.7, top_p=0.8, top_k=20, seed=1),
    # The generation_config.json of Qwen2.5-7B- and 14B-Instruct.
    "qwen_default": Sampling(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05, seed=1),
    "greedy_penalty": Sampling(temperature=0.0, repetition_penalty=1.05),
    "logprobs_5": Sampling(temperature=0.0),
}
CAPTURED_ROWS = (1, 8, 32, 64, 256)
PIECE_BYTES, PIECES_S = 4 << 20, 2.0
GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Size:
    """Rows and context of the decodes, and how long the copies run."""

    rows: int
    context: int
    copies_s: float
    captured_rows: tuple[int, ...]


FULL = Size(ROWS, CONTEXT, PIECES_S, CAPTURED_ROWS)
DRY = Size(DRY_ROWS, DRY_CONTEXT, 0.2, (1, 2))


def main() -> None:
    """Measure and write the file."""
    parser = step_parser(__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--memory-gib", type=float, default=40)
    chosen = parser.parse_args()
    figures = Figures(chosen.file)
    began_s = time.monotonic()
    if chosen.dry:
        size, runner = DRY, load(SIZES["tiny"], torch.device("cpu"), 100 << 20)
    else:
        layers = {"num_hidden_layers": chosen.layers}
        budget_bytes = int(chosen.memory_gib * GIB)
        size, runner = FULL, load(SIZES["14B"] | layers, torch.device(chosen.device), budget_bytes)
    figures.add("load_s", round(time.monotonic() - began_s, 2))
    figures.add("layers", runner.geometry.num_layers)
    figures.add("kv_tokens", runner.num_blocks * runner.block_size)
    trial = EngineTrial(runner, size)
    figures.measure("decode_ms", trial.samplings)
    figures.measure("copies", trial.copies)
    figures.measure("mover_copies", partial(mover_copies, runner, size.copies_s / 2))
    figures.measure("capture_ms", trial.captures)
    figures.end()


class EngineTrial:
    """The parts; `captures` drops layers, so it comes last."""

    def __init__(self, runner: ModelRunner, size: Size) -> None:
        self._runner = runner
        self._size = size

    def samplings(self) -> dict[str, Any]:
        """Duration of a decode of all rows by kind of sampling."""
        size = self._size
        durations = {}
        for name, sampling in SAMPLINGS.items():
            terms = self._terms(sampling, 5 if name.startswith("logprobs") else None)
            times_s = []
            for step in range(WARM_UPS + REPEATS):
                batch = self._decode(size.rows, size.context, name, terms, step)
                times_s.append(self._timed(partial(self._runner.run, batch)))
            times_s = sorted(times_s[WARM_UPS:])
            durations[name] = {"p50": 1e3 * median(times_s), "max": 1e3 * times_s[-1]}
        self._runner.sampler.keep_only(())
        return {"rows": size.rows, "context": size.context, **durations}

    def copies(self) -> dict[str, Any]:
        """Rates of KV copies in the default stream, alone and beside decodes, and their cost."""
        alone_s = self._decodes_s()
        result: dict[str, Any] = {"piece_bytes": self._piece[1], "decode_ms": 1e3 * alone_s}
        for name, act in (("pack", self._pack), ("unpack", self._unpack)):
            payload = torch.zeros(self._piece[1], dtype=torch.uint8)
            lock = threading.Lock()
            copy = partial(_locked_copy, lock, act, payload)
            with Repeated(copy) as idle:
                time.sleep(self._size.copies_s)
            with Repeated(copy) as beside:
                decode_s = self._decodes_s(lock)
            result[name] = {
                "idle_gib_per_s": idle.bytes_per_s / GIB,
                "beside_gib_per_s": beside.bytes_per_s / GIB,
                "decode_beside_ms": 1e3 * decode_s,
                "failure": idle.failure or beside.failure,
            }
        return result

    def captures(self) -> dict[str, Any]:
        """First and later durations of a decode by stage and rows: the first captures a graph."""
        memory, half = self._runner.stage_memory, self._runner.geometry.num_layers // 2
        result = {"whole": self._first_and_later("whole")}
        began_s = time.perf_counter()
        memory.prepare_drop(0, half)
        while not memory.drop_prepared:
            memory.continue_drop()
        prepared_s = time.perf_counter()
        report = memory.set_stage(0, half)
        result["drop"] = {
            "prepare_ms": 1e3 * (prepared_s - began_s),
            "pause_us": report.paused_us,
            "dropped_bytes": report.dropped_bytes,
        }
        result["half"] = self._first_and_later("half")
        memory.finish_drop(None)
        return result

    def _first_and_later(self, name: str) -> dict[str, Any]:
        terms = SampleTerms(SAMPLINGS["greedy"])
        result = {}
        for rows in self._size.captured_rows:
            # Contexts of other lengths than in `samplings`, which would have captured the graph.
            context = self._size.context // 4
            times_s = [
                self._timed(
                    partial(self._runner.run_stage, self._decode(rows, context, name, terms, 0))
                )
                for _ in range(4)
            ]
            result[str(rows)] = {"first": 1e3 * times_s[0], "later": 1e3 * min(times_s[1:])}
        return result

    def _terms(self, sampling: Sampling, top_logprobs: int | None) -> SampleTerms:
        vocabulary = self._runner.geometry.vocab_size
        ids = tuple((31 * place) % vocabulary for place in range(PROMPT_IDS + OUTPUT_IDS))
        return SampleTerms(
            sampling,
            ids[:PROMPT_IDS] if sampling.reads_prompt else (),
            ids[PROMPT_IDS:] if sampling.reads_output else (),
            top_logprobs=top_logprobs,
        )

    def _decode(self, rows: int, context: int, name: str, terms: SampleTerms, step: int) -> Batch:
        """Decode number `step` of `rows` sequences with blocks of their own.

        Later decodes of a sequence do not carry its terms, as those of a planner.
        """
        blocks = blocks_for(context + 1, self._runner.block_size)
        vocabulary = self._runner.geometry.vocab_size
        chunks = []
        for row in range(rows):
            token = (17 * row + step) % vocabulary
            reads = terms.sampling.reads_output and step > 0
            spec = SampleSpec(
                terms if step == 0 else None, OUTPUT_IDS + step, (token,) if reads else ()
            )
            table = tuple(range(row * blocks, (row + 1) * blocks))
            chunks.append(Chunk(f"{name}-{row}", context, (token,), table, spec))
        return Batch(tuple(chunks))

    def _timed(self, act: Callable[[], object]) -> float:
        began_s = time.perf_counter()
        act()
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    def _decodes_s(self, lock: AbstractContextManager[object] | None = None) -> float:
        """Median duration of decodes for `copies_s`; takes the lock before each."""
        terms = SampleTerms(SAMPLINGS["greedy"])
        times_s: list[float] = []
        ends_s = time.perf_counter() + self._size.copies_s
        while time.perf_counter() < ends_s:
            step = len(times_s)
            batch = self._decode(self._size.rows, self._size.context, "beside", terms, step)
            began_s = time.perf_counter()
            if lock is not None:
                # As the engine, which must find the lock free in every turn.
                with lock:
                    pass
            self._runner.run(batch)
            times_s.append(time.perf_counter() - began_s)
        return median(times_s)

    @property
    def _piece(self) -> tuple[list[int], int]:
        """Blocks at the end of the pool for a piece, and their bytes."""
        each = self._runner.stage_memory.kv_ranges[0].shape.size_bytes
        count = max(1, min(PIECE_BYTES // each, self._runner.num_blocks // 2))
        blocks = self._runner.num_blocks
        return list(range(blocks - count, blocks)), count * each

    def _pack(self, layer: int, payload: torch.Tensor) -> None:
        self._runner.stage_memory.pack_kv(layer, self._piece[0], payload)

    def _unpack(self, layer: int, payload: torch.Tensor) -> None:
        self._runner.stage_memory.unpack_kv(layer, self._piece[0], payload)


def _locked_copy(
    lock: AbstractContextManager[object],
    copy: Callable[[int, torch.Tensor], None],
    payload: torch.Tensor,
) -> int:
    """Copy the first layer under a lock, as the mover's thread does; returns the bytes."""
    with lock:
        copy(0, payload)
    return len(payload)


if __name__ == "__main__":
    main()
