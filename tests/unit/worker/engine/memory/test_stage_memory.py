"""Drop and restore without a model: the memory layout after every step."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.core.groups.slab_names import EMBEDDING, HEAD, layer_name
from services.worker.engine.memory.budget import MemoryDemand, plan_memory
from services.worker.engine.memory.kv_range import KvBlockShape
from services.worker.engine.memory.layer_slab import SlabLayout
from services.worker.engine.memory.stage_memory import StageMemory
from services.worker.engine.model.loader import DummySource
from services.worker.errors import (
    ArenaExhausted,
    InvalidBlocks,
    InvalidStage,
    LayerNotResident,
    SlabCorrupted,
)
from tests.support.device import CHUNK_BYTES, KINDS, ON_GPU, make_arena

LAYERS = 6
# A block is smaller than a chunk and does not divide it.
SHAPE = KvBlockShape(block_size=16, num_kv_heads=3, head_dim=50, dtype=torch.float32)


def make_memory(tied: bool = False, kind: str = KINDS[0]) -> StageMemory:
    layer = [("w", (3, CHUNK_BYTES // 4)), ("b", (100,))]
    layouts = {EMBEDDING: SlabLayout.of([("e", (50_000,))], torch.float32)}
    for index in range(LAYERS):
        layouts[layer_name(index)] = SlabLayout.of(
            [(f"{index}.{name}", shape) for name, shape in layer], torch.float32
        )
    layouts[HEAD] = SlabLayout.of([("h", (1000 if tied else 50_000,))], torch.float32)
    demand = MemoryDemand(
        slab_bytes=tuple(layout.size_bytes for layout in layouts.values()),
        num_layers=LAYERS,
        kv_block_bytes=SHAPE.size_bytes,
        block_size=SHAPE.block_size,
        staging_bytes=0,
    )
    plan = plan_memory(90 * CHUNK_BYTES, demand, min_tokens=16, chunk_bytes=CHUNK_BYTES)
    arena = make_arena(kind, plan.total_chunks)
    memory = StageMemory(
        arena,
        plan,
        layouts,
        SHAPE,
        num_layers=LAYERS,
        tied_embeddings=tied,
        open_source=DummySource,
    )
    memory.load()
    return memory


@pytest.fixture(params=KINDS)
def memory(request: pytest.FixtureRequest) -> Iterator[StageMemory]:
    memory = make_memory(kind=request.param)
    yield memory
    memory.check_invariants()
    memory.arena.close()


def layout_of(memory: StageMemory) -> list[object]:
    """The state that a full restore must reproduce."""
    return [
        memory.layers,
        memory.num_blocks,
        memory.parameter_bytes,
        memory.arena.free_chunks,
        memory.arena.retired_chunks,
        [kv_range.mapped_chunks for kv_range in memory.kv_ranges],
        [slab.state for slab in memory.slabs.values()],
    ]


def restore(memory: StageMemory, first: int = 0, end: int = LAYERS) -> None:
    memory.shrink_kv(memory.blocks_after_adding(first, end), used_blocks=0)
    missing = memory.missing_slabs(first, end)
    for name in missing:
        memory.map_layer_parameters(name)
    for name in missing:
        memory.load_layer(name)
        assert memory.finish_layer(name)
    memory.map_kv_of(range(first, end))
    memory.check_invariants()
    memory.set_stage(first, end)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("tideserve-arena")


def test_a_stage_keeps_its_parameters(memory: StageMemory) -> None:
    memory.set_stage(2, 4)
    assert memory.missing_slabs(0, 2) == [EMBEDDING, layer_name(0), layer_name(1)]
    assert memory.missing_slabs(2, 4) == []
    assert memory.missing_slabs(4, 6) == [layer_name(4), layer_name(5), HEAD]
    for first, end in ((-1, 2), (2, 2), (3, 2), (0, 7)):
        with pytest.raises(InvalidStage, match="no stage"):
            memory.set_stage(first, end)


def test_a_tied_head_keeps_the_embedding() -> None:
    memory = make_memory(tied=True)
    memory.set_stage(3, 6)
    assert memory.slabs[EMBEDDING].resident
    memory.arena.close()


def test_a_drop_maps_what_it_frees_evenly(memory: StageMemory) -> None:
    """The second phase changes only old mappings."""
    before = memory.num_blocks
    for layer in (0, 5):
        memory.kv_ranges[layer].blocks()[:] = float(layer + 1)
    report = memory.set_stage(0, 3)
    memory.check_invariants()
    slabs = [layer_name(3), layer_name(4), layer_name(5), HEAD]
    dropped_chunks = sum(memory.slabs[name].chunks for name in slabs)
    assert report.dropped_bytes == dropped_chunks * CHUNK_BYTES
    spare = (memory.plan.total_chunks - memory.plan.parameter_chunks) % LAYERS
    rows = (dropped_chunks + spare) // 3
    assert report.mapped_bytes == rows * 3 * CHUNK_BYTES
    assert report.num_blocks == memory.num_blocks > before
    assert [kv_range.mapped_chunks for kv_range in memory.kv_ranges] == [
        *[memory.plan.kv_chunks_per_layer + rows] * 3,
        *[memory.plan.kv_chunks_per_layer] * 3,
    ]
    assert memory.departed_layers == [3, 4, 5]
    assert memory.departed_blocks == before
    assert memory.arena.retired_chunks == dropped_chunks
    calls = 0
    while not memory.finish_drop(CHUNK_BYTES):
        calls += 1
        memory.check_invariants()
    assert calls >= dropped_chunks // memory.arena.slice_chunks_min - 1
    assert memory.arena.retired_chunks == 0
    assert (memory.kv_ranges[0].blocks()[:before] == 1.0).all()
    assert (memory.kv_ranges[5].blocks() == 6.0).all()


def test_a_prepared_drop_maps_no_more_memory(memory: StageMemory) -> None:
    other = make_memory()
    before = layout_of(memory)
    memory.prepare_drop(0, 3)
    assert layout_of(memory) == before
    slices = 0
    while not memory.drop_prepared:
        memory.continue_drop(CHUNK_BYTES)
        slices += 1
    assert slices > 1 or not memory.arena.maps_later
    assert layout_of(memory) == before
    memory.finish_drop(None)
    prepared, plain = memory.set_stage(0, 3), other.set_stage(0, 3)
    assert (prepared.map_calls, prepared.mapped_bytes) == (0, plain.mapped_bytes)
    assert plain.map_calls > 0
    assert layout_of(memory) == layout_of(other)
    assert memory.finish_drop(None)
    memory.kv_ranges[0].blocks()[:] = 1.0
    assert memory.slabs[layer_name(0)].resident
    other.arena.close()


@pytest.mark.parametrize("stage", [(0, 6), (0, 3)], ids=["nothing leaves", "another stage"])
def test_a_drop_prepared_for_another_plan_runs_unprepared(
    memory: StageMemory, stage: tuple[int, int]
) -> None:
    other = make_memory()
    memory.prepare_drop(3, 6)
    assert memory.set_stage(*stage).num_blocks == other.set_stage(*stage).num_blocks
    memory.finish_drop(None)
    other.finish_drop(None)
    assert layout_of(memory) == layout_of(other)
    other.arena.close()


def test_a_prepared_drop_that_is_cancelled_leaves_nothing(memory: StageMemory) -> None:
    before, maps = layout_of(memory), mappings()
    memory.prepare_drop(2, 4)
    memory.continue_drop(CHUNK_BYTES)  # on a GPU, a part of it
    assert ON_GPU or mappings() > maps
    memory.cancel_drop()
    memory.finish_drop(None)
    assert (layout_of(memory), mappings()) == (before, maps)


def test_departed_kv_is_released_from_above(memory: StageMemory) -> None:
    before = memory.num_blocks
    memory.kv_ranges[5].blocks()[:] = 6.0
    memory.set_stage(0, 3)
    grown = [memory.num_blocks]
    for needed in (before, before // 2, before // 3, 0):
        grown.append(memory.release_departed(needed))
        memory.check_invariants()
        if needed:
            assert needed <= memory.departed_blocks <= before
        assert (memory.kv_ranges[5].blocks() == 6.0).all()
    assert grown == sorted(grown)
    assert grown[0] == grown[1] < grown[2] < grown[-1] == memory.num_blocks
    assert memory.departed_layers == []
    free_rows = memory.arena.free_chunks // 3
    assert free_rows == 0


def test_a_full_restore_brings_the_first_layout_back(memory: StageMemory) -> None:
    before = layout_of(memory)
    contents = {name: slab.bytes_to_read().clone() for name, slab in memory.slabs.items()}
    for first, end in ((0, 3), (3, 6), (2, 4), (0, 1)):
        memory.set_stage(first, end)
        memory.finish_drop(None)
        memory.release_departed(0)
        restore(memory)
        memory.finish_drop(None)
        assert layout_of(memory) == before
        for name, slab in memory.slabs.items():
            assert torch.equal(slab.bytes_to_read(), contents[name])


def test_a_slab_comes_from_a_peer_in_pieces(memory: StageMemory) -> None:
    peer = make_memory()
    memory.set_stage(0, 3)
    memory.release_departed(0)
    memory.shrink_kv(memory.blocks_after_adding(0, 6), used_blocks=0)
    name = layer_name(4)
    with pytest.raises(InvalidStage):
        memory.slab_bytes(name)
    memory.map_layer_parameters(name)
    with pytest.raises(InvalidStage, match="is filling"):
        memory.map_layer_parameters(name)
    with pytest.raises(LayerNotResident):
        memory.set_stage(0, 6)
    with pytest.raises(LayerNotResident):
        memory.pack_slab(name, 0, torch.empty(8, dtype=torch.uint8))
    size_bytes = len(memory.slab_bytes(name))
    for offset in range(0, size_bytes, 50_000):
        target = torch.empty(min(50_000, size_bytes - offset), dtype=torch.uint8)
        memory.unpack_slab(name, offset, peer.pack_slab(name, offset, target))
    with pytest.raises(InvalidStage, match="no bytes"):
        memory.unpack_slab(name, size_bytes - 1, torch.zeros(2, dtype=torch.uint8))
    memory.slab_bytes(name)[17] ^= 1
    with pytest.raises(SlabCorrupted):
        memory.finish_layer(name)
    memory.slab_bytes(name)[17] ^= 1
    assert not memory.finish_layer(name, max_bytes=100)
    assert memory.finish_layer(name)
    assert memory.slab_digest(name) == peer.slab_digest(name)
    memory.abandon_restore()
    peer.arena.close()


def test_a_restore_can_be_aborted_at_any_step(memory: StageMemory) -> None:
    memory.set_stage(0, 3)
    memory.release_departed(0)
    memory.finish_drop(None)
    before = layout_of(memory)
    for steps in range(5):
        memory.shrink_kv(memory.blocks_after_adding(0, 6), used_blocks=0)
        if steps > 0:
            memory.map_layer_parameters(HEAD)
        if steps > 1:
            memory.load_layer(HEAD)
            memory.finish_layer(HEAD)
        if steps > 2:
            memory.map_kv_of([3])
        if steps > 3:
            memory.map_layer_parameters(layer_name(5))
            with pytest.raises(InvalidStage, match="being restored"):
                memory.set_stage(0, 2)
        memory.check_invariants()
        memory.abandon_restore()
        memory.finish_drop(None)
        assert layout_of(memory) == before


def test_an_aborted_restore_can_keep_verified_slabs(memory: StageMemory) -> None:
    whole_blocks = memory.num_blocks
    memory.set_stage(0, 3)
    memory.release_departed(0)
    memory.finish_drop(None)
    memory.shrink_kv(memory.blocks_after_adding(0, 6), used_blocks=0)
    memory.map_layer_parameters(layer_name(3))
    memory.load_layer(layer_name(3))
    memory.finish_layer(layer_name(3))
    memory.map_layer_parameters(layer_name(4))
    missing = memory.missing_slabs(0, 6)
    memory.abandon_restore(keep_verified=True)
    memory.check_invariants()
    assert memory.missing_slabs(0, 6) == missing, "layer 3 is here, layer 4 is not"
    memory.shrink_kv(memory.blocks_after_adding(0, 6), used_blocks=0)
    for name in missing:
        memory.map_layer_parameters(name)
        memory.load_layer(name)
        memory.finish_layer(name)
    memory.map_kv_of([3, 4, 5])
    memory.set_stage(0, 6)
    memory.check_invariants()
    assert memory.num_blocks == whole_blocks


def test_a_restore_out_of_order_is_refused(memory: StageMemory) -> None:
    blocks = memory.num_blocks
    memory.set_stage(0, 3)
    with pytest.raises(ArenaExhausted):
        memory.map_layer_parameters(layer_name(3))
    with pytest.raises(InvalidBlocks, match="relocate"):
        memory.shrink_kv(blocks, used_blocks=blocks + 1)
    memory.shrink_kv(blocks, used_blocks=blocks)
    with pytest.raises(InvalidStage, match="release"):
        memory.map_kv_of([3])
    memory.release_departed(0)
    assert memory.num_blocks == blocks, "KV grows no more while a restore needs the memory"
    for name in memory.missing_slabs(0, 6):
        memory.map_layer_parameters(name)
        memory.load_layer(name)
        memory.finish_layer(name)
    with pytest.raises(InvalidStage, match="map_kv_of"):
        memory.set_stage(0, 6)
    memory.map_kv_of([3, 4, 5])
    assert memory.set_stage(0, 6).num_blocks == memory.plan.num_blocks


def test_relocation_moves_blocks_of_all_layers_down(memory: StageMemory) -> None:
    memory.set_stage(0, 3)
    memory.release_departed(5)
    top = memory.num_blocks - 1
    for layer in range(4):
        blocks = memory.kv_ranges[layer].blocks()
        blocks[:] = torch.arange(float(len(blocks))).view(-1, 1, 1, 1, 1) + 1000 * layer
    memory.relocate([(top, 2), (top - 3, 7), (4, 3)])
    for layer in range(3):
        blocks = memory.kv_ranges[layer].blocks()
        assert [float(blocks[index].max()) - 1000 * layer for index in (2, 7, 3, 1)] == [
            *(top, top - 3, 4, 1),
        ]
    # The departed layer has blocks 0 to 4 and the rest of their chunk.
    departed = memory.kv_ranges[3].blocks()
    assert [float(departed[index].max()) - 3000 for index in (2, 3)] == [2, 4]
    for moves in ([(1, 2)], [(5, 3), (6, 3)], [(5, 3), (3, 1)], [(5, -1)], [(top + 1, 0)]):
        with pytest.raises(InvalidBlocks):
            memory.relocate(moves)


def test_mappings_do_not_accumulate(memory: StageMemory) -> None:
    rng = random.Random(0)
    at_start = mappings()
    counts = []
    for _ in range(60):
        first = rng.randrange(LAYERS)
        memory.set_stage(first, rng.randint(first + 1, LAYERS))
        memory.release_departed(rng.randrange(memory.num_blocks))
        memory.release_departed(0)
        restore(memory)
        memory.finish_drop(None)
        counts.append(mappings())
    assert max(counts[30:]) <= max(counts[:30])
    assert max(counts) <= 2 * at_start


class Life:
    """Random legal steps on one stage memory; a block of KV carries its layer and id as a stamp."""

    def __init__(self, seed: int, kind: str) -> None:
        self.rng = random.Random(seed)
        self.memory = make_memory(self.rng.random() < 0.5, kind)
        self.contents = {
            name: slab.bytes_to_read().clone() for name, slab in self.memory.slabs.items()
        }
        self.used: dict[int, float] = {}  # block id → stamp
        self.target: tuple[int, int] | None = None  # of a restore under way
        self.prepared: tuple[int, int] | None = None  # the stage of a drop to come

    def stamp(self, layer: int, block: int) -> torch.Tensor:
        return self.memory.kv_ranges[layer].blocks()[block]

    def step(self) -> None:
        memory, rng = self.memory, self.rng
        steps = [self.allocate, self.free, self.background]
        if self.target is None:
            steps += [self.drop, self.prepare, self.cancel, self.release, self.relocate]
            if not memory.departed_layers and len(memory.layers) < LAYERS:
                steps += [self.begin_restore] * 2
        else:
            steps += [self.restore_slab] * 4 + [self.end_restore, self.abandon]
        rng.choice(steps)()
        self.check()

    def allocate(self) -> None:
        free = [block for block in range(self.memory.num_blocks) if block not in self.used]
        for block in self.rng.sample(free, min(len(free), 3)):
            self.used[block] = self.rng.random()
            for layer in self.memory.layers:
                self.stamp(layer, block).fill_(self.used[block] + layer)

    def free(self) -> None:
        for block in self.rng.sample(sorted(self.used), len(self.used) // 2):
            del self.used[block]

    def background(self) -> None:
        self.memory.continue_drop(self.rng.choice([CHUNK_BYTES, 3 * CHUNK_BYTES, None]))
        self.memory.finish_drop(self.rng.choice([CHUNK_BYTES, 3 * CHUNK_BYTES, None]))

    def drop(self) -> None:
        layers = self.memory.layers
        first = self.rng.randrange(layers.start, layers.stop)
        prepared, self.prepared = self.prepared, None
        if prepared is None or self.rng.random() < 0.2:
            prepared = (first, self.rng.randint(first + 1, layers.stop))
        self.memory.set_stage(*prepared)

    def prepare(self) -> None:
        layers = self.memory.layers
        first = self.rng.randrange(layers.start, layers.stop)
        self.prepared = (first, self.rng.randint(first + 1, layers.stop))
        self.memory.prepare_drop(*self.prepared)

    def cancel(self) -> None:
        self.prepared = None
        self.memory.cancel_drop()

    def release(self) -> None:
        self.memory.release_departed(
            self.rng.choice([0, self.rng.randrange(self.memory.num_blocks)])
        )

    def relocate(self) -> None:
        top = max(self.used, default=0)
        free = [block for block in range(top) if block not in self.used]
        if top and free:
            target = self.rng.choice(free)
            self.memory.relocate([(top, target)])
            self.used[target] = self.used.pop(top)

    def begin_restore(self) -> None:
        layers = self.memory.layers
        target = (self.rng.randint(0, layers.start), self.rng.randint(layers.stop, LAYERS))
        limit = self.memory.blocks_after_adding(*target)
        self.used = {block: stamp for block, stamp in self.used.items() if block < limit}
        self.memory.shrink_kv(limit, used_blocks=max(self.used, default=-1) + 1)
        self.target, self.prepared = target, None

    def restore_slab(self) -> None:
        assert self.target is not None
        missing = self.memory.missing_slabs(*self.target)
        if not missing:
            return
        name = self.rng.choice(missing)
        self.memory.map_layer_parameters(name)
        if self.rng.random() < 0.5:
            self.memory.load_layer(name)
        else:
            self.memory.unpack_slab(name, 0, self.contents[name])
        while not self.memory.finish_layer(name, max_bytes=200_000):
            self.check()

    def end_restore(self) -> None:
        assert self.target is not None
        if self.memory.missing_slabs(*self.target):
            return
        self.memory.map_kv_of(range(*self.target))
        for layer in set(range(*self.target)) - set(self.memory.layers):
            for block, stamp in self.used.items():
                self.stamp(layer, block).fill_(stamp + layer)
        self.memory.set_stage(*self.target)
        self.target = None

    def abandon(self) -> None:
        self.memory.abandon_restore()
        self.target = None

    def check(self) -> None:
        self.memory.check_invariants()
        for name, slab in self.memory.slabs.items():
            if slab.resident:
                assert torch.equal(slab.bytes_to_read(), self.contents[name])
        for layer in self.memory.layers:
            for block, stamp in self.used.items():
                expected = torch.tensor(stamp + layer, dtype=torch.float32)
                assert (self.stamp(layer, block) == expected).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_random_steps_preserve_memory_and_contents(seed: int, kind: str) -> None:
    life = Life(seed, kind)
    for _ in range(80):
        life.step()
    life.memory.arena.close()
