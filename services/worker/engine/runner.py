"""The model and its memory on one device: turns batches into tokens."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from transformers import PretrainedConfig

from services.core.iteration.batch import Batch, SampleSpec
from services.worker.engine.sampler import sample
from services.worker.errors import InvalidBatch, UnsupportedDevice
from services.worker.memory.arena import Arena
from services.worker.memory.budget import MemoryDemand, MemoryPlan, plan_memory
from services.worker.memory.kv_range import KvBlockShape, KvRange
from services.worker.memory.layer_slab import LayerSlab, SlabLayout
from services.worker.memory.memfd import MemfdArena
from services.worker.model.attention.cpu import SdpaPagedAttention, mask_bytes
from services.worker.model.attention.paged import GROUP_TOKENS, AttentionMetadata, MetadataBuilder
from services.worker.model.catalog import (
    ModelGeometry,
    build_skeleton,
    geometry_of,
    load_config,
)
from services.worker.model.decoder import (
    ATTENTION_NAME,
    Decoder,
    Interrupted,
    layer_name,
    slab_layouts,
)
from services.worker.model.linear import UpcastScratch
from services.worker.model.loader import (
    DummySource,
    SafetensorsSource,
    WeightSource,
    verify_manifest,
)

ARENAS: dict[str, type[MemfdArena]] = {"cpu": MemfdArena}
SCRATCH_BYTES = 8 << 20
"""Upcast weights; measured: smaller costs calls, larger leaves the cache."""
LOGIT_ROWS = 64
"""Rows of logits that exist at once."""


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """What to load, where, and how much memory it may take.

    `budget_bytes` covers parameters, KV cache and staging. `chunk_bytes` None chooses.
    `max_batch_tokens` bounds the new tokens of a batch, `min_tokens` the least KV cache that is
    worth starting with; `dummy_seed` and `dummy_std` shape the weights of load format `dummy`.
    """

    model_dir: Path
    device: str
    dtype: torch.dtype
    budget_bytes: int
    block_size: int = 16
    chunk_bytes: int | None = None
    load_format: str = "auto"
    max_batch_tokens: int = 2048
    max_running: int = 128
    max_model_len: int | None = None
    min_tokens: int = 64
    threads: int | None = None
    dummy_seed: int = 0
    dummy_std: float = 0.02


class ModelRunner:
    """Owns the arena and everything in it; build it with `load`."""

    def __init__(
        self,
        config: RunnerConfig,
        geometry: ModelGeometry,
        plan: MemoryPlan,
        arena: Arena,
        slabs: dict[str, LayerSlab],
        kv_ranges: list[KvRange],
        decoder: Decoder,
    ) -> None:
        self.geometry = geometry
        self.block_size = config.block_size
        self.memory = plan
        self.arena = arena
        self.slabs = slabs
        self.kv_ranges = kv_ranges
        self.decoder = decoder
        self._max_batch_tokens = config.max_batch_tokens
        self._device = torch.device(config.device)
        self._metadata = MetadataBuilder(
            block_size=config.block_size,
            sliding_windows=frozenset(geometry.sliding_windows),
            device=self._device,
            compute_dtype=compute_dtype(self._device, config.dtype),
        )

    @classmethod
    def load(cls, config: RunnerConfig) -> "ModelRunner":
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
        layouts = slab_layouts(build_skeleton(model_config, ATTENTION_NAME), config.dtype)
        block_shape = KvBlockShape(
            config.block_size, geometry.num_kv_heads, geometry.head_dim, config.dtype
        )
        plan = _plan(config, geometry, layouts, block_shape)
        arena = ARENAS[device.type](chunk_bytes=plan.chunk_bytes, total_chunks=plan.total_chunks)
        with ExitStack() as stack:
            stack.callback(arena.close)
            slabs = {name: LayerSlab(arena, name, layout) for name, layout in layouts.items()}
            _fill(slabs, config)
            kv_ranges = [
                KvRange(arena, f"kv of {layer_name(index)}", block_shape)
                for index in range(geometry.num_layers)
            ]
            for kv_range in kv_ranges:
                kv_range.map_tail(arena.free_handles(plan.kv_chunks_per_layer))
            decoder = _build_decoder(config, model_config, geometry, slabs, kv_ranges)
            stack.pop_all()
        return cls(config, geometry, plan, arena, slabs, kv_ranges, decoder)

    @property
    def num_blocks(self) -> int:
        """Blocks that every layer has: ids 0 .. num_blocks - 1."""
        return min(kv_range.num_blocks for kv_range in self.kv_ranges)

    @property
    def parameter_bytes(self) -> int:
        """Device memory behind parameters."""
        return self.memory.parameter_chunks * self.memory.chunk_bytes

    @property
    def slab_bytes(self) -> dict[str, int]:
        """Device memory behind each parameter slab while it is resident."""
        chunk_bytes = self.memory.chunk_bytes
        return {name: slab.chunks * chunk_bytes for name, slab in self.slabs.items()}

    @property
    def staging_bytes(self) -> int:
        """Memory for scratch, activations and logits."""
        return self.memory.staging_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return self.geometry.num_layers * self.geometry.kv_bytes_per_token_layer

    @torch.inference_mode()
    def run(
        self, batch: Batch, interrupted: Callable[[], bool] | None = None
    ) -> dict[str, int] | None:
        """Run one iteration; returns the sampled token of each request whose chunk samples.

        Raises InvalidBatch, LayerNotResident. K and V of all its tokens are in the blocks after.
        `interrupted` is asked before each layer; once it says yes the result is None, and K and V
        of the batch's tokens are undefined: they have to run again.
        """
        if not 0 < batch.tokens <= self._max_batch_tokens:
            raise InvalidBatch(
                f"a batch of {batch.tokens} tokens was planned; "
                f"plan 1 to {self._max_batch_tokens} (max_batch_tokens)"
            )
        metadata = self.metadata(batch)
        token_ids = list(chain.from_iterable(chunk.token_ids for chunk in batch.chunks))
        positions = list(
            chain.from_iterable(
                range(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in batch.chunks
            )
        )
        try:
            hidden = self.decoder.forward(
                self._tensor(token_ids), self._tensor(positions), metadata, interrupted
            )
        except Interrupted:
            return None
        return self._sample(batch, hidden)

    def metadata(self, batch: Batch) -> AttentionMetadata:
        """What all layers need to know of `batch`. Raises InvalidBatch."""
        return self._metadata.build(batch, self.num_blocks)

    def close(self) -> None:
        """Give the memory back; nothing may be used afterwards."""
        self.arena.close()

    def check_invariants(self) -> None:
        """The arena's, and that parameters and KV account for what is mapped."""
        self.arena.check_invariants()
        assert all(slab.resident for slab in self.slabs.values()), "a slab is not resident"
        slab_chunks = sum(slab.chunks for slab in self.slabs.values())
        kv_chunks = sum(kv_range.mapped_chunks for kv_range in self.kv_ranges)
        mapped = self.arena.total_chunks - self.arena.free_chunks
        assert slab_chunks + kv_chunks == mapped, "memory is mapped that no one accounts for"

    def _sample(self, batch: Batch, hidden: torch.Tensor) -> dict[str, int]:
        """Sample in slices of `LOGIT_ROWS`, so that few logits exist at once."""
        wanted: list[tuple[str, int, SampleSpec]] = []
        row = -1
        for chunk in batch.chunks:
            row += len(chunk.token_ids)
            if chunk.sample is not None:
                wanted.append((chunk.request_id, row, chunk.sample))
        sampled: dict[str, int] = {}
        for first in range(0, len(wanted), LOGIT_ROWS):
            part = wanted[first : first + LOGIT_ROWS]
            rows = self._tensor([row for _, row, _ in part])
            tokens = sample(self.decoder.logits(hidden[rows]), [spec for _, _, spec in part])
            sampled.update(zip((request_id for request_id, _, _ in part), tokens, strict=True))
        return sampled

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def compute_dtype(device: torch.device, storage_dtype: torch.dtype) -> torch.dtype:
    """A CPU computes 16-bit weights in float32 (see `model/linear.py`); else both are the same."""
    if device.type == "cpu" and storage_dtype.itemsize < torch.float32.itemsize:
        return torch.float32
    return storage_dtype


def staging_bytes(config: RunnerConfig, geometry: ModelGeometry) -> int:
    """Memory beside the arena at its peak: scratch, gathered K/V, activations, logits."""
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
    # Logits, and the sampler's copies of one row.
    logits = geometry.vocab_size * (LOGIT_ROWS + 4) * compute.itemsize
    masks = len(frozenset(geometry.sliding_windows)) * mask_bytes(context, compute.itemsize)
    return (SCRATCH_BYTES if upcasts else 0) + gathered + masks + activations + logits


def _limited(geometry: ModelGeometry, max_model_len: int | None) -> ModelGeometry:
    """`geometry` with a smaller `max_model_len`, if one is asked for."""
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


def _fill(slabs: dict[str, LayerSlab], config: RunnerConfig) -> None:
    """Map all slabs and write their parameters. Raises ModelError."""
    source: WeightSource
    if config.load_format == "dummy":
        source = DummySource(seed=config.dummy_seed, std=config.dummy_std)
    else:
        verify_manifest(config.model_dir)
        source = SafetensorsSource(config.model_dir)
    try:
        for slab in slabs.values():
            slab.map()
            for name, view in slab.views().items():
                source.fill(name, view)
    finally:
        source.close()


def _build_decoder(
    config: RunnerConfig,
    model_config: PretrainedConfig,
    geometry: ModelGeometry,
    slabs: dict[str, LayerSlab],
    kv_ranges: list[KvRange],
) -> Decoder:
    device = torch.device(config.device)
    compute = compute_dtype(device, config.dtype)
    attention = SdpaPagedAttention(
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        block_size=config.block_size,
        max_context=geometry.max_model_len,
        storage_dtype=config.dtype,
        compute_dtype=compute,
        device=device,
    )
    return Decoder(
        model_config,
        slabs,
        kv_ranges,
        attention,
        compute_dtype=compute,
        scratch=UpcastScratch(SCRATCH_BYTES, compute, device) if compute != config.dtype else None,
    )
