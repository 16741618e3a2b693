"""Time on a GPU, for `gpu_profile.py`."""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

REPEATS = 20


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
    """Time on the device."""
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    began.record()
    work()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1e3


def typical_s(work: Callable[[], object]) -> float:
    """Median time on the device, after a run that does not count."""
    return median([seconds_of(work) for _ in range(REPEATS + 1)][1:])


def least_s(work: Callable[[], object]) -> float:
    """The shortest of ten, after two that do not count."""
    return min([seconds_of(work) for _ in range(12)][2:])


def replay_s(graph: torch.cuda.CUDAGraph) -> float:
    """Time on the device, without waiting for other streams."""
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    graph.replay()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3
