"""How much of a worker's memory lies outside the arena: scratch, activations, logits."""

import torch

from services.worker.engine.compute.runner_config import RunnerConfig, compute_dtype, logit_rows
from services.worker.engine.memory.budget import MIB
from services.worker.engine.model import cpu_kernels
from services.worker.engine.model.attention.cpu import mask_bytes
from services.worker.engine.model.attention.paged import GROUP_TOKENS
from services.worker.engine.model.catalog import ModelGeometry
from services.worker.engine.sampling.device_draw import draw_bytes

SCRATCH_BYTES = 8 << 20
"""The buffer for upcast weights. Measured: a smaller one costs calls, a larger one cache misses."""
SAMPLER_ROWS = 5
"""Rows of logits that would take as much memory as the sampler: scratch, and a copy of a row."""
CUDA_BYTES = 128 * MIB
"""For cuBLAS, which takes 32 MiB on Hopper, and for the gaps of torch's allocator."""


def staging_bytes(config: RunnerConfig, geometry: ModelGeometry) -> int:
    """The most memory outside the arena: scratch, gathered K/V, activations, logits.

    Also the hidden states of a suspended batch, if there can be one. On a GPU the driver's context
    comes on top of it, which is outside the budget.
    """
    device = torch.device(config.device)
    compute = compute_dtype(device, config.dtype)
    logits = geometry.vocab_size * (logit_rows(device) + SAMPLER_ROWS) * compute.itemsize
    upcasts = compute != config.dtype
    needed = _activations_bytes(config, geometry, compute) + logits
    if device.type == "cuda":
        needed += CUDA_BYTES + draw_bytes(geometry.vocab_size)
        return needed + _gpu_attention_bytes(config, geometry, compute)
    return needed + (SCRATCH_BYTES if upcasts else 0) + gathered_bytes(config, geometry, compute)


def gathered_bytes(config: RunnerConfig, geometry: ModelGeometry, compute: torch.dtype) -> int:
    """K and V that torch's attention gathers, and its masks."""
    context = max(geometry.max_model_len, GROUP_TOKENS) + config.block_size
    kv_values = 2 * geometry.num_kv_heads * geometry.head_dim
    gathered = context * kv_values * config.dtype.itemsize
    if compute != config.dtype:
        gathered += context * kv_values * compute.itemsize
    masks = len(frozenset(geometry.sliding_windows)) * mask_bytes(context, compute.itemsize)
    return gathered + masks


def _activations_bytes(config: RunnerConfig, geometry: ModelGeometry, compute: torch.dtype) -> int:
    # The widest moment of a layer: residual and norm, then gate, its activation, up, product; or
    # query, key, value, their rotations and the attention output.
    heads = geometry.num_heads * geometry.head_dim
    kv_values = 2 * geometry.num_kv_heads * geometry.head_dim
    widest = 3 * geometry.hidden_size + max(4 * geometry.intermediate_size, 6 * heads)
    if torch.device(config.device).type == "cuda":
        # `GpuLayers`: what a layer has made lives until the layer has ended.
        made = 6 * geometry.hidden_size + 3 * (heads + geometry.intermediate_size) + kv_values
        widest = max(widest, made)
    needed = config.max_batch_tokens * widest * compute.itemsize
    if cpu_kernels.fit(torch.device(config.device), config.dtype, compute):
        # Fused layers: hidden states five times, heads and the MLP's width three times.
        fused = 5 * geometry.hidden_size + 3 * (heads + kv_values + geometry.intermediate_size)
        few = min(cpu_kernels.ROWS_MAX, config.max_batch_tokens)
        needed = max(needed, few * fused * compute.itemsize)
    if config.suspends:
        needed += config.max_batch_tokens * geometry.hidden_size * compute.itemsize
    return needed


def _gpu_attention_bytes(
    config: RunnerConfig, geometry: ModelGeometry, compute: torch.dtype
) -> int:
    from services.worker.engine.model.attention import gpu

    if gpu.fits(geometry.head_dim, compute):
        # Kernels that are launched one by one, and those of graphs, have memory of their own.
        return 2 * gpu.parts_bytes(geometry.num_heads, geometry.head_dim)
    return gathered_bytes(config, geometry, compute)
