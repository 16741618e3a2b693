"""Attention over a block that two sequences fill from both ends, by each backend."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from services.core.planner.batch import Batch, Chunk, SampleSpec
from services.worker.engine.memory.kv_range import KvBlockShape, KvRange
from services.worker.engine.model.attention.compiled import CompiledPagedAttention
from services.worker.engine.model.attention.cpu import SdpaPagedAttention
from services.worker.engine.model.attention.paged import MetadataBuilder, PagedAttention
from services.worker.engine.model.cpu_kernels import paged_attention
from tests.support.device import DEVICE, make_arena

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
BLOCKS = 40
DECODE = SampleSpec(None, 1)
TAIL = 39


def _sdpa(block_size: int, dtype: torch.dtype, *, compiled: bool = False) -> PagedAttention:
    return SdpaPagedAttention(
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=block_size,
        max_context=600,
        storage_dtype=dtype,
        compute_dtype=dtype,
        device=torch.device("cpu"),
        compiled=compiled,
    )


def _joined(block_size: int, dtype: torch.dtype) -> PagedAttention:
    if not paged_attention.fits(block_size, HEAD_DIM, dtype):
        pytest.skip("this CPU or block size has no compiled prefill")
    return CompiledPagedAttention(HEAD_DIM, dtype)


def _gpu(block_size: int, dtype: torch.dtype) -> PagedAttention:
    if find_spec("triton") is None:
        pytest.skip("there is no Triton for this machine")
    from services.worker.engine.model.attention.gpu import GpuPagedAttention

    return GpuPagedAttention(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=block_size,
        dtype=dtype,
        device=torch.device(DEVICE),
    )


BACKENDS: list[tuple[str, Callable[..., PagedAttention], torch.dtype, float]] = [
    ("torch", _sdpa, torch.float64, 1e-9),
    ("compiled decodes", partial(_sdpa, compiled=True), torch.float32, 1e-5),
    ("compiled", _joined, torch.float32, 1e-5),
    ("gpu", _gpu, torch.float32, 1e-5),
]


class Stored:
    """A sequence's queries, keys and values, and its block table."""

    def __init__(self, length: int, table: list[int], seed: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(heads: int) -> torch.Tensor:
            values = torch.randn(length, heads, HEAD_DIM, generator=generator, dtype=torch.float64)
            return values.to(dtype)

        self.query, self.key, self.value = normal(HEADS), normal(KV_HEADS), normal(KV_HEADS)
        self.table = table

    def write(self, blocks: torch.Tensor, end: int) -> None:
        for position in range(end):
            block, slot = divmod(position, blocks.shape[2])
            blocks[self.table[block], 0, slot] = self.key[position]
            blocks[self.table[block], 1, slot] = self.value[position]

    def expected(self, row: int) -> torch.Tensor:
        share = HEADS // KV_HEADS
        keys = self.key[: row + 1].double().repeat_interleave(share, 1)
        values = self.value[: row + 1].double().repeat_interleave(share, 1)
        scores = torch.einsum("hd,khd->hk", self.query[row].double(), keys) * HEAD_DIM**-0.5
        return torch.einsum("hk,khd->hd", scores.softmax(1), values)


@pytest.mark.parametrize("backend", BACKENDS, ids=[name for name, *_ in BACKENDS])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("full", [1, 2, 20])
def test_both_owners_of_a_block_see_their_own_entries(
    full: int,
    block_size: int,
    backend: tuple[str, Callable[..., PagedAttention], torch.dtype, float],
) -> None:
    """A batch sequence has `full` full blocks and a tail, which an online one fills, too."""
    _, create, dtype, tolerance = backend
    attention = create(block_size, dtype)
    device = torch.device(DEVICE) if create is _gpu else torch.device("cpu")
    filled = 1
    batch = Stored((full + 1) * block_size, [*range(full), TAIL], 1, dtype)
    online = Stored(3 * block_size, [full, full + 1, TAIL], 2, dtype)
    arena = make_arena("cpu", 64)
    with closing(arena):
        kv_range = KvRange(arena, "kv", KvBlockShape(block_size, KV_HEADS, HEAD_DIM, dtype))
        kv_range.map_tail(arena.free_handles(kv_range.chunks_for(BLOCKS)))
        kv_range.blocks().fill_(torch.nan)
        kv_range.blocks()[TAIL] = 0  # cleared when the batch sequence began it
        batch.write(kv_range.blocks(), full * block_size + filled)
        online.write(kv_range.blocks(), 2 * block_size)
        kv_range.turn(TAIL, filled)
        blocks = kv_range.blocks().to(device)
        builder = MetadataBuilder(block_size, device, dtype)
        # Each iteration adds an entry of both, until the block is full.
        for step in range((block_size - filled) // 2):
            rows = full * block_size + filled + step, 2 * block_size + step
            chunks = [
                Chunk(name, row, (0,), tuple(owner.table), DECODE)
                for name, row, owner in zip("bo", rows, (batch, online), strict=True)
            ]
            work = Batch(tuple(chunks), turned=frozenset("b"), shared=frozenset("o"))
            inputs = [
                torch.stack([getattr(batch, part)[rows[0]], getattr(online, part)[rows[1]]])
                for part in ("query", "key", "value")
            ]
            actual = attention.forward(
                *(values.to(device) for values in inputs),
                blocks,
                builder.build(work, BLOCKS),
                sliding_window=None,
                scaling=HEAD_DIM**-0.5,
            )
            expected = torch.stack([batch.expected(rows[0]), online.expected(rows[1])])
            torch.testing.assert_close(
                actual.cpu().double(), expected, rtol=tolerance, atol=tolerance
            )
