"""Measures the bandwidth between a device and host memory."""

import torch

from services.common.clock import monotonic_s
from services.common.device_profile import HostLink

SMALL_BYTES, LARGE_BYTES = 1 << 20, 64 << 20
REPEATS = 5


def measure_host_link(device: str, large_bytes: int = LARGE_BYTES) -> HostLink:
    """The best of some copies in each direction, of pieces and of `large_bytes`.

    On a CPU, KV and host copies are in the same memory: both directions are copies within it.
    """
    on_gpu = torch.device(device).type == "cuda"
    host = torch.zeros(large_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    other = torch.zeros(large_bytes, dtype=torch.uint8, device=device)
    sizes = (SMALL_BYTES, large_bytes)
    to_host = [_bytes_per_s(other[:size], host[:size], device) for size in sizes]
    to_device = [_bytes_per_s(host[:size], other[:size], device) for size in sizes]
    return HostLink(*to_host, *to_device)


def _bytes_per_s(source: torch.Tensor, target: torch.Tensor, device: str) -> float:
    """The best rate of copying `source` to `target`, uint8 of the same size."""
    durations_s = []
    for _ in range(REPEATS):
        _synchronize(device)
        started_s = monotonic_s()
        target.copy_(source, non_blocking=True)
        _synchronize(device)
        durations_s.append(monotonic_s() - started_s)
    return source.numel() / max(min(durations_s), 1e-9)


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
