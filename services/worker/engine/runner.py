"""The model and its memory on one device: turns batches into tokens.

A worker runs a *stage*, a contiguous range of layers: all of them by itself, fewer in a pipeline.
The first stage embeds, the last one applies the final norm and the head and samples.
"""

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from services.core.logprobs import LogprobRows, joined
from services.core.planner.batch import Batch, Chunk, PromptRows, SampleNotes, SampleSpec
from services.worker.engine.memory.budget import MemoryDemand, MemoryPlan, plan_memory
from services.worker.engine.memory.kv_range import KvBlockShape
from services.worker.engine.memory.layer_slab import SlabLayout
from services.worker.engine.memory.memfd import MemfdArena
from services.worker.engine.memory.stage_memory import StageMemory
from services.worker.engine.model import cpu_kernels
from services.worker.engine.model.attention.cpu import SdpaPagedAttention, mask_bytes
from services.worker.engine.model.attention.paged import (
    GROUP_TOKENS,
    AttentionMetadata,
    MetadataBuilder,
)
from services.worker.engine.model.catalog import (
    ModelGeometry,
    build_skeleton,
    geometry_of,
    load_config,
)
from services.worker.engine.model.decoder import (
    ATTENTION_NAME,
    Decoder,
    Interrupted,
    slab_layouts,
)
from services.worker.engine.model.linear import UpcastScratch
from services.worker.engine.model.loader import (
    DummySource,
    SafetensorsSource,
    WeightSource,
    verify_manifest,
)
from services.worker.engine.sampling.grammar import Grammars
from services.worker.engine.sampling.logprobs import logprob_rows
from services.worker.engine.sampling.sampler import Sampled, Sampler
from services.worker.errors import InvalidBatch, UnsupportedDevice

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


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What a stage made of a batch: `hidden` for the next one, or, at the last, `sampled`.

    `hidden` is [tokens, hidden_size] in the compute dtype; `sampled` the token of each request
    whose chunk samples, unless it failed; `notes` what else there is, None for nothing.
    """

    hidden: torch.Tensor | None = None
    sampled: dict[str, int] | None = None
    notes: SampleNotes | None = None


class ModelRunner:
    """Owns the stage's memory and runs its layers; build it with `load`."""

    def __init__(
        self,
        config: RunnerConfig,
        geometry: ModelGeometry,
        stage_memory: StageMemory,
        decoder: Decoder,
    ) -> None:
        self.geometry = geometry
        self.block_size = config.block_size
        self.budget_bytes = config.budget_bytes
        self.stage_memory = stage_memory
        self.decoder = decoder
        self.grammars = Grammars(config.model_dir, geometry.vocab_size)
        self.sampler = Sampler(geometry.vocab_size, self.grammars)
        self._description = _description(config.model_dir)
        self._max_batch_tokens = config.max_batch_tokens
        self._device = torch.device(config.device)
        self._compute_dtype = compute_dtype(self._device, config.dtype)
        self._metadata = MetadataBuilder(
            block_size=config.block_size,
            sliding_windows=frozenset(geometry.sliding_windows),
            device=self._device,
            compute_dtype=self._compute_dtype,
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
        skeleton = build_skeleton(model_config, ATTENTION_NAME)
        layouts = slab_layouts(skeleton, config.dtype)
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
        return cls(config, geometry, stage_memory, decoder)

    @property
    def model_digest(self) -> str:
        """SHA-256 of configuration, tokenizer and parameters.

        Workers with different digests compute different tokens, or read grammars differently.
        """
        return hashlib.sha256(self._description + self.stage_memory.parameters_digest).hexdigest()

    @property
    def num_blocks(self) -> int:
        """Blocks that every layer of the stage has: ids 0 .. num_blocks - 1."""
        return self.stage_memory.num_blocks

    @property
    def parameter_bytes(self) -> int:
        """Device memory behind parameters."""
        return self.stage_memory.parameter_bytes

    @property
    def slab_bytes(self) -> dict[str, int]:
        """Device memory behind each parameter slab while it is resident."""
        chunk_bytes = self.stage_memory.plan.chunk_bytes
        return {name: slab.chunks * chunk_bytes for name, slab in self.stage_memory.slabs.items()}

    @property
    def staging_bytes(self) -> int:
        """Memory for scratch, activations and logits."""
        return self.stage_memory.plan.staging_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return self.geometry.num_layers * self.geometry.kv_bytes_per_token_layer

    @property
    def hidden_bytes_per_token(self) -> int:
        """What a token takes from one stage to the next."""
        return self.geometry.hidden_size * self._compute_dtype.itemsize

    def run(
        self, batch: Batch, interrupted: Callable[[], bool] | None = None
    ) -> dict[str, int] | None:
        """One iteration of a stage that has all layers: `run_stage`, and what it sampled."""
        if len(self.stage_memory.layers) < self.geometry.num_layers:
            raise InvalidBatch("this worker runs a part of the layers; run its stage (run_stage)")
        output = self.run_stage(batch, interrupted=interrupted)
        return None if output is None else output.sampled

    @torch.inference_mode()
    def run_stage(
        self,
        batch: Batch,
        hidden: torch.Tensor | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> StageOutput | None:
        """Run the stage's layers over a batch, `hidden` being what the stage before it returned.

        Block ids are this worker's own. K and V of all tokens are in the blocks after. The first
        stage takes no `hidden`. Raises InvalidBatch, LayerNotResident.
        `interrupted` is asked before each layer; once it says yes the result is None, and K and V
        of the batch's tokens are undefined: they have to run again.
        """
        if not 0 < batch.tokens <= self._max_batch_tokens:
            raise InvalidBatch(
                f"a batch of {batch.tokens} tokens was planned; "
                f"plan 1 to {self._max_batch_tokens} (max_batch_tokens)"
            )
        layers = self.stage_memory.layers
        self._check_hidden(batch, hidden)
        if layers.stop == self.geometry.num_layers:
            # While the layers run. The leader has compiled them for its own stage already.
            self.sampler.expect([chunk.sample for chunk in batch.chunks])
        metadata = self.metadata(batch)
        positions = list(
            chain.from_iterable(
                range(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in batch.chunks
            )
        )
        if hidden is None:
            token_ids = list(chain.from_iterable(chunk.token_ids for chunk in batch.chunks))
            hidden = self.decoder.embed(self._tensor(token_ids))
        try:
            hidden = self.decoder.run_layers(
                hidden, self._tensor(positions), metadata, layers, interrupted
            )
        except Interrupted:
            return None
        if layers.stop < self.geometry.num_layers:
            return StageOutput(hidden=hidden)
        return self._sample(batch, hidden)

    def hidden_from_bytes(self, payload: npt.NDArray[np.uint8], tokens: int) -> torch.Tensor:
        """Hidden states [tokens, hidden_size] of another stage from their bytes, no copy.

        Raises InvalidBatch if the size is another.
        """
        shape = (tokens, self.geometry.hidden_size)
        if payload.size != tokens * self.hidden_bytes_per_token:
            raise InvalidBatch(f"{payload.size} bytes are no hidden states of shape {shape}")
        hidden = torch.from_numpy(payload).view(self._compute_dtype).view(shape)
        return hidden.to(self._device)

    def metadata(self, batch: Batch) -> AttentionMetadata:
        """What all layers need to know of `batch`. Raises InvalidBatch."""
        return self._metadata.build(batch, self.num_blocks)

    def close(self) -> None:
        """Give the memory back; nothing may be used afterwards."""
        self.stage_memory.arena.close()

    def check_invariants(self) -> None:
        """The stage memory's, and that all memory is within the budget."""
        self.stage_memory.check_invariants()
        assert self.stage_memory.plan.arena_bytes + self.staging_bytes <= self.budget_bytes

    def _check_hidden(self, batch: Batch, hidden: torch.Tensor | None) -> None:
        """Raise InvalidBatch unless `hidden` is what this stage takes."""
        first = self.stage_memory.layers.start == 0
        expected = None if first else (batch.tokens, self.geometry.hidden_size)
        given = None if hidden is None else tuple(hidden.shape)
        if given != expected or (hidden is not None and hidden.dtype != self._compute_dtype):
            raise InvalidBatch(
                f"a stage that begins at layer {self.stage_memory.layers.start} takes hidden "
                f"states of shape {expected} in {self._compute_dtype}, got {given}"
            )

    def _sample(self, batch: Batch, hidden: torch.Tensor) -> StageOutput:
        """Sample in slices of `LOGIT_ROWS`, so that few logits exist at once."""
        wanted: list[tuple[str, SampleSpec]] = []
        last_rows: list[int] = []
        prompt_logprobs: dict[str, PromptRows] = {}
        row = -1
        for chunk in batch.chunks:
            if chunk.score is not None:
                first = row + 1
                prompt_logprobs[chunk.request_id] = self._score(chunk, hidden[first:])
            row += len(chunk.token_ids)
            if chunk.sample is not None:
                wanted.append((chunk.request_id, chunk.sample))
                last_rows.append(row)
        made = Sampled()
        for first in range(0, len(wanted), LOGIT_ROWS):
            part = slice(first, first + LOGIT_ROWS)
            rows = self._tensor(last_rows[part])
            self.sampler.sample(self.decoder.logits(hidden[rows]), wanted[part], made)
        notes = SampleNotes(made.logprobs, prompt_logprobs, made.failed)
        return StageOutput(sampled=made.tokens, notes=notes or None)

    def _score(self, chunk: Chunk, hidden: torch.Tensor) -> PromptRows:
        """How likely the prompt tokens were that a chunk asks about; its rows are the first."""
        score = chunk.score
        assert score is not None
        parts = [LogprobRows(score.top)]
        for first in range(0, len(score.token_ids), LOGIT_ROWS):
            token_ids = score.token_ids[first : first + LOGIT_ROWS]
            row = score.row + first
            logits = self.decoder.logits(hidden[row : row + len(token_ids)])
            parts.append(logprob_rows(logits, range(len(token_ids)), token_ids, score.top))
        return PromptRows(chunk.start + score.row + 1, joined(parts))

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _description(model_dir: Path) -> bytes:
    """Digest of the files beside the parameters; a model may come without a tokenizer."""
    digest = hashlib.sha256((model_dir / "config.json").read_bytes())
    tokenizer = model_dir / "tokenizer.json"
    if tokenizer.is_file():
        digest.update(tokenizer.read_bytes())
    return digest.digest()


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
    if cpu_kernels.fit(torch.device(config.device), config.dtype, compute):
        # Fused: hidden states five times, heads three times, so is the MLP's width.
        fused = 5 * geometry.hidden_size + 3 * (heads + kv_values + geometry.intermediate_size)
        few = min(cpu_kernels.ROWS_MAX, config.max_batch_tokens)
        activations = max(activations, few * fused * compute.itemsize)
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


def _open_source(config: RunnerConfig) -> WeightSource:
    """Where the parameters come from. Raises ModelError."""
    if config.load_format == "dummy":
        return DummySource(seed=config.dummy_seed, std=config.dummy_std)
    return SafetensorsSource(config.model_dir)


def _build_decoder(
    config: RunnerConfig,
    skeleton: nn.Module,
    geometry: ModelGeometry,
    stage_memory: StageMemory,
) -> Decoder:
    device = torch.device(config.device)
    compute = compute_dtype(device, config.dtype)
    compiled = cpu_kernels.fit(device, config.dtype, compute)
    attention = SdpaPagedAttention(
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
