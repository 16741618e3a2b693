"""Time engine iterations and their matrix products on a GPU, and the pause of a drop.

    python -m benchmarks.gpu_engine FILE [--size 14B] [--memory-gib 60]

Weights are random, which does not affect the time. The figures are written to FILE as JSON.
`--device cpu --size tiny --memory-gib 0.1` runs the same steps without a GPU.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional

from services.core.planner.block_pool import BlockPool
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.profile.measurer import Measurer

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as in a worker
DTYPE = torch.bfloat16
REPEATS, INTERRUPTIONS = 12, 20
LEAD_CYCLES = 20_000_000  # about 10 ms: the host launches the timed kernels meanwhile
LONG = ((0, 2048),)
BATCHES: dict[str, tuple[tuple[int, int], ...]] = {
    "decode of 1 at 1,000": ((1000, 1),),
    "decode of 16 at 1,000": ((1000, 1),) * 16,
    "decode of 64 at 1,000": ((1000, 1),) * 64,
    "decode of 256 at 500": ((500, 1),) * 256,
    "prefill of 256": ((0, 256),),
    "prefill of 2,048": LONG,
    "prefill of 512 beside decode of 32 at 1,000": ((0, 512), *((1000, 1),) * 32),
}
SIZES = {
    name: {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
    }
    for name, hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary in (
        ("14B", 5120, 13824, 48, 40, 8, 128, 152064),  # as Qwen-2.5-14B
        ("7B", 4096, 11008, 32, 32, 32, 128, 32000),  # as Llama-2-7B
        ("tiny", 64, 128, 4, 4, 2, 16, 1000),
    )
}


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="output file of the figures")
    parser.add_argument("--size", default="14B", choices=SIZES)
    parser.add_argument("--memory-gib", type=float, default=60, help="budget of the engine")
    parser.add_argument("--device", default="cuda")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    runner = load(SIZES[chosen.size], device, int(chosen.memory_gib * 2**30))
    measurer = Measurer(runner, BlockPool(runner.num_blocks).borrow)
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "date": time.strftime("%Y-%m-%d"),
        "pytorch": torch.__version__,
        "model": f"the sizes of {chosen.size} in bfloat16, random weights",
        "kv_tokens": runner.num_blocks * runner.block_size,
        "iterations": {
            name: {
                "lengths": lengths_of(chunks),
                "engine_ms": typical_ms(partial(measurer.duration_s, chunks)),
            }
            for name, chunks in BATCHES.items()
            if sum(prefix + new for prefix, new in chunks) < runner.num_blocks * runner.block_size
        },
        "interrupted": interruptions(measurer, device),
        "drop": drop(runner),
    }
    runner.check_invariants()
    # Free the engine's memory for the weights of the plain products.
    runner.close()
    weights = product_weights(SIZES[chosen.size], device)
    for name, times in figures["iterations"].items():
        rows, last = sum(new for _, new in BATCHES[name]), len(BATCHES[name])
        times["products_ms"] = product_ms(weights, rows, last, device)
    chosen.file.write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures, indent=1))


def load(size: dict[str, int], device: torch.device, budget_bytes: int) -> ModelRunner:
    """An engine with random weights of the given size."""
    folder = Path(tempfile.mkdtemp())
    config = {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": False,
        **size,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return ModelRunner.load(
        RunnerConfig(
            model_dir=folder,
            device=str(device),
            dtype=DTYPE,
            budget_bytes=budget_bytes,
            load_format="dummy",
            max_running=256,
            threads=1,
        )
    )


def lengths_of(chunks: tuple[tuple[int, int], ...]) -> list[dict[str, int]]:
    """The lengths of a batch: requests with equal cached and new tokens, and their number."""
    return [
        {"requests": count, "cached_tokens": prefix, "new_tokens": new}
        for (prefix, new), count in Counter(chunks).items()
    ]


def typical_ms(act: Callable[[], float | None], repeats: int = REPEATS) -> float:
    """Median of the seconds returned by `act`, in ms, without three warm-up runs."""
    return 1e3 * median([act() or 0.0 for _ in range(repeats + 3)][3:])


def timed_ms(act: Callable[[], object]) -> float:
    """Host time of `act` in ms."""
    began_s = time.perf_counter()
    act()
    return 1e3 * (time.perf_counter() - began_s)


def product_weights(size: dict[str, int], device: torch.device) -> list[torch.Tensor]:
    """The weights of the matrix products of all layers in order, then of the head."""
    hidden, inner = size["hidden_size"], size["num_attention_heads"] * size["head_dim"]
    qkv = inner + 2 * size["num_key_value_heads"] * size["head_dim"]
    middle = size["intermediate_size"]
    layer = ((qkv, hidden), (hidden, inner), (2 * middle, hidden), (hidden, middle))
    shapes = [*layer * size["num_hidden_layers"], (size["vocab_size"], hidden)]
    return [torch.randn(*shape, dtype=DTYPE, device=device) for shape in shapes]


def product_ms(weights: list[torch.Tensor], rows: int, last: int, device: torch.device) -> float:
    """Time of the products of an iteration of `rows` tokens, `last` of them sampled."""
    widths = {weight.shape[1] for weight in weights}
    inputs = {n: torch.randn(rows, n, dtype=DTYPE, device=device) for n in widths}

    def multiply() -> None:
        for weight in weights[:-1]:
            functional.linear(inputs[weight.shape[1]], weight)
        # The head is computed only for sampled tokens.
        functional.linear(inputs[weights[-1].shape[1]][:last], weights[-1])

    def on_device_s() -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Keep the device busy while the host launches, so that launch latency is not timed.
        torch.cuda._sleep(LEAD_CYCLES)
        began.record()
        multiply()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3

    if device.type == "cuda":
        return typical_ms(on_device_s)
    return typical_ms(lambda: timed_ms(multiply) / 1e3)


def interruptions(measurer: Measurer, device: torch.device) -> dict[str, float]:
    """How long a prefill of 2,048 tokens continues after an interrupt."""
    whole_ms = typical_ms(partial(measurer.duration_s, LONG), 5)
    stop, asked_s, late_ms = threading.Event(), 0.0, []

    def ask() -> None:
        nonlocal asked_s
        asked_s = time.perf_counter()
        stop.set()

    for number in range(INTERRUPTIONS):
        stop.clear()
        # Interrupt at points spread over the iteration.
        timer = threading.Timer(whole_ms / 1e3 * (0.1 + 0.7 * number / INTERRUPTIONS), ask)
        timer.start()
        ended = measurer.duration_s(LONG, stop.is_set)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        stopped_s = time.perf_counter()
        timer.join()
        if ended is None:
            late_ms.append(1e3 * (stopped_s - asked_s))
    checked_ms = typical_ms(partial(measurer.duration_s, LONG, lambda: False), 5)
    figures = {"whole_ms": whole_ms, "interruptible_ms": checked_ms, "stopped": len(late_ms)}
    return figures | ({"stop_ms": median(late_ms), "longest_ms": max(late_ms)} if late_ms else {})


def drop(runner: ModelRunner) -> dict[str, float]:
    """Time a drop of half of the layers, which frees memory for KV, and remapping one layer."""
    memory = runner.stage_memory
    half, blocks = memory.num_layers // 2, memory.num_blocks
    prepared = [timed_ms(partial(memory.prepare_drop, 0, half))]
    while not memory.drop_prepared:
        prepared.append(timed_ms(memory.continue_drop))
    times = {"prepare_ms": sum(prepared), "longest_prepare_ms": max(prepared)}
    report = memory.set_stage(0, half)
    slices = [timed_ms(memory.finish_drop)]
    # Finish the drop in slices, as a worker does between iterations.
    while memory.arena.retired_chunks:
        slices.append(timed_ms(memory.finish_drop))
    times |= {
        "pause_us": report.paused_us,
        "dropped_bytes": report.dropped_bytes,
        "mapped_bytes": report.mapped_bytes,
        "finish_ms": sum(slices),
        "longest_slice_ms": max(slices),
        "tokens_before": blocks * runner.block_size,
        "tokens_after": memory.release_departed(0) * runner.block_size,
    }
    memory.finish_drop(None)
    limit = memory.blocks_after_adding(0, half + 1)
    times["shrink_ms"] = timed_ms(partial(memory.shrink_kv, limit, used_blocks=0))
    name = f"model.layers.{half}"
    times["map_layer_ms"] = timed_ms(partial(memory.map_layer_parameters, name))
    memory.abandon_restore()
    memory.finish_drop(None)
    return times


if __name__ == "__main__":
    main()
