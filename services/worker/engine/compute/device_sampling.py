"""Whether a GPU samples, and the memory for it."""

from typing import TYPE_CHECKING

import torch

from services.worker.engine.compute.runner_config import RunnerConfig, logit_rows
from services.worker.engine.model.catalog import ModelGeometry

if TYPE_CHECKING:
    # It imports Triton, which CPU builds of torch may lack.
    from services.worker.engine.sampling.device_sampler import DeviceSampler


def memory_bytes(config: RunnerConfig, geometry: ModelGeometry, compute: torch.dtype) -> int:
    """Return an upper bound of the memory of sampling on a GPU; 0 if the host samples."""
    if not _supported(config, compute):
        return 0
    from services.worker.engine.sampling.device_sampler import device_sampler_bytes

    return device_sampler_bytes(
        geometry.vocab_size,
        logit_rows(torch.device(config.device)),
        config.max_running,
        geometry.max_model_len,
    )


def device_sampler(
    config: RunnerConfig, geometry: ModelGeometry, compute: torch.dtype
) -> "DeviceSampler | None":
    """Return a sampler on the device, with its kernels compiled; None if the host samples."""
    if not _supported(config, compute):
        return None
    from services.worker.engine.sampling.device_sampler import DeviceSampler

    device = torch.device(config.device)
    sampler = DeviceSampler(
        geometry.vocab_size,
        rows_max=logit_rows(device),
        slots=config.max_running,
        max_model_len=geometry.max_model_len,
        device=device,
    )
    sampler.warm_up(compute)
    return sampler


def _supported(config: RunnerConfig, compute: torch.dtype) -> bool:
    return config.device_sampling and compute.itemsize < torch.float64.itemsize
