"""Durations of an iteration's kernels, by torch's profiler, on random weights and random KV.

The model has four layers of Qwen2.5-14B: what is launched per layer has four times the calls of a
layer. Times are per iteration, in µs on the device.
"""

from collections import defaultdict
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_engine import SIZES, load
from benchmarks.gpu_steps.figures import Figures, step_parser
from services.core.planner.block_pool import BlockPool
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.profile.measurer import Measurer

LAYERS, MEMORY_BYTES = 4, 24 << 30
Chunks = tuple[tuple[int, int], ...]
SHAPES: dict[str, Chunks] = {
    "decode 1 at 1,000": ((1000, 1),),
    "decode 16 at 1,000": ((1000, 1),) * 16,
    "decode 64 at 1,000": ((1000, 1),) * 64,
    "decode 256 at 500": ((500, 1),) * 256,
    "prefill 512 beside decode 32": ((0, 512), *((1000, 1),) * 32),
    "prefill 2,048": ((0, 2048),),
    "prefill 2,048 after 8,192": ((8192, 2048),),
}
DRY_SHAPES: dict[str, Chunks] = {"decode 2": ((20, 1),) * 2, "prefill 32": ((0, 32),)}
REPEATS, WARM_UPS, KERNELS_SHOWN, NAME_CHARS = 6, 3, 16, 72


def main() -> None:
    """Measure and write the file."""
    chosen = step_parser(__doc__).parse_args()
    figures = Figures(chosen.file)
    if chosen.dry:
        runner = load(SIZES["tiny"], torch.device("cpu"), 100 << 20)
    else:
        size = SIZES["14B"] | {"num_hidden_layers": LAYERS}
        runner = load(size, torch.device(chosen.device), MEMORY_BYTES)
    # Constant data takes less power, so that products run at higher clocks.
    for kv_range in runner.stage_memory.kv_ranges:
        kv_range.blocks().normal_()
    measurer = Measurer(runner, BlockPool(runner.num_blocks).borrow)
    figures.add("layers", runner.geometry.num_layers)
    for name, chunks in (DRY_SHAPES if chosen.dry else SHAPES).items():
        figures.measure(name, partial(kernel_times, runner, measurer, chunks))
    figures.end()


def kernel_times(runner: ModelRunner, measurer: Measurer, chunks: Chunks) -> dict[str, Any]:
    """Duration of the iteration without a profiler, and of its kernels."""
    durations_s = [measurer.duration_s(chunks) or 0.0 for _ in range(WARM_UPS + REPEATS)]
    on_gpu = runner.device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(REPEATS):
            measurer.duration_s(chunks)
        if on_gpu:
            torch.cuda.synchronize()
    calls: dict[str, int] = defaultdict(int)
    total_us: dict[str, float] = defaultdict(float)
    for event in profiler.events():
        # Without kernels' launches, which are events of the CPU.
        on_device = event.device_type != DeviceType.CPU
        own_us = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        if own_us > 0 and on_device == on_gpu:
            calls[event.name[:NAME_CHARS]] += 1
            total_us[event.name[:NAME_CHARS]] += own_us
    ordered = sorted(total_us, key=lambda name: -total_us[name])
    return {
        "iteration_us": 1e6 * median(durations_s[WARM_UPS:]),
        "kernels_us": sum(total_us.values()) / REPEATS,
        "kernels": {
            name: {"us": total_us[name] / REPEATS, "calls": calls[name] / REPEATS}
            for name in ordered[:KERNELS_SHOWN]
        },
    }


if __name__ == "__main__":
    main()
