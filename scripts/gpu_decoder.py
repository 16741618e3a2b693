"""A dense decoder of real size with random weights, to time its iterations on a GPU.

The layers are those of the engine (`GpuLayers`): weights and KV in bfloat16, KV in blocks that lie
anywhere. There is no arena, no scheduling and no sampling but the most likely token, so that an
iteration can be one captured graph. Needs CUDA and Triton.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from services.core.request import blocks_for  # noqa: E402
from services.worker.engine.model.attention.gpu import GpuPagedAttention, Work  # noqa: E402
from services.worker.engine.model.attention.paged import AttentionMetadata  # noqa: E402
from services.worker.engine.model.gpu_graphs import Turn  # noqa: E402
from services.worker.engine.model.gpu_layers import (  # noqa: E402
    GpuLayers,
    GpuLayerSizes,
    GpuLayerWeights,
)

BLOCK_TOKENS = 16
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a decoder, as its config.json has them."""

    model: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer's products."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.hidden * (attention + 3 * self.intermediate)

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of a token in all layers."""
        return 4 * self.layers * self.kv_heads * self.head_dim

    @property
    def parameter_bytes(self) -> int:
        """Layers, embedding and head."""
        return 2 * (self.layers * self.layer_parameters + 2 * self.vocabulary * self.hidden)


SIZES = {
    "14B": Size("Qwen-2.5-14B", 48, 5120, 40, 8, 128, 13824, 152064),
    "7B": Size("Llama-2-7B", 32, 4096, 32, 32, 128, 11008, 32000),
    "tiny": Size("a tiny one", 2, 256, 4, 2, 64, 512, 1000),
}


@dataclass(frozen=True, slots=True)
class Iteration:
    """The inputs of an iteration on the device. `last`: the token of each chunk to sample after."""

    tokens: torch.Tensor
    turn: Turn
    last: torch.Tensor
    work: Work


class Cache:
    """K and V of one layer, [block, 2, slot, kv_head, head_dim], as a `KvRange` has them."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self.values = blocks

    def blocks(self) -> torch.Tensor:
        """All of them."""
        return self.values


class Decoder:
    """Random weights and a random KV cache of `kv_tokens`."""

    def __init__(self, size: Size, kv_tokens: int, device: str = "cuda", seed: int = 0) -> None:
        self.size = size
        self.num_blocks = kv_tokens // BLOCK_TOKENS
        self.device = torch.device(device)
        generator = torch.Generator(device).manual_seed(seed)

        def weight(rows: int, columns: int) -> torch.Tensor:
            made = torch.empty(rows, columns, dtype=DTYPE, device=device)
            return made.normal_(0, columns**-0.5, generator=generator)

        heads, inner = size.heads + 2 * size.kv_heads, size.heads * size.head_dim
        self.norm = torch.ones(size.hidden, dtype=DTYPE, device=device)
        self.weights = [
            GpuLayerWeights(
                input_norm=self.norm,
                qkv=weight(heads * size.head_dim, size.hidden),
                qkv_bias=None,
                query_norm=None,
                key_norm=None,
                output=weight(size.hidden, inner),
                post_attention_norm=self.norm,
                gate_up=weight(2 * size.intermediate, size.hidden),
                down=weight(size.hidden, size.intermediate),
            )
            for _ in range(size.layers)
        ]
        self.embedding = weight(size.vocabulary, size.hidden)
        self.head = weight(size.vocabulary, size.hidden)
        shape = (self.num_blocks, 2, BLOCK_TOKENS, size.kv_heads, size.head_dim)
        self.kv = [
            Cache(torch.empty(shape, dtype=DTYPE, device=device).normal_(generator=generator))
            for _ in range(size.layers)
        ]
        self.attention = GpuPagedAttention(
            num_heads=size.heads,
            num_kv_heads=size.kv_heads,
            head_dim=size.head_dim,
            block_size=BLOCK_TOKENS,
            dtype=DTYPE,
            device=self.device,
        )
        sizes = GpuLayerSizes(size.hidden, size.intermediate, 1e-6, (None,) * size.layers)
        self.layers = GpuLayers(self.weights, self.kv, sizes, self.attention)
        turns = torch.arange(0, size.head_dim, 2, device=device) / size.head_dim
        angles = torch.outer(torch.arange(32_768, device=device), 10_000.0**-turns)
        self.cos, self.sin = (
            torch.cat((one, one), 1).to(DTYPE) for one in (angles.cos(), angles.sin())
        )

    def prepare(self, chunks: Sequence[tuple[int, int]]) -> Iteration:
        """The inputs for (prefix, new) chunks; each has blocks of its own, which lie anywhere."""
        needed = [blocks_for(prefix + new, BLOCK_TOKENS) for prefix, new in chunks]
        tables = torch.randperm(self.num_blocks)[: sum(needed)].numpy()
        ends = list(accumulate(new for _, new in chunks))
        firsts = [0, *accumulate(needed)]
        spans = [
            (end - new, new, prefix, first, int(new == 1))
            for (prefix, new), end, first in zip(chunks, ends, firsts, strict=False)
        ]
        positions = self._whole([p for prefix, new in chunks for p in range(prefix, prefix + new)])
        metadata = AttentionMetadata(np.array(spans), tables, BLOCK_TOKENS, self.device, DTYPE)
        return Iteration(
            tokens=torch.randint(0, self.size.vocabulary, (ends[-1],), device=self.device),
            turn=(self.cos[positions], self.sin[positions]),
            last=self._whole([end - 1 for end in ends]),
            work=self.attention.work(metadata),
        )

    def run(self, work: Iteration) -> torch.Tensor:
        """All layers, then the most likely token of each chunk."""
        return self.finish(work, self.run_layers(work, self.begin(work), 0, self.size.layers))

    def begin(self, work: Iteration) -> torch.Tensor:
        """Embeddings [tokens, hidden]."""
        return self.embedding[work.tokens]

    def run_layers(
        self, work: Iteration, hidden: torch.Tensor, first: int, end: int
    ) -> torch.Tensor:
        """Layers `first` to `end` - 1 over `hidden`, which is overwritten."""
        return self.layers.all_of(range(first, end), hidden, work.turn, work.work)

    def finish(self, work: Iteration, hidden: torch.Tensor) -> torch.Tensor:
        """The most likely next token of each chunk."""
        normed = functional.rms_norm(hidden[work.last], hidden.shape[1:], self.norm, 1e-6)
        return functional.linear(normed, self.head).argmax(-1)

    def _whole(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)
