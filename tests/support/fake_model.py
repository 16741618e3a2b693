"""An integer model over a real stage memory: its tokens reveal whether layers read the right KV.

A layer stores its input at each position as K, and its output at a position is a hash of K at all
positions up to that. So a token depends on every value that every layer has stored for its request.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from services.core.groups.slab_names import EMBEDDING, HEAD, layer_name
from services.core.planner.batch import Batch, Chunk
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.compute.stage_output import LaunchedStage, StageOutput
from services.worker.engine.memory.budget import MemoryDemand, plan_memory
from services.worker.engine.memory.host_copies import HostCopies
from services.worker.engine.memory.kv_range import KvBlockShape
from services.worker.engine.memory.layer_slab import SlabLayout
from services.worker.engine.memory.memfd import MemfdArena
from services.worker.engine.memory.stage_memory import StageMemory
from services.worker.engine.model.loader import DummySource

LAYERS = 3
CHUNK_BYTES = 4096
BLOCKS = 20
SHAPE = KvBlockShape(block_size=4, num_kv_heads=1, head_dim=16, dtype=torch.int64)
SLABS = (EMBEDDING, *map(layer_name, range(LAYERS)), HEAD)
MODULUS = 100_003
FAKE = RunnerConfig(
    model_dir=Path("integers"),
    device="cpu",
    dtype=torch.int64,
    budget_bytes=len(SLABS) * CHUNK_BYTES + LAYERS * BLOCKS * SHAPE.size_bytes,
    block_size=SHAPE.block_size,
    chunk_bytes=CHUNK_BYTES,
)
"""Each slab is one chunk; a worker that runs all layers has `BLOCKS` blocks."""


def fake_memory(config: RunnerConfig = FAKE) -> StageMemory:
    """The memory of a worker that has loaded the model."""
    layout = SlabLayout.of([("w", (CHUNK_BYTES // 4,))], torch.float32)
    demand = MemoryDemand(
        slab_bytes=(layout.size_bytes,) * len(SLABS),
        num_layers=LAYERS,
        kv_block_bytes=SHAPE.size_bytes,
        block_size=SHAPE.block_size,
        staging_bytes=0,
    )
    plan = plan_memory(config.budget_bytes, demand, min_tokens=4, chunk_bytes=CHUNK_BYTES)
    memory = StageMemory(
        MemfdArena(chunk_bytes=CHUNK_BYTES, total_chunks=plan.total_chunks),
        plan,
        dict.fromkeys(SLABS, layout),
        SHAPE,
        num_layers=LAYERS,
        tied_embeddings=False,
        open_source=DummySource,
        host_copies=HostCopies(config.host_weights_bytes),
    )
    memory.load()
    return memory


@dataclass
class FakeSampler:
    """A sampler that records only which requests it was asked to keep."""

    kept: list[str] = field(default_factory=list)

    def keep_only(self, request_ids: Any) -> None:
        """Forget all other requests."""
        self.kept = sorted(request_ids)


class FakeRunner:
    """Runs a stage, after calling `before_run`. Used by `load_fake`."""

    block_size = SHAPE.block_size

    def __init__(self, config: RunnerConfig) -> None:
        self.stage_memory = fake_memory(config)
        self.sampler = FakeSampler()
        self.before_run: Callable[[], None] = lambda: None

    @property
    def num_blocks(self) -> int:
        return self.stage_memory.num_blocks

    @property
    def parameter_bytes(self) -> int:
        return self.stage_memory.parameter_bytes

    def launch_stage(
        self,
        batch: Batch,
        hidden: torch.Tensor | None = None,
        interrupted: Callable[[], bool] | None = None,
        *,
        suspends: bool = False,
    ) -> LaunchedStage | None:
        """As `ModelRunner.launch_stage`, but never suspends."""
        self.before_run()
        memory = self.stage_memory
        assert (hidden is None) == (memory.layers.start == 0)
        if hidden is None:
            tokens = [token for chunk in batch.chunks for token in chunk.token_ids]
            hidden = torch.tensor(tokens).view(-1, 1)
        for layer in memory.layers:
            if interrupted is not None and interrupted():
                return None
            memory.slabs[layer_name(layer)].check_resident()
            hidden = self._layer(layer, batch, hidden)
        if memory.layers.stop < LAYERS:
            return LaunchedStage(StageOutput(hidden=hidden))
        row, sampled = -1, {}
        for chunk in batch.chunks:
            row += len(chunk.token_ids)
            if chunk.sample is not None:
                sampled[chunk.seq_id] = int(hidden[row])
        return LaunchedStage(StageOutput(sampled=sampled))

    def _layer(self, layer: int, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        blocks, parts, first = self.stage_memory.kv_ranges[layer].blocks(), [], 0
        for chunk in batch.chunks:
            end = first + len(chunk.token_ids)
            turned = chunk.seq_id in batch.turned
            parts.append(self._attend(blocks, chunk, hidden[first:end, 0], turned))
            first = end
        return torch.cat(parts).view(-1, 1)

    def _attend(
        self, blocks: torch.Tensor, chunk: Chunk, rows: torch.Tensor, turned: bool
    ) -> torch.Tensor:
        end = chunk.start + len(chunk.token_ids)
        positions = torch.arange(chunk.start, end)
        ids = torch.tensor(chunk.block_ids)
        size = self.block_size
        slots = size - 1 - positions % size if turned else positions % size
        blocks[ids[positions // size], 0, slots, 0, 0] = rows
        keys = blocks[ids, 0, :, 0, 0]
        if turned:
            keys[-1] = keys[-1].flip(0)
        return hashed(keys.reshape(-1)[:end])[chunk.start :]

    def hidden_from_bytes(self, payload: npt.NDArray[np.uint8], tokens: int) -> torch.Tensor:
        """As `ModelRunner.hidden_from_bytes`."""
        return torch.from_numpy(payload).view(torch.int64).view(tokens, 1)

    def check_invariants(self) -> None:
        self.stage_memory.check_invariants()

    def close(self) -> None:
        self.stage_memory.arena.close()


def hashed(keys: torch.Tensor) -> torch.Tensor:
    """A layer's output at each position, of K at the positions up to it."""
    weights = torch.arange(7, 7 + len(keys))
    return (torch.cumsum(keys * weights, 0) * 31 + keys + 5) % MODULUS


def load_fake(config: RunnerConfig) -> ModelRunner:
    """A `FakeRunner` with the parts of a `ModelRunner` that a member uses."""
    return cast(ModelRunner, FakeRunner(config))


def expected_tokens(prompt: tuple[int, ...], count: int) -> list[int]:
    """The tokens of an undisturbed run."""
    tokens = list(prompt)
    for _ in range(count):
        hidden = torch.tensor(tokens)
        for _ in range(LAYERS):
            hidden = hashed(hidden)
        tokens.append(int(hidden[-1]))
    return tokens[len(prompt) :]
