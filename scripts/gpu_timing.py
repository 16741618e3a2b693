"""Time on a GPU, for `gpu_profile.py`."""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

REPEATS = 20
LEAD_CYCLES = 2_000_000
"""About a millisecond."""


def capture(work: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of the kernels of `work`, which ran once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph


def seconds_of(work: Callable[[], object]) -> float:
    """Time on the device of what `work` launches; other streams may be busy.

    The device is kept busy until the host has launched it, so launches do not count unless they
    take longer than the work.
    """
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(LEAD_CYCLES)
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def typical_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median time on the device, after a run that does not count."""
    return median([seconds_of(work) for _ in range(repeats + 1)][1:])


def least_s(work: Callable[[], object]) -> float:
    """The shortest of ten, after two that do not count."""
    return min([seconds_of(work) for _ in range(12)][2:])


def device_state() -> dict[str, float]:
    """How fast and how warm the device is now."""
    return {
        "sm_mhz": torch.cuda.clock_rate(),
        "watts": torch.cuda.power_draw() / 1e3,
        "celsius": torch.cuda.temperature(),
    }
