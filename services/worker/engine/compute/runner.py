"""The model runner: runs batches through the layers of a stage on a single device.

A *stage* is a contiguous range of layers: all layers if the worker serves alone, fewer in a
pipeline. The first stage embeds; the last stage applies the final norm and the head, and samples.
A *chunk* is the part of a sequence in a batch. A *slab* is the memory with the parameters of a
layer, of the embeddings or of the head.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from itertools import accumulate, chain
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
from services.worker.engine.compute.stage_output import LaunchedStage, StageOutput, Suspended
from services.worker.engine.model import cpu_kernels
from services.worker.engine.model.attention.paged import AttentionMetadata, MetadataBuilder
from services.worker.engine.model.interrupt import Interrupted
from services.worker.engine.sampling.grammar import Grammars
from services.worker.engine.sampling.sampler import Sampled, Sampler
from services.worker.errors import InvalidBatch


def summation_order(
    device: torch.device, storage_dtype: torch.dtype, compute_dtype: torch.dtype
) -> bytes:
    """Return bytes that identify the order of floating-point sums, for the model digest.

    Kernels and torch sum as many values at once as a CPU vector holds, so results differ in the
    last bits between vector widths. bfloat16 on a CPU has no guarantee of identical tokens, so the
    order is left out. A GPU differs from CPUs, other GPU models and other torch versions.
    """
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}".encode()
    if storage_dtype == torch.bfloat16:
        return b""
    if not cpu_kernels.fit(device, storage_dtype, compute_dtype):
        return f"torch, {torch.backends.cpu.get_cpu_capability()}".encode()
    from services.worker.engine.model.cpu_kernels.compiler import VECTOR_FLOATS

    return f"vectors of {VECTOR_FLOATS}".encode()


class ModelRunner:
    """Owns the stage's memory and runs its layers. Create it with `load`."""

    def __init__(self, config: RunnerConfig, loaded: LoadedModel) -> None:
        geometry = loaded.geometry
        self.geometry = geometry
        self.block_size = config.block_size
        self.budget_bytes = config.budget_bytes
        self.stage_memory = loaded.stage_memory
        self.decoder = loaded.decoder
        # The batch to resume; the memory budget includes the hidden states of a single batch.
        self.suspended: Suspended | None = None
        self.grammars = Grammars(config.model_dir, geometry.vocab_size)
        self._max_batch_tokens = config.max_batch_tokens
        self.device = torch.device(config.device)
        self._on_gpu = self.device.type == "cuda"
        self._compute_dtype = compute_dtype(self.device, config.dtype)
        self._logit_rows = logit_rows(self.device)
        self._description = _description(config.model_dir) + summation_order(
            self.device, config.dtype, self._compute_dtype
        )
        self.sampler = Sampler(
            geometry.vocab_size,
            self.grammars,
            logits_dtype(self._compute_dtype),
            loaded.device_sampler,
        )
        self._metadata = MetadataBuilder(
            block_size=config.block_size,
            device=self.device,
            compute_dtype=self._compute_dtype,
        )

    @classmethod
    def load(cls, config: RunnerConfig) -> "ModelRunner":
        """Read the model into a new arena. Raises ModelError, BudgetTooSmall, DeviceError."""
        return cls(config, load_model(config))

    @property
    def model_digest(self) -> str:
        """SHA-256 of configuration, tokenizer, parameters and `summation_order`.

        Workers with different digests may compute different tokens or apply grammars differently.
        """
        return hashlib.sha256(self._description + self.stage_memory.parameters_digest).hexdigest()

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks in every layer of the stage: ids 0 .. num_blocks - 1."""
        return self.stage_memory.num_blocks

    @property
    def parameter_bytes(self) -> int:
        """Device memory mapped for parameters."""
        return self.stage_memory.parameter_bytes

    @property
    def slab_bytes(self) -> dict[str, int]:
        """Device memory of each parameter slab by name while it is resident."""
        chunk_bytes = self.stage_memory.plan.chunk_bytes
        return {name: slab.chunks * chunk_bytes for name, slab in self.stage_memory.slabs.items()}

    @property
    def staging_bytes(self) -> int:
        """Memory reserved for scratch, activations and logits."""
        return self.stage_memory.plan.staging_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V per token, over all layers of the model."""
        return self.geometry.num_layers * self.geometry.kv_bytes_per_token_layer

    @property
    def hidden_bytes_per_token(self) -> int:
        """Bytes of hidden state per token that a stage sends to the next stage."""
        return self.geometry.hidden_size * self._compute_dtype.itemsize

    def run(
        self, batch: Batch, interrupted: Callable[[], bool] | None = None
    ) -> dict[str, int] | None:
        """Run a batch through all layers; returns the tokens, None if interrupted."""
        if len(self.stage_memory.layers) < self.geometry.num_layers:
            raise InvalidBatch("this worker runs a part of the layers; run its stage (run_stage)")
        output = self.run_stage(batch, interrupted=interrupted)
        return None if output is None else output.sampled

    def run_stage(
        self,
        batch: Batch,
        hidden: torch.Tensor | None = None,
        interrupted: Callable[[], bool] | None = None,
        *,
        suspends: bool = False,
    ) -> StageOutput | None:
        """Launch the stage's layers over a batch (`launch_stage`), and return the result."""
        run = self.launch_stage(batch, hidden, interrupted, suspends=suspends)
        return None if run is None else run.collect()

    @torch.inference_mode()
    def launch_stage(
        self,
        batch: Batch,
        hidden: torch.Tensor | None = None,
        interrupted: Callable[[], bool] | None = None,
        *,
        suspends: bool = False,
    ) -> LaunchedStage | None:
        """Run the stage's layers over a batch; stores K and V of all its tokens in their blocks.

        `hidden` is the output of the previous stage, None for the first stage. Block ids refer to
        this worker's blocks, which must not change before `LaunchedStage.collect`. `interrupted` is
        called before each layer. If it returns True, the result is None, and the K and V of the
        batch are undefined until it is run again. With `suspends`, `resume_stage` may continue the
        batch instead; a batch that was suspended earlier is discarded. Raises InvalidBatch,
        LayerNotResident.
        """
        if not 0 < batch.tokens <= self._max_batch_tokens:
            raise InvalidBatch(
                f"a batch of {batch.tokens} tokens was planned; "
                f"plan 1 to {self._max_batch_tokens} (max_batch_tokens)"
            )
        self._check_hidden(batch, hidden)
        if suspends:
            # The memory budget covers the hidden states of a single suspended batch.
            self.suspended = None
        start = self.stage_memory.layers.start
        return self._launch(batch, hidden, start, interrupted, suspends=suspends)

    def resume_stage(
        self, batch: Batch, interrupted: Callable[[], bool] | None = None
    ) -> StageOutput | None:
        """Continue the suspended `batch` (`launch_resumed`), and return the result."""
        run = self.launch_resumed(batch, interrupted)
        return None if run is None else run.collect()

    @torch.inference_mode()
    def launch_resumed(
        self, batch: Batch, interrupted: Callable[[], bool] | None = None
    ) -> LaunchedStage | None:
        """Continue the suspended `batch`; returns as `launch_stage`, and may suspend it again.

        Raises InvalidBatch if `batch` is not the suspended batch.
        """
        suspended, self.suspended = self.suspended, None
        if suspended is None or suspended.batch != batch:
            raise InvalidBatch("a batch was resumed that is not suspended here")
        return self._launch(batch, suspended.hidden, suspended.layer, interrupted, suspends=True)

    def _launch(
        self,
        batch: Batch,
        hidden: torch.Tensor | None,
        first_layer: int,
        interrupted: Callable[[], bool] | None,
        *,
        suspends: bool,
    ) -> LaunchedStage | None:
        """Launch the stage's layers from `first_layer` on; `hidden` is its input, None: embed."""
        layers = self.stage_memory.layers
        samples = layers.stop == self.geometry.num_layers
        if samples:
            # Compile grammars on another thread while the layers run. The leader has compiled them
            # before planning, but this last stage may run on another worker.
            self.sampler.prepare([chunk.sample for chunk in batch.chunks])
        metadata = self.metadata(batch)
        copies = self.stage_memory.copies
        if copies is not None:
            copies.begin_work()
        # Between two layers, the hidden states and the KV written so far suffice to resume.
        try:
            token_ids, positions, rows = self._columns(batch)
            # Only the first stage embeds; later stages receive hidden states.
            given = self.decoder.embed(token_ids) if hidden is None else hidden
            left = range(first_layer, layers.stop)
            output = self.decoder.run_layers(given, positions, metadata, left, interrupted)
        except Interrupted as end:
            if copies is not None:
                copies.end_work()
            if suspends:
                self.suspended = Suspended(batch, end.hidden, end.layer)
            return None
        if samples and self._on_gpu:
            sample: Callable[[], StageOutput] = partial(self._sample, batch, output, rows)
            if self._samples_ahead(batch):
                sample = self._start_sampling(batch, output, rows)
            return LaunchedStage(None, partial(self._collect, sample))
        result = self._sample(batch, output, rows) if samples else StageOutput(hidden=output)
        if copies is not None:
            copies.end_work()
        return LaunchedStage(result)

    @torch.inference_mode()
    def _collect(self, sample: Callable[[], StageOutput]) -> StageOutput:
        try:
            return sample()
        finally:
            if (copies := self.stage_memory.copies) is not None:
                copies.end_work()

    def _columns(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ids and positions of all tokens, and the rows to sample from, on the device."""
        token_ids = list(chain.from_iterable(chunk.token_ids for chunk in batch.chunks))
        positions = list(
            chain.from_iterable(
                range(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in batch.chunks
            )
        )
        # The last row of each chunk that samples.
        ends = accumulate(len(chunk.token_ids) for chunk in batch.chunks)
        rows = [
            end - 1
            for chunk, end in zip(batch.chunks, ends, strict=True)
            if chunk.sample is not None
        ]
        if not self._on_gpu:
            return self._tensor(token_ids), self._tensor(positions), self._tensor(rows)
        # Pinned memory makes the copy asynchronous: this thread does not wait for kernels.
        columns = torch.tensor(
            [*token_ids, *positions, *rows], dtype=torch.int64, pin_memory=True
        ).to(self.device, non_blocking=True)
        tokens = len(token_ids)
        return columns[:tokens], columns[tokens : 2 * tokens], columns[2 * tokens :]

    def hidden_from_bytes(self, payload: npt.NDArray[np.uint8], tokens: int) -> torch.Tensor:
        """Return bytes of the previous stage as hidden states [tokens, hidden_size] on the device.

        On a CPU they are a view. Raises InvalidBatch if the size does not match.
        """
        shape = (tokens, self.geometry.hidden_size)
        if payload.size != tokens * self.hidden_bytes_per_token:
            raise InvalidBatch(f"{payload.size} bytes are no hidden states of shape {shape}")
        hidden = torch.from_numpy(payload).view(self._compute_dtype).view(shape)
        return hidden.to(self.device)

    def metadata(self, batch: Batch) -> AttentionMetadata:
        """Return the attention metadata of `batch` for all layers. Raises InvalidBatch."""
        return self._metadata.build(batch, self.num_blocks)

    def close(self) -> None:
        """Free all memory. The runner must not be used afterwards."""
        self.stage_memory.arena.close()

    def check_invariants(self) -> None:
        """Assert the invariants of the stage memory and the memory budget."""
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

    def _samples_ahead(self, batch: Batch) -> bool:
        """Whether a GPU can sample behind the layers, without a wait of this thread."""
        specs = [(chunk.seq_id, chunk.sample) for chunk in batch.chunks if chunk.sample is not None]
        scores = any(chunk.score is not None for chunk in batch.chunks)
        return not scores and self.sampler.starts_ahead(specs)

    def _sample(self, batch: Batch, hidden: torch.Tensor, rows: torch.Tensor) -> StageOutput:
        return self._start_sampling(batch, hidden, rows)()

    def _start_sampling(
        self, batch: Batch, hidden: torch.Tensor, rows: torch.Tensor
    ) -> Callable[[], StageOutput]:
        """Sample a token for each chunk that samples, from `rows`; score prompts.

        A score is the log probabilities of prompt tokens. The result waits for a GPU.
        """
        wanted: list[tuple[str, SampleSpec]] = []
        prompt_logprobs: dict[str, PromptRows] = {}
        row = -1
        for chunk in batch.chunks:
            # Prompt log probabilities need logits of many rows; sampling needs the last row alone.
            if chunk.score is not None:
                first = row + 1
                prompt_logprobs[chunk.seq_id] = self._score(chunk, hidden[first:])
            row += len(chunk.token_ids)
            if chunk.sample is not None:
                wanted.append((chunk.seq_id, chunk.sample))
        finishes = []
        # Compute logits in slices of rows, because logits need rows × vocabulary memory.
        for first in range(0, len(wanted), self._logit_rows):
            part = slice(first, first + self._logit_rows)
            chosen = rows if len(rows) <= self._logit_rows else rows[part]
            finishes.append(self.sampler.start(self.decoder.logits(hidden[chosen]), wanted[part]))

        def finish() -> StageOutput:
            sampled = Sampled()
            for add_to in finishes:
                add_to(sampled)
            notes = SampleNotes(sampled.logprobs, prompt_logprobs, sampled.failed)
            return StageOutput(sampled=sampled.tokens, notes=notes or None)

        return finish

    def _score(self, chunk: Chunk, hidden: torch.Tensor) -> PromptRows:
        """Return log probabilities of a chunk's prompt; `hidden` starts at its first row."""
        score = chunk.score
        assert score is not None
        parts = [LogprobRows(score.top)]
        for first in range(0, len(score.token_ids), self._logit_rows):
            token_ids = score.token_ids[first : first + self._logit_rows]
            row = score.row + first
            logits = self.decoder.logits(hidden[row : row + len(token_ids)])
            parts.append(self.sampler.score(logits, token_ids, score.top))
        # Row i predicts the token at position i + 1.
        return PromptRows(chunk.start + score.row + 1, joined(parts))

    @staticmethod
    def _tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64)


def _description(model_dir: Path) -> bytes:
    """Return the SHA-256 of `config.json` and, if the model has it, `tokenizer.json`."""
    digest = hashlib.sha256((model_dir / "config.json").read_bytes())
    tokenizer = model_dir / "tokenizer.json"
    if tokenizer.is_file():
        digest.update(tokenizer.read_bytes())
    return digest.digest()
