"""Loads a model for the runner: divides the memory budget, reads parameters, builds the decoder.

Terms: the arena is the device memory for parameters and KV cache. A slab is the memory with the
parameters of a layer, of the embeddings or of the head. Panels are a packed layout of weights for
matrix products on a CPU. The compute dtype is that of activations, the storage dtype of weights.
"""

import logging
import os
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from services.core.groups.slab_names import layer_name
from services.worker.engine.compute import device_sampling
from services.worker.engine.compute.gpu_needs import usable_device
from services.worker.engine.compute.runner_config import RunnerConfig, compute_dtype, logit_rows
from services.worker.engine.memory.arena import Arena
from services.worker.engine.memory.budget import (
    CPU_CHUNKS,
    GPU_CHUNKS,
    MIB,
    MemoryDemand,
    MemoryPlan,
    plan_memory,
)
from services.worker.engine.memory.device_copies import SLOT_BYTES, DeviceCopies
from services.worker.engine.memory.host_copies import HostCopies
from services.worker.engine.memory.kv_range import KvBlockShape
from services.worker.engine.memory.layer_slab import SlabLayout, WeightSource
from services.worker.engine.memory.memfd import MemfdArena
from services.worker.engine.memory.stage_memory import StageMemory
from services.worker.engine.model import cpu_kernels
from services.worker.engine.model.attention.cpu import SdpaPagedAttention, mask_bytes
from services.worker.engine.model.attention.paged import GROUP_TOKENS, PagedAttention
from services.worker.engine.model.catalog import ModelGeometry, geometry_of
from services.worker.engine.model.config import load_config
from services.worker.engine.model.decoder import Decoder, LayerRunner, slab_layouts
from services.worker.engine.model.linear import UpcastScratch
from services.worker.engine.model.loader import DummySource, SafetensorsSource, verify_manifest
from services.worker.engine.model.modules import Skeleton

if TYPE_CHECKING:
    # It imports Triton, which CPU builds of torch may lack.
    from services.worker.engine.sampling.device_sampler import DeviceSampler

log = logging.getLogger(__name__)

SCRATCH_BYTES = 8 << 20
"""Size of the buffer for weights cast to the compute dtype. Measured: a smaller buffer costs more
calls, a larger one more cache misses."""
SAMPLER_ROWS = 5
"""The sampler's memory, in rows of logits."""
HASHERS_MAX = 8
"""Threads that hash parameters; each takes about a second per GiB."""
CUDA_BYTES = 128 * MIB
"""For cuBLAS (32 MiB on Hopper) and for fragmentation of torch's allocator."""


def staging_bytes(config: RunnerConfig, geometry: ModelGeometry) -> int:
    """Return an upper bound of memory outside the arena: scratch, K/V, activations, logits.
    Includes the hidden states of a suspended batch if the runner suspends batches. Excludes the
    context of the GPU driver, which the budget does not cover.
    """
    device = torch.device(config.device)
    compute = compute_dtype(device, config.dtype)
    logits = geometry.vocab_size * (logit_rows(device) + SAMPLER_ROWS) * compute.itemsize
    # The sum of the peaks of all parts is an upper bound of the peak.
    upcasts = compute != config.dtype
    needed = _activations_bytes(config, geometry, compute) + logits
    if device.type == "cuda":
        needed += CUDA_BYTES + device_sampling.memory_bytes(config, geometry, compute)
        return needed + _gpu_attention_bytes(config, geometry, compute)
    return needed + (SCRATCH_BYTES if upcasts else 0) + gathered_bytes(config, geometry, compute)


def gathered_bytes(config: RunnerConfig, geometry: ModelGeometry, compute: torch.dtype) -> int:
    """Return the bytes of torch's attention: buffers for gathered K and V, and masks."""
    context = max(geometry.max_model_len, GROUP_TOKENS) + config.block_size
    kv_values = 2 * geometry.num_kv_heads * geometry.head_dim
    gathered = context * kv_values * config.dtype.itemsize
    if compute != config.dtype:
        gathered += context * kv_values * compute.itemsize
    masks = len(frozenset(geometry.sliding_windows)) * mask_bytes(context, compute.itemsize)
    return gathered + masks


def _activations_bytes(config: RunnerConfig, geometry: ModelGeometry, compute: torch.dtype) -> int:
    # Peak of a layer's live tensors: residual and norm, plus either gate, activation, up and their
    # product (MLP) or query, key, value, their rotations and the attention output.
    heads = geometry.num_heads * geometry.head_dim
    kv_values = 2 * geometry.num_kv_heads * geometry.head_dim
    widest = 3 * geometry.hidden_size + max(4 * geometry.intermediate_size, 6 * heads)
    if torch.device(config.device).type == "cuda":
        # `GpuLayers` keeps all intermediate tensors of a layer alive until the layer has ended.
        live = 6 * geometry.hidden_size + 3 * (heads + geometry.intermediate_size) + kv_values
        widest = max(widest, live)
    needed = config.max_batch_tokens * widest * compute.itemsize
    if cpu_kernels.fit(torch.device(config.device), config.dtype, compute):
        # Fused layers hold five tensors of hidden size, and three each of the width of the heads
        # and of the MLP.
        fused = 5 * geometry.hidden_size + 3 * (heads + kv_values + geometry.intermediate_size)
        few = min(cpu_kernels.ROWS_MAX, config.max_batch_tokens)
        needed = max(needed, few * fused * compute.itemsize)
    # A suspended batch keeps its hidden states while another batch runs.
    if config.suspends:
        needed += config.max_batch_tokens * geometry.hidden_size * compute.itemsize
    return needed


def _gpu_attention_bytes(
    config: RunnerConfig, geometry: ModelGeometry, compute: torch.dtype
) -> int:
    from services.worker.engine.model.attention import gpu

    if gpu.fits(geometry.head_dim, compute):
        # Eager kernels and captured graphs have separate memory.
        return 2 * gpu.parts_bytes(geometry.num_heads, geometry.head_dim)
    return gathered_bytes(config, geometry, compute)


class LoadedModel(NamedTuple):
    """A model in memory; `stage_memory` owns the parameters and the KV cache.

    `device_sampler`: None if the host samples.
    """

    geometry: ModelGeometry
    stage_memory: StageMemory
    decoder: Decoder
    device_sampler: "DeviceSampler | None" = None


def load_model(config: RunnerConfig) -> LoadedModel:
    """Read the model into a new arena. Raises ModelError, BudgetTooSmall, DeviceError."""
    device = usable_device(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model_config = load_config(config.model_dir)
    geometry = _limited(geometry_of(model_config, config.dtype), config.max_model_len)
    skeleton = Skeleton(model_config)
    compute = compute_dtype(device, config.dtype)
    compiled = cpu_kernels.fit(device, config.dtype, compute)
    panels = compiled and cpu_kernels.has_panel_product(config.dtype)
    layouts = slab_layouts(
        skeleton, config.dtype, panels=panels, biases_last=uses_gpu_kernels(device)
    )
    # `slab_layouts` falls back to row-major weights if a shape does not fit panels.
    panels = bool(layouts[layer_name(0)].tag)
    if device.type == "cpu":
        text = products_text(config.dtype, compute, compiled=compiled, panels=panels)
        log.info("products: %s", text)
    block_shape = KvBlockShape(
        config.block_size, geometry.num_kv_heads, geometry.head_dim, config.dtype
    )
    plan = _plan(config, geometry, layouts, block_shape)
    arena, copies = open_memory(config, plan, block_shape.size_bytes)
    with ExitStack() as stack:
        # Free the arena if loading fails; on success `pop_all` leaves it open.
        stack.callback(arena.close)
        stage_memory = StageMemory(
            arena,
            plan,
            layouts,
            block_shape,
            num_layers=geometry.num_layers,
            tied_embeddings=geometry.tied_embeddings,
            open_source=partial(_open_source, config),
            host_copies=HostCopies(config.host_weights_bytes, pinned=device.type == "cuda"),
            copies=copies,
            hashers=_hashers(config),
        )
        if config.load_format != "dummy":
            verify_manifest(config.model_dir)
        stage_memory.load()
        decoder = _build_decoder(config, skeleton, geometry, stage_memory)
        sampler = _device_sampler(config, geometry)
        stack.pop_all()
    return LoadedModel(geometry, stage_memory, decoder, sampler)


def uses_gpu_kernels(device: torch.device) -> bool:
    """Whether to run the model's layers by `gpu_kernels`, as far as these support the model."""
    return device.type == "cuda"


def products_text(
    storage: torch.dtype, compute: torch.dtype, *, compiled: bool, panels: bool
) -> str:
    """Describe the matrix products of the layers for the engine's log.

    `compiled`: `cpu_kernels` compute them. `panels`: the weights are packed in panels.
    """
    if panels:
        return cpu_kernels.describe_panel_product(storage)
    stored, computed = (str(dtype).removeprefix("torch.") for dtype in (storage, compute))
    kernels = "" if compiled else f", by torch alone (threads: {torch.get_num_threads()})"
    return f"row-major weights in {stored}, {computed} products{kernels}"


def _limited(geometry: ModelGeometry, max_model_len: int | None) -> ModelGeometry:
    """Return `geometry` with its context limited to `max_model_len`."""
    if max_model_len is None or max_model_len >= geometry.max_model_len:
        return geometry
    return replace(geometry, max_model_len=max_model_len)


def _plan(
    config: RunnerConfig,
    geometry: ModelGeometry,
    layouts: dict[str, SlabLayout],
    block_shape: KvBlockShape,
) -> MemoryPlan:
    """Divide the memory budget. Raises BudgetTooSmall."""
    demand = MemoryDemand(
        slab_bytes=tuple(layout.size_bytes for layout in layouts.values()),
        num_layers=geometry.num_layers,
        kv_block_bytes=block_shape.size_bytes,
        block_size=config.block_size,
        staging_bytes=staging_bytes(config, geometry),
    )
    return plan_memory(
        config.budget_bytes,
        demand,
        min_tokens=config.min_tokens,
        chunk_bytes=config.chunk_bytes,
        rule=GPU_CHUNKS if torch.device(config.device).type == "cuda" else CPU_CHUNKS,
    )


def _open_source(config: RunnerConfig) -> WeightSource:
    """Open the source of the parameters. Raises ModelError."""
    if config.load_format == "dummy":
        return DummySource(seed=config.dummy_seed, std=config.dummy_std)
    return SafetensorsSource(config.model_dir)


def open_memory(
    config: RunnerConfig, plan: MemoryPlan, block_bytes: int
) -> tuple[Arena, DeviceCopies | None]:
    """Allocate the memory of `plan`; on a GPU, also open its copy stream. Raises DeviceError.

    `block_bytes`: size of a KV block in one layer.
    """
    device = torch.device(config.device)
    sizes = {"chunk_bytes": plan.chunk_bytes, "total_chunks": plan.total_chunks}
    if device.type == "cpu":
        return MemfdArena(**sizes), None
    from services.worker.engine.memory.cuda import CudaArena
    from services.worker.engine.memory.cuda_driver import CudaDriver
    from services.worker.engine.memory.cuda_streams import CudaStreams

    driver = CudaDriver(device)
    driver.check_room(plan.arena_bytes + plan.staging_bytes)
    streams = CudaStreams(device, copy_bytes=SLOT_BYTES, block_bytes=block_bytes)
    copies = DeviceCopies(streams, block_bytes=block_bytes)
    arena = CudaArena(driver, copies.fence, **sizes, maps_later=config.overlap)
    return arena, copies if config.overlap else None


def _hashers(config: RunnerConfig) -> Executor | None:
    """Return threads that hash parameters; None on a CPU, whose cores compute."""
    if torch.device(config.device).type == "cpu" or not config.overlap:
        return None
    return ThreadPoolExecutor(min(HASHERS_MAX, os.cpu_count() or 1), "hashes")


def _build_decoder(
    config: RunnerConfig,
    skeleton: Skeleton,
    geometry: ModelGeometry,
    stage_memory: StageMemory,
) -> Decoder:
    device = torch.device(config.device)
    compute = compute_dtype(device, config.dtype)
    compiled = cpu_kernels.fit(device, config.dtype, compute)
    attention = _attention(config, geometry, compute, compiled=compiled)
    return Decoder(
        skeleton,
        stage_memory.slabs,
        stage_memory.kv_ranges,
        attention,
        sliding_windows=geometry.sliding_windows,
        compute_dtype=compute,
        scratch=UpcastScratch(SCRATCH_BYTES, compute, device) if compute != config.dtype else None,
        compiled=compiled,
        layer_runner=(
            _gpu_layers(skeleton, stage_memory, attention) if uses_gpu_kernels(device) else None
        ),
    )


def _device_sampler(config: RunnerConfig, geometry: ModelGeometry) -> "DeviceSampler | None":
    device = torch.device(config.device)
    if not uses_gpu_kernels(device):
        return None
    return device_sampling.device_sampler(config, geometry, compute_dtype(device, config.dtype))


def _attention(
    config: RunnerConfig, geometry: ModelGeometry, compute: torch.dtype, *, compiled: bool
) -> PagedAttention:
    """Return the fastest attention backend that supports the model on the device."""
    device = torch.device(config.device)
    backend: PagedAttention | None = None
    if compiled:
        backend = _compiled_attention(config, geometry)
    elif uses_gpu_kernels(device):
        backend = _gpu_attention(config, geometry, device)
    return backend or SdpaPagedAttention(
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        block_size=config.block_size,
        max_context=geometry.max_model_len,
        storage_dtype=config.dtype,
        compute_dtype=compute,
        device=device,
        compiled=compiled,
    )


def _compiled_attention(config: RunnerConfig, geometry: ModelGeometry) -> PagedAttention | None:
    """Return compiled CPU attention; None if it does not support the CPU or the cache's shape."""
    from services.worker.engine.model.attention.compiled import CompiledPagedAttention
    from services.worker.engine.model.cpu_kernels.paged_attention import fits

    if not fits(config.block_size, geometry.head_dim, config.dtype):
        return None
    return CompiledPagedAttention(geometry.head_dim, config.dtype)


def _gpu_attention(
    config: RunnerConfig, geometry: ModelGeometry, device: torch.device
) -> PagedAttention | None:
    """Return attention by the GPU kernels; None if they do not support the cache's shape."""
    from services.worker.engine.model.attention.gpu import GpuPagedAttention, fits

    if not fits(geometry.head_dim, config.dtype):
        return None
    return GpuPagedAttention(
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        block_size=config.block_size,
        dtype=config.dtype,
        device=device,
    )


def _gpu_layers(
    skeleton: Skeleton, stage_memory: StageMemory, attention: PagedAttention
) -> LayerRunner | None:
    """Return a runner of all layers by the GPU kernels; None if they do not support the model."""
    from services.worker.engine.model.attention.gpu import GpuPagedAttention
    from services.worker.engine.model.gpu_graphs import CudaGraphCapture
    from services.worker.engine.model.gpu_layers import gpu_layers

    if not isinstance(attention, GpuPagedAttention):
        return None
    views = [
        stage_memory.slabs[layer_name(index)].views() for index in range(stage_memory.num_layers)
    ]
    layers = gpu_layers(views, stage_memory.kv_ranges, skeleton.config, attention)
    log.info("layers: %s", "by torch's operations" if layers is None else "by kernels for GPUs")
    if layers is not None:
        # Triton takes about a second to compile a kernel: do it before the first request.
        layers.warm_up()
        layers.use_graphs(CudaGraphCapture())
    return layers
