import random
from collections.abc import Iterator

import pytest
import torch

from services.worker.errors import ArenaExhausted, LayerNotResident
from services.worker.memory.arena import coalesce
from services.worker.memory.kv_range import KvBlockShape, KvRange
from services.worker.memory.layer_slab import ALIGNMENT_BYTES, LayerSlab, SlabLayout
from services.worker.memory.memfd import MemfdArena

CHUNK_BYTES = 64 << 10
ELEMENTS = CHUNK_BYTES // 4


@pytest.fixture
def arena() -> Iterator[MemfdArena]:
    arena = MemfdArena(chunk_bytes=CHUNK_BYTES, total_chunks=32)
    yield arena
    arena.check_invariants()
    arena.close()


def test_neighbouring_handles_become_one_call() -> None:
    assert coalesce([3, 4, 5, 9, 11, 12]) == [(0, 3, 3), (3, 9, 1), (4, 11, 2)]
    assert coalesce([]) == []


def test_a_tensor_keeps_working_while_its_tail_is_mapped(arena: MemfdArena) -> None:
    reserved = arena.reserve("range", 8 * CHUNK_BYTES)
    tensor = arena.tensor(reserved, torch.float32)
    assert tensor.shape == (8 * ELEMENTS,)
    arena.map(reserved, 0, arena.free_handles(1))
    tensor[:ELEMENTS] = 1.0
    arena.map(reserved, 1, arena.free_handles(2))
    tensor[ELEMENTS : 3 * ELEMENTS] = 2.0
    assert tensor[: 3 * ELEMENTS].sum() == ELEMENTS * 5
    assert arena.free_chunks == 29


def test_a_handle_mapped_twice_is_free_when_both_mappings_are_gone(arena: MemfdArena) -> None:
    first, second = (arena.reserve(name, CHUNK_BYTES) for name in ("first", "second"))
    (handle,) = arena.free_handles(1)
    arena.map(first, 0, [handle])
    arena.map(second, 0, [handle])
    arena.tensor(first, torch.float32)[7] = 5.0
    assert arena.tensor(second, torch.float32)[7] == 5.0
    assert arena.unmap(first, 0, 1) == [handle]
    assert arena.free_chunks == 31
    arena.check_invariants()
    arena.unmap(second, 0, 1)
    assert arena.free_chunks == 32


def test_wrong_places_are_refused(arena: MemfdArena) -> None:
    reserved = arena.reserve("range", 2 * CHUNK_BYTES)
    arena.map(reserved, 0, [0])
    with pytest.raises(ValueError, match="mapped or outside"):
        arena.map(reserved, 0, [1])
    with pytest.raises(ValueError, match="mapped or outside"):
        arena.map(reserved, 1, [1, 2])
    with pytest.raises(ValueError, match="outside the arena"):
        arena.map(reserved, 1, [32])
    with pytest.raises(ValueError, match="not all mapped"):
        arena.unmap(reserved, 0, 2)
    with pytest.raises(ArenaExhausted):
        arena.free_handles(32)


def test_chunks_are_whole_pages() -> None:
    with pytest.raises(ValueError, match="page size"):
        MemfdArena(chunk_bytes=1000, total_chunks=4)


def test_close_is_idempotent() -> None:
    arena = MemfdArena(chunk_bytes=CHUNK_BYTES, total_chunks=4)
    arena.map(arena.reserve("range", CHUNK_BYTES), 0, [2])
    arena.close()
    arena.close()
    assert arena.free_chunks == 4


@pytest.mark.parametrize("seed", range(5))
def test_random_moves_lose_neither_chunks_nor_contents(arena: MemfdArena, seed: int) -> None:
    """Every chunk carries its handle as a stamp, wherever it is mapped."""
    rng = random.Random(seed)
    ranges = [arena.reserve(f"range {number}", 16 * CHUNK_BYTES) for number in range(4)]
    tensors = [arena.tensor(reserved, torch.float32) for reserved in ranges]
    for _ in range(200):
        index = rng.randrange(4)
        reserved, tensor = ranges[index], tensors[index]
        used = reserved.mapped_chunks
        if rng.random() < 0.5 and arena.free_chunks:
            handles = sorted(
                rng.sample(
                    arena.free_handles(arena.free_chunks),
                    rng.randint(1, min(arena.free_chunks, max(1, 16 - used))),
                )
            )
            if used + len(handles) > 16:
                continue
            arena.map(reserved, used, handles)
            for offset, handle in enumerate(handles, start=used):
                tensor[offset * ELEMENTS] = float(handle)
        elif used:
            arena.unmap(reserved, used - (count := rng.randint(1, used)), count)
        arena.check_invariants()
        for reserved, tensor in zip(ranges, tensors, strict=True):
            stamps = [h for h in reserved.handles if h is not None]
            assert tensor[: len(stamps) * ELEMENTS : ELEMENTS].tolist() == stamps


def test_a_page_moves_from_parameters_to_a_kv_tail_without_a_copy(arena: MemfdArena) -> None:
    shape = KvBlockShape(block_size=16, num_kv_heads=2, head_dim=64, dtype=torch.float32)
    blocks_per_chunk = CHUNK_BYTES // shape.size_bytes
    slab = LayerSlab(arena, "layer 0", SlabLayout.of([("w", (2, ELEMENTS))], torch.float32))
    kv_range = KvRange(arena, "kv of layer 0", shape)
    slab.map()
    slab.views()["w"][1].fill_(7.0)
    kv_range.map_tail(arena.free_handles(3))
    kv_range.blocks().fill_(1.0)

    handles = slab.retire()
    kv_range.map_tail(handles)
    arena.check_invariants()
    with pytest.raises(LayerNotResident, match="layer 0"):
        slab.check_resident()
    assert kv_range.num_blocks == 5 * blocks_per_chunk
    assert (kv_range.blocks()[4 * blocks_per_chunk :] == 7.0).all()
    assert (kv_range.blocks()[: 3 * blocks_per_chunk] == 1.0).all()
    assert slab.unmap() == handles

    kv_range.blocks()[4 * blocks_per_chunk :] = 9.0
    slab.map(kv_range.unmap_tail(2))
    slab.check_resident()
    assert (slab.views()["w"][1] == 9.0).all()
    assert kv_range.num_blocks == 3 * blocks_per_chunk


def test_slab_places_are_aligned_and_apart() -> None:
    shapes = [("a", (3, 5)), ("b", (7,)), ("c", (2, 2, 2))]
    layout = SlabLayout.of(shapes, torch.bfloat16)
    end_bytes = 0
    for name, shape in shapes:
        place = layout.places[name]
        assert place.shape == shape
        assert place.offset_bytes % ALIGNMENT_BYTES == 0
        assert place.offset_bytes >= end_bytes
        end_bytes = place.offset_bytes + 2 * place.elements
    assert layout.size_bytes == end_bytes


def test_a_block_may_straddle_chunks(arena: MemfdArena) -> None:
    shape = KvBlockShape(block_size=16, num_kv_heads=3, head_dim=100, dtype=torch.float32)
    assert CHUNK_BYTES % shape.size_bytes
    kv_range = KvRange(arena, "kv", shape)
    assert kv_range.num_blocks == 0
    for chunks in range(1, 6):
        kv_range.map_tail(arena.free_handles(1))
        assert kv_range.num_blocks == chunks * CHUNK_BYTES // shape.size_bytes
        assert kv_range.blocks().shape == (kv_range.num_blocks, 2, 16, 3, 100)
        kv_range.blocks().fill_(1.0)
