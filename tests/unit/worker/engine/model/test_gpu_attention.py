"""Attention on a GPU, compared with torch in float64; unused cache slots are NaN."""

import random
from itertools import count
from typing import Any

import pytest
import torch

from services.core.planner.batch import Batch, Chunk
from services.core.request import blocks_for
from services.worker.engine.model.attention.cpu import SdpaPagedAttention
from services.worker.engine.model.attention.paged import MetadataBuilder
from tests.support.device import DEVICE, ON_GPU

pytest.importorskip("triton", reason="there is no Triton for this machine")
from services.worker.engine.model.attention import gpu
from services.worker.engine.model.gpu_graphs import rounded_split

BLOCKS = 200
ERRORS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
# Triton's interpreter has no products of bfloat16.
DTYPES = (torch.float32, torch.bfloat16) if ON_GPU else (torch.float32, torch.float16)
MIXED = ((0, 1), (17, 1), (700, 1), (0, 40), (130, 70))


def chunks_of(lengths: tuple[tuple[int, int], ...], block_size: int, seed: int) -> Batch:
    """Chunks with (prefix, new) of each request; blocks are in random order."""
    free = list(range(BLOCKS))
    random.Random(seed).shuffle(free)
    chunks = []
    for number, (prefix, new) in zip(count(), lengths, strict=False):
        table = tuple(free.pop() for _ in range(blocks_for(prefix + new, block_size)))
        chunks.append(Chunk(str(number), prefix, (0,) * new, table, None))
    return Batch(tuple(chunks))


def filled_cache(batch: Batch, shape: tuple[int, ...]) -> torch.Tensor:
    """K and V of all prefixes; unwritten slots are NaN."""
    cache = torch.full((BLOCKS, 2, *shape), torch.nan)
    block_size = shape[0]
    for chunk in batch.chunks:
        for position in range(chunk.start):
            block, slot = divmod(position, block_size)
            cache[chunk.block_ids[block], :, slot] = torch.randn(2, *shape[1:])
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window", "lengths"),
    [
        (4, 2, 16, 16, None, MIXED),
        (6, 2, 32, 8, 24, (*MIXED, (3, 1))),
        (5, 1, 16, 5, None, ((0, 1), (600, 1), (200, 150))),
        (4, 4, 16, 16, 100, ((300, 1), (500, 200))),
    ],
)
def test_kernel_equals_reference_attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    lengths: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(heads)
    batch = chunks_of(lengths, block_size, seed=heads)
    exact = filled_cache(batch, (block_size, kv_heads, head_dim)).to(dtype)
    cache, device = exact.to(DEVICE), torch.device(DEVICE)
    query, key, value = (
        torch.randn(batch.tokens, number, head_dim).to(dtype)
        for number in (heads, kv_heads, kv_heads)
    )
    attention = gpu.GpuPagedAttention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
    )
    actual = attention.forward(
        *(tensor.to(device) for tensor in (query, key, value, cache)),
        MetadataBuilder(block_size, device, dtype).build(batch, BLOCKS),
        sliding_window=window,
        scaling=head_dim**-0.5,
    )
    reference = SdpaPagedAttention(
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        max_context=1024,
        storage_dtype=torch.float64,
        compute_dtype=torch.float64,
        device=torch.device("cpu"),
    )
    numbers = exact.double().nan_to_num()
    wanted = reference.forward(
        *(tensor.double() for tensor in (query, key, value)),
        numbers,
        MetadataBuilder(block_size, torch.device("cpu"), torch.float64).build(batch, BLOCKS),
        sliding_window=window,
        scaling=head_dim**-0.5,
    )
    assert (actual.cpu().double() - wanted).norm() < ERRORS[dtype] * wanted.norm()
    assert torch.equal(cache.cpu().double().nan_to_num(), numbers)


def test_combine_is_compiled_for_every_number_of_splits_and_launched_with_the_next() -> None:
    """A tile of 64 parts for 2 splits would take many times as long."""
    attention = gpu.GpuPagedAttention(
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        block_size=16,
        dtype=torch.float32,
        device=torch.device(DEVICE),
    )
    launched: list[tuple[int, int]] = []
    launch = attention._combine_kernel

    def record(grid: tuple[int, ...], arguments: tuple[Any, ...], *constants: int) -> None:
        launched.append((arguments[5], constants[-1]))
        launch(grid, arguments, *constants)

    attention._combine_kernel = record  # type: ignore[assignment]
    attention.compile_combine(torch.zeros(1, device=DEVICE))
    assert launched == [(splits, splits) for splits in (2, 4, 8, 16, 32, 64)]
    launched.clear()
    batch = chunks_of(((1400, 1), (3, 1)), 16, seed=1)
    query, key = (torch.randn(2, heads, 16, device=DEVICE) for heads in (4, 2))
    attention.forward(
        *(query, key, key, torch.zeros(BLOCKS, 2, 16, 2, 16, device=DEVICE)),
        MetadataBuilder(16, torch.device(DEVICE), torch.float32).build(batch, BLOCKS),
        sliding_window=None,
        scaling=0.25,
    )
    assert launched == [(6, 8)]


def test_a_long_context_is_split_in_any_batch() -> None:
    lengths = torch.tensor([32_000] + 127 * [500]).numpy()
    share, splits = gpu.split_contexts(lengths, len(lengths), 8, gpu.PROGRAMS_WANTED)
    assert share < 2000
    assert gpu.split_contexts(lengths[1:], 127, 9, gpu.PROGRAMS_WANTED) == (500, 1)
    assert rounded_split(lengths, 128, 8) == (1024, 32)
    assert splits * share >= 32_000


@pytest.mark.parametrize("seed", range(20))
def test_contexts_are_split_whole_and_within_bounds(seed: int) -> None:
    rng = random.Random(seed)
    lengths = torch.tensor([rng.randint(1, 30_000) for _ in range(rng.randint(1, 300))]).numpy()
    kv_heads = rng.choice([1, 2, 8])
    share, splits = gpu.split_contexts(lengths, len(lengths), kv_heads, gpu.PROGRAMS_WANTED)
    assert share * splits >= lengths.max()
    assert splits <= gpu.SPLITS_MAX
    assert splits == 1 or (share % gpu.TILE_TOKENS == 0 and splits * len(lengths) <= gpu.PARTS_ROWS)
    share, splits = rounded_split(lengths, 300, kv_heads)
    assert share * splits >= lengths.max()
    assert splits == 1 or splits * 300 <= gpu.PARTS_ROWS
