"""Whether a GPU samples, and the memory for it."""

import logging
from typing import TYPE_CHECKING

import torch

from services.worker.engine.compute.runner_config import RunnerConfig, logit_rows
from services.worker.engine.model.catalog import ModelGeometry
from services.worker.engine.sampling.device_check import DIFFERENT_MAX, differing_share

if TYPE_CHECKING:
    # It imports Triton, which CPU builds of torch may lack.
    from services.worker.engine.sampling.device_sampler import DeviceSampler


log = logging.getLogger(__name__)


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
    """Return a sampler on the device, with its kernels compiled; None if the host samples.

    The host samples as well if the kernels choose other tokens on this machine.
    """
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
    try:
        sampler.warm_up(compute)
        share = differing_share(sampler, geometry.vocab_size, compute, device)
    except Exception:  # a compiler or a driver may raise anything
        log.exception("the kernels of the sampler do not run on this GPU, so the host samples")
        return None
    if share > DIFFERENT_MAX:
        log.error(
            "the GPU samples other tokens than the host in %.0f %% of the rows of a comparison, so"
            " the host samples; update the driver and Triton, or set device_sampling to false",
            100 * share,
        )
        return None
    return sampler


def _supported(config: RunnerConfig, compute: torch.dtype) -> bool:
    return config.device_sampling and compute.itemsize < torch.float64.itemsize
