import random
from dataclasses import dataclass

import pytest
import torch

from services.core.planner.batch import Batch, Chunk, SampleSpec
from services.core.request import blocks_for
from services.worker.engine.model.attention.cpu import SdpaPagedAttention
from services.worker.engine.model.attention.paged import Decode, MetadataBuilder, group_by_length
from services.worker.errors import InvalidBatch

BLOCK_SIZE = 8
NUM_BLOCKS = 600
KV_HEADS, HEADS, HEAD_DIM = 2, 6, 16
CPU = torch.device("cpu")


@dataclass
class Sequence:
    """Keys and values of a sequence, and their location."""

    keys: torch.Tensor
    values: torch.Tensor
    table: list[int]


def reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, window: int | None
) -> torch.Tensor:
    """One query row at a time, over its visible keys."""
    output = torch.empty_like(query)
    share = HEADS // KV_HEADS
    for row in range(len(query)):
        last = start + row
        first = 0 if window is None else max(0, last - window + 1)
        seen_keys = keys[first : last + 1].repeat_interleave(share, 1)
        seen_values = values[first : last + 1].repeat_interleave(share, 1)
        scores = torch.einsum("hd,khd->hk", query[row], seen_keys) * HEAD_DIM**-0.5
        output[row] = torch.einsum("hk,khd->hd", torch.softmax(scores, 1), seen_values)
    return output


def attention(
    dtype: torch.dtype, compute_dtype: torch.dtype, compiled: bool = False
) -> SdpaPagedAttention:
    return SdpaPagedAttention(
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        max_context=3000,
        storage_dtype=dtype,
        compute_dtype=compute_dtype,
        device=CPU,
        compiled=compiled,
    )


def builder(dtype: torch.dtype) -> MetadataBuilder:
    return MetadataBuilder(block_size=BLOCK_SIZE, device=CPU, compute_dtype=dtype)


@pytest.mark.parametrize(
    ("storage", "compute", "compiled", "tolerance"),
    [
        (torch.float64, torch.float64, False, 1e-9),
        (torch.bfloat16, torch.float32, False, 1e-5),
        (torch.float32, torch.float32, True, 1e-5),
        (torch.bfloat16, torch.float32, True, 1e-5),
    ],
)
@pytest.mark.parametrize("window", [None, 1, 5, 8, 100])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_batches_match_the_reference(
    seed: int,
    window: int | None,
    storage: torch.dtype,
    compute: torch.dtype,
    compiled: bool,
    tolerance: float,
) -> None:
    """Blocks are initialised with NaN: unwritten slots must not be read."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        made = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return made.to(storage).to(compute)

    fast = attention(storage, compute, compiled)
    metadata_builder = builder(compute)
    blocks = torch.full((NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM), torch.nan, dtype=storage)
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    empty = torch.empty(0, KV_HEADS, HEAD_DIM, dtype=compute)
    sequences = [Sequence(empty, empty, []) for _ in range(12)]
    for _ in range(8):
        chosen = rng.sample(range(12), rng.randint(1, 12))
        chunks, queries, keys, values = [], [], [], []
        for index in chosen:
            sequence = sequences[index]
            size = rng.choice([1, 1, 1, 2, 7, 8, 9, 150])
            start = len(sequence.keys)
            while len(sequence.table) < blocks_for(start + size, BLOCK_SIZE):
                sequence.table.append(free.pop())
            sequence.keys = torch.cat([sequence.keys, normal(size, KV_HEADS, HEAD_DIM)])
            sequence.values = torch.cat([sequence.values, normal(size, KV_HEADS, HEAD_DIM)])
            sample = SampleSpec(None, rng.randint(0, 3)) if size == 1 else None
            chunks.append(Chunk(str(index), start, (0,) * size, tuple(sequence.table), sample))
            queries.append(normal(size, HEADS, HEAD_DIM))
            keys.append(sequence.keys[start:])
            values.append(sequence.values[start:])
        actual = fast.forward(
            torch.cat(queries),
            torch.cat(keys),
            torch.cat(values),
            blocks,
            metadata_builder.build(Batch(tuple(chunks)), NUM_BLOCKS),
            sliding_window=window,
            scaling=HEAD_DIM**-0.5,
        )
        expected = [
            reference(query, sequences[i].keys, sequences[i].values, chunk.start, window)
            for i, chunk, query in zip(chosen, chunks, queries, strict=True)
        ]
        torch.testing.assert_close(actual, torch.cat(expected), rtol=tolerance, atol=tolerance)


def test_keys_and_values_are_stored_in_the_storage_dtype() -> None:
    fast = attention(torch.bfloat16, torch.float32)
    blocks = torch.zeros(4, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    key, value = torch.randn(2, 10, KV_HEADS, HEAD_DIM)
    query = torch.randn(10, HEADS, HEAD_DIM)
    batch = Batch((Chunk("a", 0, (0,) * 10, (2, 1), None),))
    metadata = builder(torch.float32).build(batch, 4)
    actual = fast.forward(
        query, key, value, blocks, metadata, sliding_window=None, scaling=HEAD_DIM**-0.5
    )
    assert torch.equal(blocks[2, 0], key[:8].bfloat16())
    assert torch.equal(blocks[1, 1, :2], value[8:].bfloat16())
    rounded = [tensor.bfloat16().float() for tensor in (key, value)]
    torch.testing.assert_close(actual, reference(query, *rounded, 0, None))


def test_decode_groups_bound_padding_and_size() -> None:
    rng = random.Random(0)
    blocks = torch.arange(10_000).numpy()
    members = [Decode(row, 0, 0, blocks[: rng.randint(1, 400)]) for row in range(100)]
    groups = group_by_length(members, block_size=16)
    assert sorted(m.row for group in groups for m in group) == list(range(100))
    for group in groups:
        widths = [len(member.table) * 16 for member in group]
        assert max(widths) == widths[0]
        assert max(widths) - min(widths) <= 256
        assert len(group) == 1 or len(group) * max(widths) <= 2048


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk("a", 0, (1,) * 9, (0,), None),
        Chunk("a", 0, (1,), (NUM_BLOCKS,), None),
        Chunk("a", 0, (1,), (-1,), None),
        Chunk("a", 3, (), (0,), None),
    ],
)
def test_impossible_chunks_are_refused(chunk: Chunk) -> None:
    with pytest.raises(InvalidBatch):
        builder(torch.float32).build(Batch((chunk,)), NUM_BLOCKS)
