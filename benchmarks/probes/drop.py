"""Cost of a drop: `python -m benchmarks.probes.drop` prints a JSON object.

It measures a model folder, loaded as in a worker, or with `--layout` the memory layout of a model
of that size without computation. All pages are touched before each drop. Durations are reported as
elapsed time and as CPU time, since other processes disturb the elapsed time.

Exit code 2 with an error on stderr if the drop cannot be measured.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from psutil import virtual_memory

from services.common.clock import cpu_s, monotonic_s
from services.common.lifecycle import EXIT_UNUSABLE
from services.core.groups.slab_names import EMBEDDING, HEAD, layer_name
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.memory.budget import MemoryDemand, plan_memory
from services.worker.engine.memory.kv_range import KvBlockShape
from services.worker.engine.memory.layer_slab import SlabLayout
from services.worker.engine.memory.memfd import MemfdArena
from services.worker.engine.memory.stage_memory import DropReport, StageMemory
from services.worker.errors import WorkerError

GIB = 1 << 30
CHUNK_BYTES = 2 << 20
LAYERS = 48
KV_SHARE = 0.05
"""Share of the chunks that hold KV before a drop: parameters fill most memory before a flood."""
# Qwen2.5-14B: 8 KV heads of 128, blocks of 16 tokens.
BLOCK_SHAPE = KvBlockShape(block_size=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
AVAILABLE_SHARE = 0.8
"""Share of the machine's available memory that the arena may use."""


class ConstantSource:
    """Parameter source that touches every page without computing values."""

    on_device = True

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Write ones."""
        target.fill_(1.0)

    def close(self) -> None:
        """Do nothing; no file is open."""


def main() -> None:
    """Parse the arguments, measure and print the result."""
    parser = argparse.ArgumentParser(prog="tideserve-profile-drop")
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--model-dir", type=Path, help="a model folder, loaded as in a worker")
    subject.add_argument(
        "--layout", type=float, metavar="GIB", help="a 48-layer layout of this size"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory-gib", type=float, default=1.0, help="budget for --model-dir")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    try:
        with _memory(arguments) as memory:
            print(json.dumps(measure(memory, arguments.rounds)))
    except WorkerError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_UNUSABLE)


@contextmanager
def _memory(arguments: argparse.Namespace) -> Iterator[StageMemory]:
    if arguments.layout is not None:
        memory = load_layout(int(arguments.layout * GIB))
        with closing(memory.arena):
            yield memory
        return
    config = RunnerConfig(
        model_dir=arguments.model_dir,
        device="cpu",
        dtype=getattr(torch, arguments.dtype),
        budget_bytes=int(arguments.memory_gib * GIB),
    )
    with closing(ModelRunner.load(config)) as runner:
        yield runner.stage_memory


def load_layout(arena_bytes: int) -> StageMemory:
    """A layout of 48 equal layers, embedding and head in 2 MiB chunks; the caller closes the arena.

    Raises WorkerError if the machine has too little memory to touch all pages.
    """
    available_bytes = virtual_memory().available
    if arena_bytes > AVAILABLE_SHARE * available_bytes:
        raise WorkerError(
            f"{arena_bytes / GIB:.1f} GiB would be touched but only {available_bytes / GIB:.1f} "
            "GiB are available; choose a smaller layout"
        )
    chunks = arena_bytes // CHUNK_BYTES
    kv_chunks_per_layer = max(1, int(chunks * KV_SHARE / LAYERS))
    # Embedding and head are slabs like the layers.
    slab_chunks = (chunks - LAYERS * kv_chunks_per_layer) // (LAYERS + 2)
    if slab_chunks < 1:
        raise WorkerError(f"{arena_bytes / GIB:.2f} GiB cannot hold {LAYERS} layers; choose more")
    names = [EMBEDDING, *(layer_name(index) for index in range(LAYERS)), HEAD]
    elements = slab_chunks * CHUNK_BYTES // torch.bfloat16.itemsize
    layouts = {
        name: SlabLayout.of([(f"{name}.weight", (elements,))], torch.bfloat16) for name in names
    }
    demand = MemoryDemand(
        slab_bytes=tuple(layout.size_bytes for layout in layouts.values()),
        num_layers=LAYERS,
        kv_block_bytes=BLOCK_SHAPE.size_bytes,
        block_size=BLOCK_SHAPE.block_size,
        staging_bytes=0,
    )
    plan = plan_memory(arena_bytes, demand, min_tokens=16, chunk_bytes=CHUNK_BYTES)
    memory = StageMemory(
        MemfdArena(chunk_bytes=plan.chunk_bytes, total_chunks=plan.total_chunks),
        plan,
        layouts,
        BLOCK_SHAPE,
        num_layers=LAYERS,
        tied_embeddings=False,
        open_source=ConstantSource,
    )
    memory.load()
    return memory


def measure(memory: StageMemory, rounds: int) -> dict[str, Any]:
    """Drop and restore the second half of the layers, `rounds` times prepared and unprepared."""
    return {
        "chunks": memory.plan.total_chunks,
        "chunk_bytes": memory.plan.chunk_bytes,
        "layers": memory.num_layers,
        "rounds": [_round(memory, prepared=turn % 2 == 1) for turn in range(2 * rounds)],
    }


def _round(memory: StageMemory, *, prepared: bool) -> dict[str, Any]:
    """A drop and a restore; `prepared` as in a merge, else with mapping after the pause."""
    half = memory.num_layers // 2
    blocks = memory.num_blocks
    for kv_range in memory.kv_ranges:
        kv_range.blocks().fill_(1.0)
    before = None
    if prepared:  # map and touch pages while the layers still run
        mapped = _once(lambda: memory.prepare_drop(0, half))
        before = {"map": mapped, "touch": _repeat(memory.finish_drop)}
    reports: list[DropReport] = []
    paused = _once(lambda: reports.append(memory.set_stage(0, half)))
    (report,) = reports
    touch = _repeat(lambda: _write_tails(memory, blocks))
    warm = _repeat(lambda: _write_tails(memory, blocks))
    background = _repeat(memory.finish_drop)
    release = _repeat(lambda: memory.release_departed(0) > 0)
    mappings = Path("/proc/self/maps").read_text().count("tideserve-arena")
    restore = _restore(memory)
    memory.check_invariants()
    return {
        "prepared": prepared,
        "prepare": before,
        "drop": {
            "paused_us": report.paused_us,
            "elapsed_us": paused["elapsed_ms"] * 1e3,
            "cpu_us": paused["cpu_ms"] * 1e3,
            "map_calls": report.map_calls,
            "dropped_bytes": report.dropped_bytes,
            "mapped_bytes": report.mapped_bytes,
            "blocks": [blocks, report.num_blocks],
        },
        "background": background,
        "first_touch_ms_per_gib": _per_gib(touch, report.mapped_bytes),
        "warm_touch_ms_per_gib": _per_gib(warm, report.mapped_bytes),
        "release": release,
        "mappings": mappings,
        "restore": restore,
    }


def _restore(memory: StageMemory) -> dict[str, Any]:
    """Restore all layers; times of the paused step (`set_stage`) and of the longest other step."""
    layers = memory.num_layers
    shrink = _once(lambda: memory.shrink_kv(memory.blocks_after_adding(0, layers), used_blocks=0))
    background = _repeat(memory.finish_drop)
    missing = memory.missing_slabs(0, layers)
    names = iter(missing)

    def map_next() -> bool:
        name = next(names, None)
        if name is not None:
            memory.map_layer_parameters(name)
        return name is None

    mapping = _repeat(map_next)
    for name in missing:
        memory.load_layer(name)
    # Measure the verification of a single slab in 8 MiB steps, and finish the others at once.
    verify = _repeat(lambda: memory.finish_layer(missing[0], 8 << 20))
    for name in missing[1:]:
        memory.finish_layer(name)
    memory.map_kv_of(range(layers))
    switch = _once(lambda: memory.set_stage(0, layers))
    _repeat(memory.finish_drop)
    return {
        "shrink": shrink,
        "background": background,
        "map_parameters": mapping,
        "verify_one_slab": verify,
        "set_stage": switch,
    }


def _write_tails(memory: StageMemory, first_block: int) -> bool:
    for layer in memory.layers:
        memory.kv_ranges[layer].blocks()[first_block:] = 2.0
    return True


def _once(step: Callable[[], object]) -> dict[str, float]:
    return _repeat(lambda: (step(), True)[1])


def _repeat(step: Callable[[], bool]) -> dict[str, float]:
    """Call `step` until it returns True; total times, and the CPU time of the longest call."""
    started_s, started_cpu_s = monotonic_s(), cpu_s()
    longest_s, steps, done = 0.0, 0, False
    while not done:
        step_cpu_s = cpu_s()
        done = step()
        longest_s = max(longest_s, cpu_s() - step_cpu_s)
        steps += 1
    return {
        "elapsed_ms": (monotonic_s() - started_s) * 1e3,
        "cpu_ms": (cpu_s() - started_cpu_s) * 1e3,
        "longest_step_cpu_ms": longest_s * 1e3,
        "steps": steps,
    }


def _per_gib(cost: dict[str, float], size_bytes: int) -> dict[str, float]:
    gib = size_bytes / GIB
    return {"elapsed": cost["elapsed_ms"] / gib, "cpu": cost["cpu_ms"] / gib}


if __name__ == "__main__":
    main()
