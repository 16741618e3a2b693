import hashlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from services.worker.engine.memory.arena import Arena, coalesce
from services.worker.engine.memory.cuda import CudaArena, make_exportable
from services.worker.engine.memory.kv_range import KvBlockShape, KvRange
from services.worker.engine.memory.layer_slab import (
    ALIGNMENT_BYTES,
    LayerSlab,
    SlabLayout,
    SlabState,
)
from services.worker.engine.memory.memfd import MemfdArena
from services.worker.errors import (
    ArenaExhausted,
    InvalidBlocks,
    InvalidStage,
    LayerNotResident,
    SlabCorrupted,
)
from tests.support.device import CHUNK_BYTES, KINDS, make_arena

ELEMENTS = CHUNK_BYTES // 4


class Numbers:
    """A source of weights: each parameter is filled with the number of its name."""

    on_device = False

    def __init__(self, numbers: dict[str, float]) -> None:
        self._numbers = numbers

    def fill(self, name: str, target: torch.Tensor) -> None:
        target.fill_(self._numbers[name])

    def close(self) -> None:
        """Nothing to close."""


@pytest.fixture(params=KINDS)
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    arena = make_arena(request.param, 32)
    yield arena
    arena.check_invariants()
    arena.close()


def test_neighbouring_handles_are_mapped_in_a_single_call() -> None:
    assert coalesce([3, 4, 5, 9, 11, 12]) == [(0, 3, 3), (3, 9, 1), (4, 11, 2)]
    assert coalesce([]) == []


def test_a_tensor_keeps_working_while_its_tail_is_mapped(arena: Arena) -> None:
    reserved = arena.reserve("range", 8 * CHUNK_BYTES)
    tensor = arena.tensor(reserved, torch.float32)
    assert tensor.shape == (8 * ELEMENTS,)
    arena.map(reserved, 0, arena.free_handles(1))
    tensor[:ELEMENTS] = 1.0
    arena.map(reserved, 1, arena.free_handles(2))
    tensor[ELEMENTS : 3 * ELEMENTS] = 2.0
    assert tensor[: 3 * ELEMENTS].sum() == ELEMENTS * 5
    assert arena.free_chunks == 29


def test_a_retired_chunk_may_be_mapped_elsewhere_before_it_is_swept(arena: Arena) -> None:
    first, second = (arena.reserve(name, CHUNK_BYTES) for name in ("first", "second"))
    arena.map(first, 0, arena.free_handles(1))
    arena.tensor(first, torch.float32)[7] = 5.0
    handles = arena.retire(first, 0, 1)
    assert (arena.free_chunks, arena.retired_chunks) == (32, 1)
    arena.map(second, 0, handles)
    arena.check_invariants()
    assert arena.tensor(second, torch.float32)[7] == 5.0
    assert arena.sweep()
    assert (arena.free_chunks, arena.retired_chunks) == (31, 0)
    assert arena.tensor(second, torch.float32)[7] == 5.0


def test_a_retired_place_may_be_mapped_again_before_it_is_swept(arena: Arena) -> None:
    reserved = arena.reserve("range", 4 * CHUNK_BYTES)
    tensor = arena.tensor(reserved, torch.float32)
    arena.map(reserved, 0, [0, 1, 2, 3])
    tensor[::ELEMENTS] = torch.arange(4.0)
    arena.retire(reserved, 1, 3)
    arena.map(reserved, 1, [2, 3])
    arena.check_invariants()
    assert arena.retired_chunks == 1
    assert arena.sweep()
    assert tensor[: 3 * ELEMENTS : ELEMENTS].tolist() == [0.0, 2.0, 3.0]


def test_sweeping_is_incremental(arena: Arena) -> None:
    reserved = arena.reserve("range", 8 * CHUNK_BYTES)
    arena.map(reserved, 0, list(range(8)))
    arena.retire(reserved, 0, 5)
    arena.retire(reserved, 5, 2)
    left = []
    while not arena.sweep(2):
        left.append(arena.retired_chunks)
    assert left == [5, 3, 1]
    assert reserved.mapped_chunks == 1


def test_prefaulting_keeps_contents_and_skips_unmapped_places(arena: Arena) -> None:
    first, second = (arena.reserve(name, 8 * CHUNK_BYTES) for name in ("first", "second"))
    arena.map(first, 0, list(range(8)))
    arena.tensor(first, torch.float32).fill_(3.0)
    arena.map(second, 0, arena.retire(first, 0, 8), cold=True)
    assert arena.prefault(3) is isinstance(arena, CudaArena)  # which has nothing to do
    arena.retire(second, 2, 4)
    assert arena.prefault()
    assert (arena.tensor(second, torch.float32)[: 2 * ELEMENTS] == 3.0).all()


def test_a_prepared_place_gets_its_chunks_once_they_are_free(arena: Arena) -> None:
    first, second = (arena.reserve(name, 4 * CHUNK_BYTES) for name in ("first", "second"))
    arena.map(first, 0, [0, 1, 2, 3])
    arena.tensor(first, torch.float32).fill_(3.0)
    calls = 0 if arena.maps_later else 1
    assert arena.prepare(second, 0, [1, 2]) == calls
    assert arena.prepare(second, 2, [3]) == calls
    assert arena.unmapped_chunks == (3 if arena.maps_later else 0)
    assert arena.map_prepared(2) is not arena.maps_later
    arena.check_invariants()
    assert (arena.free_chunks, second.mapped_chunks) == (28, 0)
    with pytest.raises(ValueError, match="another place owns"):
        arena.adopt([])
    assert arena.prefault()
    assert (arena.tensor(first, torch.float32) == 3.0).all()
    arena.adopt([first])
    arena.check_invariants()
    assert (arena.free_chunks, second.mapped_chunks) == (29, 3)
    assert arena.sweep()
    assert (arena.tensor(second, torch.float32)[: 3 * ELEMENTS] == 3.0).all()


def test_an_abandoned_prepared_place_is_swept(arena: Arena) -> None:
    first, second = (arena.reserve(name, 4 * CHUNK_BYTES) for name in ("first", "second"))
    arena.map(first, 0, [0, 1, 2, 3])
    arena.tensor(first, torch.float32).fill_(3.0)
    arena.prepare(second, 0, [0, 1])
    arena.map_prepared(1)
    arena.cancel_prepared()
    arena.check_invariants()
    # What was never mapped needs no sweep.
    assert arena.retired_chunks == (1 if arena.maps_later else 2)
    assert arena.unmapped_chunks == 0
    arena.prepare(second, 0, [2])
    assert arena.sweep()
    arena.map(second, 1, [9])
    arena.cancel_prepared()
    arena.adopt([])
    assert (second.mapped_chunks, arena.free_chunks) == (1, 27)
    assert (arena.tensor(first, torch.float32) == 3.0).all()


def test_two_prepared_places_cannot_share_a_chunk(arena: Arena) -> None:
    reserved = arena.reserve("range", 4 * CHUNK_BYTES)
    arena.prepare(reserved, 0, [5])
    arena.prepare(reserved, 1, [5])
    with pytest.raises(ValueError, match="another place owns"):
        arena.adopt([])
    assert reserved.mapped_chunks == 0
    with pytest.raises(ValueError, match="are mapped"):
        arena.map(reserved, 1, [6])


def test_free_handles_are_neighbours_where_possible(arena: Arena) -> None:
    reserved = arena.reserve("range", 8 * CHUNK_BYTES)
    arena.map(reserved, 0, [2, 6])
    assert arena.free_handles(2).tolist() == [0, 1]
    assert arena.free_handles(3).tolist() == [3, 4, 5]
    assert arena.free_handles(5).tolist() == [7, 8, 9, 10, 11]
    assert arena.free_handles(28).tolist()[:4] == [0, 1, 3, 4]
    assert arena.free_handles(5, np.array([2])).tolist() == [0, 1, 2, 3, 4]


def test_invalid_places_are_refused(arena: Arena) -> None:
    reserved = arena.reserve("range", 2 * CHUNK_BYTES)
    arena.map(reserved, 0, [0])
    with pytest.raises(ValueError, match="are mapped"):
        arena.map(reserved, 0, [1])
    with pytest.raises(ValueError, match="outside the range"):
        arena.map(reserved, 1, [1, 2])
    with pytest.raises(ValueError, match="outside the arena"):
        arena.map(reserved, 1, [32])
    with pytest.raises(ValueError, match="mapped elsewhere"):
        arena.map(reserved, 1, [0])
    with pytest.raises(ValueError, match="not all mapped"):
        arena.retire(reserved, 0, 2)
    with pytest.raises(ArenaExhausted):
        arena.free_handles(32)


def test_chunks_are_whole_pages() -> None:
    with pytest.raises(ValueError, match="page size"):
        MemfdArena(chunk_bytes=1000, total_chunks=4)


@pytest.mark.parametrize("kind", KINDS)
def test_close_is_idempotent(kind: str) -> None:
    arena = make_arena(kind, 4)
    arena.map(arena.reserve("range", CHUNK_BYTES), 0, [2])
    arena.close()
    arena.close()
    assert arena.free_chunks == 4


@pytest.mark.parametrize("seed", range(5))
def test_random_moves_preserve_chunks_and_contents(arena: Arena, seed: int) -> None:
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
                    arena.free_handles(arena.free_chunks).tolist(),
                    rng.randint(1, min(arena.free_chunks, max(1, 16 - used))),
                )
            )
            if used + len(handles) > 16:
                continue
            arena.map(reserved, used, handles)
            for offset, handle in enumerate(handles, start=used):
                tensor[offset * ELEMENTS] = float(handle)
        elif used:
            arena.retire(reserved, used - (count := rng.randint(1, used)), count)
        else:
            arena.sweep(rng.randint(1, 4))
        arena.check_invariants()
        for reserved, tensor in zip(ranges, tensors, strict=True):
            stamps = reserved.handles[: reserved.mapped_chunks].tolist()
            assert tensor[: len(stamps) * ELEMENTS : ELEMENTS].tolist() == stamps


def test_a_page_moves_from_parameters_to_a_kv_tail_without_a_copy(arena: Arena) -> None:
    shape = KvBlockShape(block_size=16, num_kv_heads=2, head_dim=64, dtype=torch.float32)
    blocks_per_chunk = CHUNK_BYTES // shape.size_bytes
    slab = LayerSlab(arena, "layer 0", SlabLayout.of([("w", (2, ELEMENTS))], torch.float32))
    kv_range = KvRange(arena, "kv of layer 0", shape)
    slab.map([0, 1])
    slab.views()["w"].fill_(7.0)
    assert slab.finish()
    kv_range.map_tail([2, 3, 4])
    kv_range.blocks().fill_(1.0)

    slab.drop()
    kv_range.map_tail([0, 1])
    with pytest.raises(LayerNotResident, match="layer 0"):
        slab.check_resident()
    assert kv_range.num_blocks == 5 * blocks_per_chunk
    assert (kv_range.blocks()[3 * blocks_per_chunk :] == 7.0).all()
    assert (kv_range.blocks()[: 3 * blocks_per_chunk] == 1.0).all()
    arena.sweep()

    kv_range.retire_tail(3)
    slab.map([0, 1])
    assert slab.finish()
    slab.check_resident()
    assert kv_range.num_blocks == 3 * blocks_per_chunk


def test_a_slab_is_read_only_after_its_digest_was_verified(arena: Arena) -> None:
    layout = SlabLayout.of([("a", (3,)), ("b", (5,))], torch.float32)
    slab = LayerSlab(arena, "layer 0", layout)
    with pytest.raises(InvalidStage, match="map it"):
        slab.bytes_to_fill()
    slab.map()
    slab.bytes_to_fill().fill_(255)
    slab.fill_from(Numbers({"a": 1.0, "b": 2.0}))
    with pytest.raises(LayerNotResident):
        slab.bytes_to_read()
    assert [slab.finish(30), slab.finish(30), slab.finish(30)] == [False, False, True]
    contents = slab.bytes_to_read().clone()
    expected = torch.zeros(layout.size_bytes // 4)
    expected[:3], expected[16:] = 1.0, 2.0
    assert contents.view(torch.float32).tolist() == expected.tolist()
    assert slab.digest == hashlib.sha256(contents.cpu().numpy()).digest()

    slab.drop()
    slab.map()
    slab.bytes_to_fill().copy_(contents)[5] ^= 1
    with pytest.raises(SlabCorrupted, match="layer 0"):
        slab.finish()
    assert slab.state is SlabState.FILLING
    assert not slab.finish(30)
    slab.bytes_to_fill().copy_(contents)
    assert slab.finish()


@pytest.mark.parametrize("on_device", [True, False])
def test_slabs_may_be_hashed_by_other_threads(arena: Arena, on_device: bool) -> None:
    """From host memory, with the digests that the engine's thread computes."""
    layout = SlabLayout.of([("a", (3,)), ("b", (5,))], torch.float32)
    slab, other = (LayerSlab(arena, name, layout) for name in ("layer 0", "layer 1"))
    right, wrong = Numbers({"a": 1.0, "b": 2.0}), Numbers({"a": 1.0, "b": 3.0})
    right.on_device = wrong.on_device = on_device
    other.map()
    other.fill_from(right)
    assert other.finish()
    with ThreadPoolExecutor(2) as hashers:
        slab.map()
        slab.fill_from(right, hashers)
        assert slab.finish()
        assert slab.digest == other.digest
        assert torch.equal(slab.bytes_to_read(), other.bytes_to_read())
        for source in (wrong, right):
            slab.drop()
            slab.map()
            slab.fill_from(source, hashers)
            if source is wrong:
                with pytest.raises(SlabCorrupted):
                    slab.finish()
            else:
                while not slab.finish(1):
                    pass
        slab.drop()
        slab.map()
        slab.fill_from(right, hashers)
        slab.fill(0, torch.ones(4, dtype=torch.uint8))  # after the hashes began
        with pytest.raises(SlabCorrupted):
            slab.finish()


def test_pieces_are_hashed_in_order(arena: Arena) -> None:
    slab = LayerSlab(arena, "layer 0", SlabLayout.of([("a", (25,))], torch.float32))
    contents = torch.arange(slab.layout.size_bytes, dtype=torch.uint8)
    pieces = [(start, contents[start : start + 30]) for start in range(0, len(contents), 30)]

    def come(order: list[tuple[int, torch.Tensor]]) -> None:
        slab.drop()
        slab.map()
        for offset_bytes, piece in order:
            slab.fill(offset_bytes, piece)

    come(pieces)
    assert slab.finish(0)
    come(pieces)
    assert slab.finish(0)  # equal to the first
    come(pieces[::-1])
    assert not slab.finish(0) and slab.finish()
    come([*pieces, (0, contents[:30].flip(0))])  # what was hashed is written again
    assert not slab.finish(0)
    with pytest.raises(SlabCorrupted):
        slab.finish()
    slab.drop()
    with pytest.raises(InvalidStage):
        slab.fill(0, contents[:30])


def test_packed_blocks_unpack_into_other_blocks(arena: Arena) -> None:
    shape = KvBlockShape(block_size=16, num_kv_heads=3, head_dim=100, dtype=torch.float32)
    here, there = (KvRange(arena, name, shape) for name in ("here", "there"))
    for kv_range in (here, there):
        kv_range.map_tail(arena.free_handles(6))
        kv_range.blocks().copy_(torch.rand(kv_range.num_blocks, *shape.dims))
    before = there.blocks().clone()
    payload = here.pack([5, 0, 3])
    assert payload.shape == (3 * shape.size_bytes,)
    there.unpack([1, 2, 7], payload)
    assert torch.equal(there.blocks()[[1, 2, 7]], here.blocks()[[5, 0, 3]])
    assert torch.equal(there.blocks()[3:7], before[3:7])
    there.relocate([7, 2], [0, 6])
    assert torch.equal(there.blocks()[[0, 6]], here.blocks()[[3, 0]])
    assert here.pack([]).shape == (0,)
    target = torch.zeros_like(payload)
    assert here.pack([5, 0, 3], target) is target and torch.equal(target, payload)
    with pytest.raises(InvalidBlocks, match="bytes of 2 blocks"):
        here.pack([5, 0], target)
    for block_ids in ([here.num_blocks], [-1]):
        with pytest.raises(InvalidBlocks, match="mapped"):
            here.pack(block_ids)
    with pytest.raises(InvalidBlocks, match="bytes of 2 blocks"):
        there.unpack([1, 2], payload)


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


def test_a_block_may_straddle_chunks(arena: Arena) -> None:
    shape = KvBlockShape(block_size=16, num_kv_heads=3, head_dim=100, dtype=torch.float32)
    assert CHUNK_BYTES % shape.size_bytes
    kv_range = KvRange(arena, "kv", shape)
    assert kv_range.num_blocks == 0
    for chunks in range(1, 6):
        kv_range.map_tail(arena.free_handles(1))
        assert kv_range.num_blocks == chunks * CHUNK_BYTES // shape.size_bytes
        assert kv_range.blocks().shape == (kv_range.num_blocks, 2, 16, 3, 100)
        kv_range.blocks().fill_(1.0)


@pytest.mark.parametrize(
    ("allowed", "chosen"),
    [
        ({(True, True), (True, False), (False, False)}, (True, True)),
        ({(True, False), (False, False)}, (True, False)),
        ({(False, False)}, (False, False)),
        (set(), (False, False)),
    ],
)
def test_memory_is_made_as_accessible_as_the_driver_allows(
    allowed: set[tuple[bool, bool]], chosen: tuple[bool, bool]
) -> None:
    tried: list[tuple[bool, bool]] = []

    def allows(shared: bool, rdma: bool) -> bool:
        tried.append((shared, rdma))
        return (shared, rdma) in allowed

    assert make_exportable(allows) == chosen
    assert tried[-1] == chosen  # what the driver was asked last is what it allocates with
