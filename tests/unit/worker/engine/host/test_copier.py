"""Copier jobs: copied blocks, untouched blocks of others, and results."""

import select
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch

from services.core.host.vocabulary import RecallBlocks, RecalledBlock, SaveBlocks, SavedBlock
from services.core.planner.block_pool import BlockPool
from services.core.planner.block_table import StageTable
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.host.copier import TASKS_MAX, HostCopier, JobEnd, StepEnd
from services.worker.engine.host.store import HostStore
from services.worker.engine.memory.cuda import CudaArena
from services.worker.engine.memory.device_copies import DeviceCopies
from services.worker.engine.memory.kv_range import KvRange
from services.worker.engine.pipeline.piece_copies import PieceCopies
from services.worker.engine.pipeline.stage_runner import StageRunner
from services.worker.errors import InvalidBlocks
from tests.support.fake_cuda_driver import FakeCudaDriver
from tests.support.fake_model import BLOCKS, FAKE, LAYERS, SHAPE, load_fake
from tests.support.fake_streams import FakeStreams

WAIT_MS = 20_000
SLOTS = 40
GPU_CHUNK_BYTES, GPU_CHUNKS = 4096, 60


class GpuMemory:
    """KV of all layers on a fake GPU, with as much of a `StageMemory` as the copier needs."""

    def __init__(self, streams: FakeStreams, driver: FakeCudaDriver) -> None:
        self.copies = DeviceCopies(streams, block_bytes=SHAPE.size_bytes)
        sizes = {"chunk_bytes": GPU_CHUNK_BYTES, "total_chunks": GPU_CHUNKS}
        arena = CudaArena(driver, self.copies.fence, **sizes)
        self.kv_ranges = [KvRange(arena, f"kv {layer}", SHAPE) for layer in range(LAYERS)]
        chunks = self.kv_ranges[0].chunks_for(BLOCKS)
        for kv_range in self.kv_ranges:
            kv_range.map_tail(arena.free_handles(chunks))

    def pack_kv(self, layer: int, ids: list[int], target: torch.Tensor) -> torch.Tensor:
        return self.kv_ranges[layer].pack(ids, target)

    def unpack_kv(self, layer: int, ids: list[int], payload: torch.Tensor) -> None:
        self.kv_ranges[layer].unpack(ids, payload)


class Place:
    """A worker's memory with a copier; `blocks` maps the places of jobs to device blocks."""

    def __init__(self, on_gpu: bool = False, slots: int = SLOTS) -> None:
        self.runner = load_fake(FAKE)
        self.memory = self.runner.stage_memory
        if on_gpu:
            driver = FakeCudaDriver(GPU_CHUNK_BYTES, GPU_CHUNKS)
            self.streams = FakeStreams(driver, seed=3)
            memory = GpuMemory(self.streams, driver)
            holder = type("Runner", (), {"stage_memory": memory})()
            stage = StageRunner(cast(ModelRunner, holder), StageTable(BlockPool(BLOCKS)))
            self.streams.locks.append(stage.lock)
            self.kv_ranges = memory.kv_ranges
        else:
            stage = StageRunner(self.runner, StageTable(BlockPool(BLOCKS)))
            self.kv_ranges = self.memory.kv_ranges
        self.stage = stage
        self.blocks: dict[int, list[int | None]] = {}
        size = SHAPE.size_bytes
        self.store = HostStore(LAYERS, size, slots * LAYERS * size, lambda: 1 << 40)
        self.store.grow()
        self.looked: Callable[[], None] = lambda: None
        self.copier = HostCopier(
            PieceCopies(stage), stage.runner.stage_memory, self.store, self._block_of
        )

    def _block_of(self, job: int, place: int) -> int | None:
        assert self.stage.lock.locked()
        self.looked()
        return self.blocks[job][place]

    def value(self, layer: int, block: int) -> int:
        kv = self.kv_ranges[layer].blocks()[block]
        assert (kv == kv[0, 0, 0, 0]).all()
        return int(kv[0, 0, 0, 0])

    def fill(self, offset: int = 0) -> None:
        for layer in range(LAYERS):
            self.kv_ranges[layer].blocks()[:BLOCKS] = (
                torch.arange(BLOCKS).view(-1, 1, 1, 1, 1) + 1000 * layer + offset
            )

    def save(self, job: int, blocks: list[int | None], due_s: float = 0.0) -> None:
        self.blocks[job] = blocks
        saved = tuple(SavedBlock(bytes([job, i]), job * 10 + i) for i in range(len(blocks)))
        assert self.copier.submit(SaveBlocks(job, saved), due_s)

    def recall(self, job: int, of: int, blocks: list[int | None], due_s: float = 0.0) -> None:
        self.blocks[job] = blocks
        recalled = tuple(RecalledBlock(bytes([of, i]), of * 10 + i, i) for i in range(len(blocks)))
        assert self.copier.submit(RecallBlocks(job, "@recall.1", recalled), due_s)

    def next_ends(self, count: int = 1) -> list[JobEnd | StepEnd]:
        ends: list[JobEnd | StepEnd] = []
        poll = select.poll()
        poll.register(self.copier.fileno(), select.POLLIN)
        while len(ends) < count:
            assert poll.poll(WAIT_MS), "the copier has not answered"
            ends += self.copier.ends()
        return ends

    def intact(self) -> tuple[bool, ...]:
        (end,) = self.next_ends()
        assert isinstance(end, JobEnd)
        return end.intact

    def close(self) -> None:
        self.copier.close()
        self.runner.close()


@pytest.fixture(params=[False, True], ids=["cpu", "fake gpu"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(request.param)
    made.fill()
    yield made
    made.close()


def test_saved_blocks_are_restored_to_other_blocks_in_every_layer(place: Place) -> None:
    place.copier.start()
    place.save(1, [4, 9, 2])
    assert place.intact() == (True, True, True)
    place.fill(offset=500)
    place.recall(2, 1, [11, 3, 7])
    assert place.intact() == (True, True, True)
    if place.stage.runner.stage_memory.copies is not None:
        place.streams.run_until(place.streams._started)
    stored = {11: 4, 3: 9, 7: 2}
    for layer in range(LAYERS):
        for block in range(BLOCKS):
            expected = stored.get(block, block + 500)
            assert place.value(layer, block) == expected + 1000 * layer


def test_a_released_block_is_skipped(place: Place) -> None:
    looks = 0

    def evict() -> None:
        nonlocal looks
        looks += 1
        if looks == 5:  # during the second layer
            place.blocks[1][1] = None

    place.looked = evict
    place.copier.start()
    place.save(1, [4, 9, 2])
    assert place.intact() == (True, False, True)
    place.looked = lambda: None
    place.recall(2, 1, [5, 6, 7])
    assert place.intact() == (True, False, True)  # never sealed


def test_a_block_may_be_relocated_between_pieces() -> None:
    place = Place()
    place.fill()

    def relocate() -> None:
        if place.blocks[1] == [4]:
            for kv_range in place.kv_ranges:
                kv_range.relocate([4], [15])
            place.blocks[1] = [15]

    place.copier.start()
    place.looked = relocate
    place.save(1, [4])
    assert place.intact() == (True,)
    place.recall(2, 1, [0])
    assert place.intact() == (True,)
    assert [place.value(layer, 0) for layer in range(LAYERS)] == [4, 1004, 2004]
    place.close()


def test_a_damaged_copy_is_not_copied_back(place: Place) -> None:
    place.copier.start()
    place.save(1, [4, 9])
    assert place.intact() == (True, True)
    place.store._blocks[10, 1, 0] ^= 1
    place.recall(2, 1, [5, 6])
    assert place.intact() == (False, True)
    assert place.value(0, 5) == 5


def test_a_cancelled_job_ends_early_and_is_not_intact(place: Place) -> None:
    place.looked = lambda: place.copier.cancel(1)
    place.copier.start()
    place.save(1, [4, 9], due_s=float("inf"))
    assert place.intact() == (False, False)
    assert not place.copier.is_busy
    place.copier.cancel(1)  # unknown by now


def test_blocks_beyond_the_mapped_memory_are_not_intact(place: Place) -> None:
    place.copier.start()
    place.save(1, [4, 10**6])
    assert place.intact() == (False, False)


def test_a_paced_job_ends_when_it_is_cancelled(place: Place) -> None:
    place.copier.start()
    place.save(1, [4], due_s=float("inf"))
    poll = select.poll()
    poll.register(place.copier.fileno(), select.POLLIN)
    assert not poll.poll(50) and place.copier.is_busy
    place.copier.cancel(1)
    place.intact()


def test_jobs_and_steps_end_in_order(place: Place) -> None:
    place.save(1, [4])
    place.copier.grow()
    place.recall(2, 1, [5])
    place.copier.start()
    first, step, last = place.next_ends(3)
    assert isinstance(first, JobEnd) and first.command.job == 1
    assert isinstance(step, StepEnd) and step.slots == SLOTS and not step.problem
    assert isinstance(last, JobEnd) and last.command.job == 2


def test_the_queue_is_bounded() -> None:
    place = Place()
    for job in range(TASKS_MAX):
        place.save(job, [])
    assert not place.copier.submit(SaveBlocks(TASKS_MAX, ()), 0.0)
    place.close()


def test_a_step_that_fails_names_its_problem() -> None:
    place = Place(slots=200)
    place.store = HostStore(LAYERS, SHAPE.size_bytes, 1 << 20, lambda: 0)
    place.copier = HostCopier(PieceCopies(place.stage), place.memory, place.store, place._block_of)
    place.copier.start()
    place.copier.grow()
    (end,) = place.next_ends()
    assert isinstance(end, StepEnd) and end.slots == 0
    assert "host copies stay at 0 MiB" in end.problem
    place.close()


def test_a_failed_thread_notifies_and_is_dead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place()
    monkeypatch.setattr(HostStore, "write", lambda *_: 1 / 0)
    place.copier.start()
    place.save(1, [4])
    poll = select.poll()
    poll.register(place.copier.fileno(), select.POLLIN)
    assert poll.poll(WAIT_MS)
    assert place.copier._thread is not None
    place.copier._thread.join(WAIT_MS / 1000)
    assert not place.copier.is_alive
    assert "the thread that copies KV to and from host memory has failed" in caplog.text
    place.close()


def test_a_refused_piece_does_not_end_the_thread(
    monkeypatch: pytest.MonkeyPatch, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.copier.start()
    memory = type(place.stage.runner.stage_memory)

    def refuse(*_: object) -> None:
        raise InvalidBlocks("unmapped")

    monkeypatch.setattr(memory, "pack_kv", refuse)
    for job in (1, 2):
        place.save(job, [4])
        assert place.intact() == (False,)
    assert place.copier.is_alive
    warnings = [record for record in caplog.records if "not copied to or" in record.message]
    assert len(warnings) == 1, "the planner repeats refused saves"


def test_a_refused_recall_leaves_open_whether_copies_are_damaged(
    monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    """Intact copies must not be dropped as damaged ones."""
    place.copier.start()
    place.save(1, [4, 9, 2])
    assert place.intact() == (True, True, True)
    monkeypatch.setattr(place.copier, "_piece_blocks", 2)
    memory = type(place.stage.runner.stage_memory)
    unpack = memory.unpack_kv

    def refuse(own: object, layer: int, ids: list[int], payload: torch.Tensor) -> None:
        if 7 in ids:
            raise InvalidBlocks("unmapped")
        unpack(own, layer, ids, payload)

    monkeypatch.setattr(memory, "unpack_kv", refuse)
    place.recall(2, 1, [5, 6, 7])
    assert place.intact() == (True, True)
    place.store._blocks[10, 1, 0] ^= 1
    place.recall(3, 1, [5, 6, 7])
    assert place.intact() == (False, True)
    place.store._blocks[10, 1, 0] ^= 1
    place.recall(4, 1, [7, 6, 5])
    assert place.intact() == ()
    assert place.copier.is_alive
