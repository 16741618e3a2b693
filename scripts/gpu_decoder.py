"""A dense decoder of real size with random weights, to time its iterations on a GPU.

The work is that of an engine with a paged KV cache: weights and KV in bfloat16, q, k and v from one
product, KV in blocks that lie anywhere, in the layout of the engine (`[block, 2, slot, kv_head,
head_dim]`). Attention reads it block by block, and splits long contexts over the multiprocessors.
Needs CUDA and Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import e, log2

import gpu_kernels
import torch
import triton
from torch.nn import functional

BLOCK_TOKENS = 16
TILE_TOKENS = 64
DECODE_ROWS, PREFILL_ROWS = 16, 128
"""Rows of a program: query heads that share K and V, of one or more tokens."""
PROGRAMS_WANTED = 1024
"""Some for each multiprocessor, so that none waits long for the last."""
SHARE_MIN, SPLITS_MAX = 256, 64
"""Tokens of context of a program at least, and programs for a context at most."""
LOG2_E = log2(e)


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
class Tiles:
    """Some consecutive tokens of a chunk each, whose attention is one column of programs.

    `starts` is the token of the iteration that a tile begins with, `counts` how many it has,
    `positions` where the first one is in its sequence, `owners` its row of the block tables. A
    program reads up to `share` tokens of the context, so long ones have many, up to `splits`.
    """

    starts: torch.Tensor
    counts: torch.Tensor
    positions: torch.Tensor
    owners: torch.Tensor
    share: int
    splits: int
    rows: int


@dataclass(frozen=True, slots=True)
class Iteration:
    """The inputs of an iteration on the device: its decodes' tokens first, then its prefills'."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    """Row of each new token's K in a layer's cache seen as `[rows, kv_head, head_dim]`."""
    last: torch.Tensor
    """Token of each chunk that is sampled after."""
    tables: torch.Tensor
    """Blocks of each chunk, `[chunks, most blocks]`."""
    tiles: tuple[Tiles, ...]


class Decoder:
    """Random weights and an uninitialised KV cache of `kv_tokens`."""

    def __init__(self, size: Size, kv_tokens: int, device: str = "cuda", seed: int = 0) -> None:
        self.size = size
        self.num_blocks = kv_tokens // BLOCK_TOKENS
        generator = torch.Generator(device).manual_seed(seed)

        def weight(rows: int, columns: int) -> torch.Tensor:
            made = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
            return made.normal_(0, columns**-0.5, generator=generator)

        heads, inner = size.heads + 2 * size.kv_heads, size.heads * size.head_dim
        self.layers = [
            (
                weight(heads * size.head_dim, size.hidden),
                weight(size.hidden, inner),
                weight(2 * size.intermediate, size.hidden),
                weight(size.hidden, size.intermediate),
            )
            for _ in range(size.layers)
        ]
        self.embedding = weight(size.vocabulary, size.hidden)
        self.head = weight(size.vocabulary, size.hidden)
        self.norm = torch.ones(size.hidden, dtype=torch.bfloat16, device=device)
        shape = (self.num_blocks, 2, BLOCK_TOKENS, size.kv_heads, size.head_dim)
        self.kv = [
            torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
            for _ in range(size.layers)
        ]
        turns = torch.arange(0, size.head_dim, 2, device=device) / size.head_dim
        angles = torch.outer(torch.arange(32_768, device=device), 10_000.0**-turns)
        self.cos, self.sin = angles.cos().contiguous(), angles.sin().contiguous()
        self.device = device

    def prepare(self, chunks: Sequence[tuple[int, int]]) -> Iteration:
        """The inputs for (prefix, new) chunks; each has blocks of its own, which lie anywhere."""
        ordered = sorted(chunks, key=lambda chunk: chunk[1] > 1)
        order = torch.randperm(self.num_blocks).tolist()
        tables = [
            [order.pop() for _ in range(-(-(prefix + new) // BLOCK_TOKENS))]
            for prefix, new in ordered
        ]
        width = max(map(len, tables))
        slots = [
            table[token // BLOCK_TOKENS] * 2 * BLOCK_TOKENS + token % BLOCK_TOKENS
            for (prefix, new), table in zip(ordered, tables, strict=True)
            for token in range(prefix, prefix + new)
        ]
        ends = list(accumulate(new for _, new in ordered))
        decodes = [(i, p, 1, i) for i, (p, new) in enumerate(ordered) if new == 1]
        each = PREFILL_ROWS // (self.size.heads // self.size.kv_heads)
        prefills = [
            (ends[i] - new + done, p + done, min(each, new - done), i)
            for i, (p, new) in enumerate(ordered)
            if new > 1
            for done in range(0, new, each)
        ]
        kinds = ((decodes, DECODE_ROWS), (prefills, PREFILL_ROWS))
        return Iteration(
            tokens=torch.randint(0, self.size.vocabulary, (ends[-1],), device=self.device),
            positions=self._whole([t for p, new in ordered for t in range(p, p + new)]),
            slots=self._whole(slots),
            last=self._whole([end - 1 for end in ends]),
            tables=self._whole([table + [0] * (width - len(table)) for table in tables]).int(),
            tiles=tuple(self._tiles(tiles, rows) for tiles, rows in kinds if tiles),
        )

    def _tiles(self, tiles: Sequence[tuple[int, int, int, int]], rows: int) -> Tiles:
        """From (start, position, count, owner) of each."""
        starts, positions, counts, owners = (
            self._whole(column).int() for column in zip(*tiles, strict=True)
        )
        lengths = [position + count for _, position, count, _ in tiles]
        heads, longest = self.size.kv_heads, max(lengths)
        share = longest
        if rows < PREFILL_ROWS or len(tiles) * heads < PROGRAMS_WANTED:
            share = max(SHARE_MIN, sum(lengths) * heads // PROGRAMS_WANTED, longest // SPLITS_MAX)
        share = triton.next_power_of_2(share)
        splits = triton.next_power_of_2(triton.cdiv(longest, share))
        return Tiles(starts, counts, positions, owners, share, splits, rows)

    def run(self, work: Iteration) -> torch.Tensor:
        """All layers, then the most likely token of each chunk."""
        hidden, rest = self.begin(work)
        hidden = self.run_layers(work, hidden, rest, 0, self.size.layers)
        return self.finish(work, hidden, rest)

    def begin(self, work: Iteration) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings [tokens, hidden], and the residual stream, which is zero yet."""
        hidden = self.embedding[work.tokens]
        return hidden, torch.zeros_like(hidden)

    def run_layers(
        self, work: Iteration, hidden: torch.Tensor, rest: torch.Tensor, first: int, end: int
    ) -> torch.Tensor:
        """Layers `first` to `end` - 1; `rest` is updated in place."""
        size = self.size
        for (qkv_weight, o_weight, up_weight, down_weight), kv in zip(
            self.layers[first:end], self.kv[first:end], strict=True
        ):
            normed = self._add_norm(hidden, rest)
            qkv = functional.linear(normed, qkv_weight)
            query = self._rotate_and_store(qkv, work, kv)
            attended = self.attend(query, work, kv)
            hidden = functional.linear(attended.view(len(attended), -1), o_weight)
            normed = self._add_norm(hidden, rest)
            both = functional.linear(normed, up_weight)
            inner = both.new_empty(len(both), size.intermediate)
            grid = (len(both), triton.cdiv(size.intermediate, 1024))
            gpu_kernels.gate[grid](both, inner, size.intermediate, WIDTH=1024)
            hidden = functional.linear(inner, down_weight)
        return hidden

    def finish(self, work: Iteration, hidden: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        """The most likely next token of each chunk."""
        normed = self._add_norm(hidden, rest)
        return functional.linear(normed[work.last], self.head).argmax(-1)

    def _whole(self, numbers: Sequence[object]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def _add_norm(self, hidden: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        """`rest` += `hidden`; returns its RMS norm."""
        normed, width = torch.empty_like(hidden), triton.next_power_of_2(hidden.shape[1])
        gpu_kernels.add_norm[(len(hidden),)](
            hidden, rest, self.norm, normed, hidden.shape[1], WIDTH=width
        )
        return normed

    def _rotate_and_store(
        self, qkv: torch.Tensor, work: Iteration, kv: torch.Tensor
    ) -> torch.Tensor:
        size = self.size
        query = qkv.new_empty(len(qkv), size.heads, size.head_dim)
        grid = (len(qkv), size.heads + 2 * size.kv_heads)
        gpu_kernels.rotate_and_store[grid](
            qkv, self.cos, self.sin, work.positions, work.slots, query, kv,
            HEADS=size.heads, KV_HEADS=size.kv_heads, DIM=size.head_dim, BLOCK=BLOCK_TOKENS,
            num_warps=1,
        )  # fmt: skip
        return query

    def attend(self, query: torch.Tensor, work: Iteration, kv: torch.Tensor) -> torch.Tensor:
        """Causal attention of `query` [tokens, head, head_dim] over a layer's cache."""
        size, attended = self.size, torch.empty_like(query)
        group = size.heads // size.kv_heads
        for tiles in work.tiles:
            grid = (len(tiles.starts), size.kv_heads, tiles.splits)
            parts, weights = attended, attended
            if tiles.splits > 1:
                shape = (len(query), size.heads, tiles.splits)
                parts = query.new_empty(*shape, size.head_dim, dtype=torch.float32)
                weights = query.new_empty(shape, dtype=torch.float32)
            gpu_kernels.attend[grid](
                query, kv, work.tables, tiles.starts, tiles.counts, tiles.positions, tiles.owners,
                parts, weights, size.head_dim**-0.5 * LOG2_E, work.tables.shape[1], tiles.share,
                HEADS=size.heads, KV_HEADS=size.kv_heads, GROUP=group, ROWS=tiles.rows,
                DIM=size.head_dim, BLOCK=BLOCK_TOKENS, SPLITS=tiles.splits, TILE=TILE_TOKENS,
                num_warps=4 if tiles.rows < PREFILL_ROWS else 8,
            )  # fmt: skip
            if tiles.splits > 1:
                most = 1 if tiles.rows < PREFILL_ROWS else PREFILL_ROWS // group
                gpu_kernels.combine[(len(tiles.starts), most, size.heads)](
                    parts, weights, attended, tiles.starts, tiles.counts,
                    HEADS=size.heads, DIM=size.head_dim, SPLITS=tiles.splits,
                )  # fmt: skip
        return attended
