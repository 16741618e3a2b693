"""Loads a model: divides the memory budget, fills the stage's memory, builds the decoder."""

import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from services.core.groups.slab_names import layer_name
from services.worker.engine.compute.runner_config import LOGIT_ROWS, RunnerConfig, compute_dtype
from services.worker.engine.memory.budget import MemoryDemand, MemoryPlan, plan_memory
from services.worker.engine.memory.kv_range import KvBlockShape
from services.worker.engine.memory.layer_slab import SlabLayout, WeightSource
from services.worker.engine.memory.memfd import MemfdArena
from services.worker.engine.memory.stage_memory import StageMemory
from services.worker.engine.model import cpu_kernels
from services.worker.engine.model.attention.cpu import SdpaPagedAttention, mask_bytes
from services.worker.engine.model.attention.paged import GROUP_TOKENS, PagedAttention
from services.worker.engine.model.catalog import ModelGeometry, geometry_of
from services.worker.engine.model.config import load_config
from services.worker.engine.model.decoder import Decoder, slab_layouts
from services.worker.engine.model.linear import UpcastScratch
from services.worker.engine.model.loader import DummySource, SafetensorsSource, verify_manifest
from services.worker.engine.model.modules import Skeleton
from services.worker.errors import UnsupportedDevice

ARENAS: dict[str, type[MemfdArena]] = {"cpu": MemfdArena}
SCRATCH_BYTES = 8 << 20
"""The buffer for upcast weights. Measured: a smaller one costs calls, a larger one cache misses."""

SAMPLER_ROWS = 5
"""Rows of logits that would take as much memory as the sampler: scratch, and a copy of a row."""

log = logging.getLogger(__name__)


class LoadedModel(NamedTuple):
    """The parts of a model in memory; its arena belongs to `stage_memory`."""

    geometry: ModelGeometry
    stage_memory: StageMemory
    decoder: Decoder


def load_model(config: RunnerConfig) -> LoadedModel:
    """Read the model into a new arena. Raises ModelError, BudgetTooSmall, UnsupportedDevice."""
    device = torch.device(config.device)
    if device.type not in ARENAS:
        raise UnsupportedDevice(
            f"device {config.device} has no memory backend; choose one of {sorted(ARENAS)}"
        )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model_config = load_config(config.model_dir)
    geometry = _limited(geometry_of(model_config, config.dtype), config.max_model_len)
    skeleton = Skeleton(model_config)
    compute = compute_dtype(device, config.dtype)
    compiled = cpu_kernels.fit(device, config.dtype, compute)
    panels = compiled and cpu_kernels.has_panel_product(config.dtype)
    layouts = slab_layouts(skeleton, config.dtype, panels=panels)
    # Weights of a shape that does not fit are row-major all the same.
    panels = bool(layouts[layer_name(0)].tag)
    log.info("products: %s", products_text(config.dtype, compute, compiled=compiled, panels=panels))
    block_shape = KvBlockShape(
        config.block_size, geometry.num_kv_heads, geometry.head_dim, config.dtype
    )
    plan = _plan(config, geometry, layouts, block_shape)
    arena = ARENAS[device.type](chunk_bytes=plan.chunk_bytes, total_chunks=plan.total_chunks)
    with ExitStack() as stack:
        stack.callback(arena.close)
        stage_memory = StageMemory(
            arena,
            plan,
            layouts,
            block_shape,
            num_layers=geometry.num_layers,
            tied_embeddings=geometry.tied_embeddings,
            open_source=partial(_open_source, config),
        )
        if config.load_format != "dummy":
            verify_manifest(config.model_dir)
        stage_memory.load()
        decoder = _build_decoder(config, skeleton, geometry, stage_memory)
        stack.pop_all()
    return LoadedModel(geometry, stage_memory, decoder)


def products_text(
    storage: torch.dtype, compute: torch.dtype, *, compiled: bool, panels: bool
) -> str:
    """The products of a model's layers, for the log of an engine.

    `compiled`: the kernels compute them; `panels`: with weights in panels.
    """
    if panels:
        return cpu_kernels.describe_panel_product(storage)
    stored, computed = (str(dtype).removeprefix("torch.") for dtype in (storage, compute))
    kernels = "" if compiled else f", by torch alone (threads: {torch.get_num_threads()})"
    return f"row-major weights in {stored}, {computed} products{kernels}"


def staging_bytes(config: RunnerConfig, geometry: ModelGeometry) -> int:
    """The most memory outside the arena: scratch, gathered K/V, activations, logits.

    Also the hidden states of a suspended batch, if there can be one.
    """
    compute = compute_dtype(torch.device(config.device), config.dtype)
    upcasts = compute != config.dtype
    context = max(geometry.max_model_len, GROUP_TOKENS) + config.block_size
    kv_values = 2 * geometry.num_kv_heads * geometry.head_dim
    gathered = context * kv_values * config.dtype.itemsize
    if upcasts:
        gathered += context * kv_values * compute.itemsize
    # The widest moment of a layer: residual and norm, then gate, its activation, up, product; or
    # query, key, value, their rotations and the attention output.
    heads = geometry.num_heads * geometry.head_dim
    widest = 3 * geometry.hidden_size + max(4 * geometry.intermediate_size, 6 * heads)
    activations = config.max_batch_tokens * widest * compute.itemsize
    if cpu_kernels.fit(torch.device(config.device), config.dtype, compute):
        # Fused layers: hidden states five times, heads and the MLP's width three times.
        fused = 5 * geometry.hidden_size + 3 * (heads + kv_values + geometry.intermediate_size)
        few = min(cpu_kernels.ROWS_MAX, config.max_batch_tokens)
        activations = max(activations, few * fused * compute.itemsize)
    if config.suspends:
        activations += config.max_batch_tokens * geometry.hidden_size * compute.itemsize
    logits = geometry.vocab_size * (LOGIT_ROWS + SAMPLER_ROWS) * compute.itemsize
    masks = len(frozenset(geometry.sliding_windows)) * mask_bytes(context, compute.itemsize)
    return (SCRATCH_BYTES if upcasts else 0) + gathered + masks + activations + logits


def _limited(geometry: ModelGeometry, max_model_len: int | None) -> ModelGeometry:
    """`geometry` with `max_model_len`, if that is smaller."""
    if max_model_len is None or max_model_len >= geometry.max_model_len:
        return geometry
    return replace(geometry, max_model_len=max_model_len)


def _plan(
    config: RunnerConfig,
    geometry: ModelGeometry,
    layouts: dict[str, SlabLayout],
    block_shape: KvBlockShape,
) -> MemoryPlan:
    """Divide the budget. Raises BudgetTooSmall."""
    demand = MemoryDemand(
        slab_bytes=tuple(layout.size_bytes for layout in layouts.values()),
        num_layers=geometry.num_layers,
        kv_block_bytes=block_shape.size_bytes,
        block_size=config.block_size,
        staging_bytes=staging_bytes(config, geometry),
    )
    return plan_memory(
        config.budget_bytes, demand, min_tokens=config.min_tokens, chunk_bytes=config.chunk_bytes
    )


def _open_source(config: RunnerConfig) -> WeightSource:
    """The source of the parameters. Raises ModelError."""
    if config.load_format == "dummy":
        return DummySource(seed=config.dummy_seed, std=config.dummy_std)
    return SafetensorsSource(config.model_dir)


def _build_decoder(
    config: RunnerConfig,
    skeleton: Skeleton,
    geometry: ModelGeometry,
    stage_memory: StageMemory,
) -> Decoder:
    device = torch.device(config.device)
    compute = compute_dtype(device, config.dtype)
    compiled = cpu_kernels.fit(device, config.dtype, compute)
    attention: PagedAttention | None = None
    if compiled:
        attention = _compiled_attention(config, geometry)
    attention = attention or SdpaPagedAttention(
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        block_size=config.block_size,
        max_context=geometry.max_model_len,
        storage_dtype=config.dtype,
        compute_dtype=compute,
        device=device,
        compiled=compiled,
    )
    return Decoder(
        skeleton,
        stage_memory.slabs,
        stage_memory.kv_ranges,
        attention,
        sliding_windows=geometry.sliding_windows,
        compute_dtype=compute,
        scratch=UpcastScratch(SCRATCH_BYTES, compute, device) if compute != config.dtype else None,
        compiled=compiled,
    )


def _compiled_attention(config: RunnerConfig, geometry: ModelGeometry) -> PagedAttention | None:
    """Attention without gathering, None if the processor or the cache is not made for it."""
    from services.worker.engine.model.attention.compiled import CompiledPagedAttention
    from services.worker.engine.model.cpu_kernels.paged_attention import fits

    if not fits(config.block_size, geometry.head_dim, config.dtype):
        return None
    return CompiledPagedAttention(geometry.head_dim, config.dtype)
