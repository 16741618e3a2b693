"""The model and its memory on one device: turns batches into tokens.

A worker runs a *stage*, a contiguous range of layers: all layers as a single, fewer in a pipeline.
The first stage embeds; the last stage applies the final norm and the head, and samples.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from services.core.logprobs import LogprobRows, joined
from services.core.planner.batch import Batch, Chunk, PromptRows, SampleNotes, SampleSpec
from services.worker.engine.compute.assembly import LoadedModel, load_model
from services.worker.engine.compute.runner_config import (
    RunnerConfig,
    compute_dtype,
    logit_rows,
    logits_dtype,
)
from services.worker.engine.model import cpu_kernels
from services.worker.engine.model.attention.paged import AttentionMetadata, MetadataBuilder
from services.worker.engine.model.interrupt import Interrupted
from services.worker.engine.sampling.grammar import Grammars
from services.worker.engine.sampling.sampler import Sampled, Sampler
from services.worker.errors import InvalidBatch


def order_of_sums(
    device: torch.device, storage_dtype: torch.dtype, compute_dtype: torch.dtype
) -> bytes:
    """What changes the last bits of sums among processors.

    Kernels and torch add up as many values at once as a vector of a CPU has; for bfloat16 there no
    tokens are promised, so such workers may differ. A GPU forms no group with a CPU, with
    another kind of GPU, or with one under another version of torch, in any dtype.
    """
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}".encode()
    if storage_dtype == torch.bfloat16:
        return b""
    if not cpu_kernels.fit(device, storage_dtype, compute_dtype):
        return f"torch, {torch.backends.cpu.get_cpu_capability()}".encode()
    from services.worker.engine.model.cpu_kernels.compiler import VECTOR_FLOATS

    return f"vectors of {VECTOR_FLOATS}".encode()


@dataclass(frozen=True, slots=True)
class StageOutput:
    """The result of a stage for a batch: `hidden` for the next stage, or `sampled` at the last.

    `hidden` is [tokens, hidden_size] in the compute dtype. `sampled` has the token of each request
    whose chunk samples, unless it failed. `notes` has log probabilities and failures; None without.
    """

    hidden: torch.Tensor | None = None
    sampled: dict[str, int] | None = None
    notes: SampleNotes | None = None


@dataclass(frozen=True, slots=True)
class Suspended:
    """A batch that was interrupted before `layer`, whose input is `hidden` [tokens, hidden_size].

    K and V of the layers before it are in the blocks.
    """

    batch: Batch
    hidden: torch.Tensor
    layer: int


class ModelRunner:
    """Owns the stage's memory and runs its layers; build it with `load`."""

    def __init__(self, config: RunnerConfig, loaded: LoadedModel) -> None:
        geometry = loaded.geometry
        self.geometry = geometry
        self.block_size = config.block_size
        self.budget_bytes = config.budget_bytes
        self.stage_memory = loaded.stage_memory
        self.decoder = loaded.decoder
        self.suspended: Suspended | None = None
        self.grammars = Grammars(config.model_dir, geometry.vocab_size)
        self._max_batch_tokens = config.max_batch_tokens
        self._device = torch.device(config.device)
        self._compute_dtype = compute_dtype(self._device, config.dtype)
        self._logit_rows = logit_rows(self._device)
        self._description = _description(config.model_dir) + order_of_sums(
            self._device, config.dtype, self._compute_dtype
        )
        self.sampler = Sampler(
            geometry.vocab_size, self.grammars, logits_dtype(self._compute_dtype)
        )
        self._metadata = MetadataBuilder(
            block_size=config.block_size,
            device=self._device,
            compute_dtype=self._compute_dtype,
        )

    @classmethod
    def load(cls, config: RunnerConfig) -> "ModelRunner":
        """Read the model into a new arena. Raises ModelError, BudgetTooSmall, DeviceError."""
        return cls(config, load_model(config))

    @property
    def model_digest(self) -> str:
        """SHA-256 of configuration, tokenizer, parameters, and what changes the order of sums.

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
        """Bytes of K and V of one token in all layers."""
        return self.geometry.num_layers * self.geometry.kv_bytes_per_token_layer

    @property
    def hidden_bytes_per_token(self) -> int:
        """Bytes that one stage sends to the next for each token."""
        return self.geometry.hidden_size * self._compute_dtype.itemsize

    def run(
        self, batch: Batch, interrupted: Callable[[], bool] | None = None
    ) -> dict[str, int] | None:
        """Run an iteration of a stage with all layers; returns the sampled tokens."""
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
        *,
        suspends: bool = False,
    ) -> StageOutput | None:
        """Run the stage's layers over a batch; stores K and V of all its tokens in their blocks.

        `hidden` is the result of the previous stage, None for the first stage. Block ids are those
        of this worker. `interrupted` is called before each layer; once it returns True the result
        is None, and the K and V of the batch are undefined, so the batch must run again. If it
        `suspends`, `resume_stage` can also go on with it, instead of with an earlier one. Raises
        InvalidBatch, LayerNotResident.
        """
        if not 0 < batch.tokens <= self._max_batch_tokens:
            raise InvalidBatch(
                f"a batch of {batch.tokens} tokens was planned; "
                f"plan 1 to {self._max_batch_tokens} (max_batch_tokens)"
            )
        self._check_hidden(batch, hidden)
        if hidden is None:
            token_ids = list(chain.from_iterable(chunk.token_ids for chunk in batch.chunks))
            hidden = self.decoder.embed(self._tensor(token_ids))
        if suspends:
            self.suspended = None  # staging memory has room for one
        start = self.stage_memory.layers.start
        return self._run_layers(batch, hidden, start, interrupted, suspends=suspends)

    @torch.inference_mode()
    def resume_stage(
        self, batch: Batch, interrupted: Callable[[], bool] | None = None
    ) -> StageOutput | None:
        """Go on with `batch`, which is suspended; as `run_stage`, and it may be suspended again."""
        found, self.suspended = self.suspended, None
        if found is None or found.batch != batch:
            raise InvalidBatch("a batch was resumed that is not suspended here")
        return self._run_layers(batch, found.hidden, found.layer, interrupted, suspends=True)

    def _run_layers(
        self,
        batch: Batch,
        hidden: torch.Tensor,
        first_layer: int,
        interrupted: Callable[[], bool] | None,
        *,
        suspends: bool,
    ) -> StageOutput | None:
        """Run the stage's layers from `first_layer` on; `hidden` is its input."""
        layers = self.stage_memory.layers
        if layers.stop == self.geometry.num_layers:
            # Compiles grammars while the layers run; the leader has compiled its own already.
            self.sampler.expect([chunk.sample for chunk in batch.chunks])
        metadata = self.metadata(batch)
        positions = list(
            chain.from_iterable(
                range(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in batch.chunks
            )
        )
        left = range(first_layer, layers.stop)
        try:
            hidden = self.decoder.run_layers(
                hidden, self._tensor(positions), metadata, left, interrupted
            )
        except Interrupted as end:
            if suspends:
                self.suspended = Suspended(batch, end.hidden, end.layer)
            return None
        if layers.stop < self.geometry.num_layers:
            return StageOutput(hidden=hidden)
        return self._sample(batch, hidden)

    def hidden_from_bytes(self, payload: npt.NDArray[np.uint8], tokens: int) -> torch.Tensor:
        """Hidden states [tokens, hidden_size] from the bytes of another stage, without a copy.

        Raises InvalidBatch on another size.
        """
        shape = (tokens, self.geometry.hidden_size)
        if payload.size != tokens * self.hidden_bytes_per_token:
            raise InvalidBatch(f"{payload.size} bytes are no hidden states of shape {shape}")
        hidden = torch.from_numpy(payload).view(self._compute_dtype).view(shape)
        return hidden.to(self._device)

    def metadata(self, batch: Batch) -> AttentionMetadata:
        """The metadata of `batch` for all layers. Raises InvalidBatch."""
        return self._metadata.build(batch, self.num_blocks)

    def close(self) -> None:
        """Free the memory; the runner cannot be used afterwards."""
        self.stage_memory.arena.close()

    def check_invariants(self) -> None:
        """Check those of the stage memory, and that all memory is within the budget."""
        self.stage_memory.check_invariants()
        assert self.stage_memory.plan.arena_bytes + self.staging_bytes <= self.budget_bytes

    def _check_hidden(self, batch: Batch, hidden: torch.Tensor | None) -> None:
        """Raise InvalidBatch unless `hidden` fits this stage."""
        first = self.stage_memory.layers.start == 0
        expected = None if first else (batch.tokens, self.geometry.hidden_size)
        given = None if hidden is None else tuple(hidden.shape)
        if given != expected or (hidden is not None and hidden.dtype != self._compute_dtype):
            raise InvalidBatch(
                f"a stage that begins at layer {self.stage_memory.layers.start} takes hidden "
                f"states of shape {expected} in {self._compute_dtype}, got {given}"
            )

    def _sample(self, batch: Batch, hidden: torch.Tensor) -> StageOutput:
        """Sample in slices, which bounds the memory for logits."""
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
        for first in range(0, len(wanted), self._logit_rows):
            part = slice(first, first + self._logit_rows)
            rows = self._tensor(last_rows[part])
            self.sampler.sample(self.decoder.logits(hidden[rows]), wanted[part], made)
        notes = SampleNotes(made.logprobs, prompt_logprobs, made.failed)
        return StageOutput(sampled=made.tokens, notes=notes or None)

    def _score(self, chunk: Chunk, hidden: torch.Tensor) -> PromptRows:
        """Log probabilities of the prompt tokens that a chunk scores; its rows come first."""
        score = chunk.score
        assert score is not None
        parts = [LogprobRows(score.top)]
        for first in range(0, len(score.token_ids), self._logit_rows):
            token_ids = score.token_ids[first : first + self._logit_rows]
            row = score.row + first
            logits = self.decoder.logits(hidden[row : row + len(token_ids)])
            parts.append(self.sampler.score(logits, token_ids, score.top))
        return PromptRows(chunk.start + score.row + 1, joined(parts))

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _description(model_dir: Path) -> bytes:
    """Digest of configuration and tokenizer; a model may have no tokenizer."""
    digest = hashlib.sha256((model_dir / "config.json").read_bytes())
    tokenizer = model_dir / "tokenizer.json"
    if tokenizer.is_file():
        digest.update(tokenizer.read_bytes())
    return digest.digest()
