"""Slots of copies, and the order of copies and work; the streams are fakes."""

from threading import Lock, Thread

import pytest
import torch

from services.worker.engine.memory.arena import VirtualRange
from services.worker.engine.memory.cuda import CudaArena
from services.worker.engine.memory.device_copies import AHEAD_MAX, SLOTS, DeviceCopies, Fence
from services.worker.engine.memory.kv_range import KvBlockShape, KvRange
from services.worker.errors import InvalidBlocks
from tests.support.device import DEVICE, ON_GPU
from tests.support.fake_cuda_driver import FakeCudaDriver
from tests.support.fake_streams import FakeStreams

SHAPE = KvBlockShape(block_size=4, num_kv_heads=1, head_dim=16, dtype=torch.float32)
CHUNK_BYTES = 4096
CHUNKS = 6


class Device:
    """A KV range on a device that runs copies as late as possible."""

    def __init__(self) -> None:
        driver = FakeCudaDriver(CHUNK_BYTES, CHUNKS)
        self.streams = FakeStreams(driver)
        self.copies = DeviceCopies(self.streams, block_bytes=SHAPE.size_bytes)
        sizes = {"chunk_bytes": CHUNK_BYTES, "total_chunks": CHUNKS}
        self.arena = CudaArena(driver, self.copies.fence, **sizes)
        self.kv = KvRange(self.arena, "kv", SHAPE)
        self.kv.map_tail(self.arena.free_handles(4))
        for number, block in enumerate(self.kv.blocks()):
            block[:] = number

    def other_range(self) -> VirtualRange:
        return self.arena.reserve("other", CHUNK_BYTES)


@pytest.fixture
def device() -> Device:
    return Device()


def test_blocks_are_read_and_written_through_slots(device: Device) -> None:
    out = device.copies.take(2 * SHAPE.size_bytes)
    device.kv.pack([3, 1], out)
    out.wait()
    assert out.piece.view(torch.float32).view(2, -1)[:, 0].tolist() == [3.0, 1.0]
    into = device.copies.take(2 * SHAPE.size_bytes)
    into.bytes[:] = out.bytes
    device.kv.unpack([0, 2], into)
    device.copies.give_back(into)
    with device.copies.work():
        assert [float(block.max()) for block in device.kv.blocks()[:4]] == [3.0, 1.0, 1.0, 3.0]


def test_a_slot_refuses_another_number_of_blocks(device: Device) -> None:
    slot = device.copies.take(SHAPE.size_bytes)
    for copy in (device.kv.pack, device.kv.unpack):
        with pytest.raises(InvalidBlocks):
            copy([1, 2], slot)


def test_pieces_that_are_read_early_leave_slots_for_others(device: Device) -> None:
    early = [device.copies.take_ahead(64) for _ in range(SLOTS)]
    taken = [slot for slot in early if slot is not None]
    assert len(taken) == AHEAD_MAX
    for _ in range(3):
        device.copies.give_back(device.copies.take(64))
    device.copies.give_back(taken[0])
    assert device.copies.take_ahead(64) is not None


def test_a_slot_is_used_again_after_its_copy(device: Device) -> None:
    for number in range(2 * SLOTS):
        slot = device.copies.take(SHAPE.size_bytes)
        slot.piece.view(torch.float32)[:] = 100 + number
        device.kv.unpack([number % 8], slot)
        device.copies.give_back(slot)
    with device.copies.work():
        contents = [float(block.max()) for block in device.kv.blocks()[:8]]
    assert contents == [100.0 + number for number in range(SLOTS, 2 * SLOTS)]


@pytest.mark.parametrize("ordered", [True, False])
def test_memory_is_unmapped_after_the_copies_that_read_it(
    device: Device, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    slot = device.copies.take(SHAPE.size_bytes)
    last = device.kv.num_blocks - 1
    device.kv.pack([last], slot)
    device.kv.retire_tail(1)
    if not ordered:
        monkeypatch.setattr(Fence, "passed", lambda fence: True)
        monkeypatch.setattr(Fence, "wait", lambda fence: None)
        with pytest.raises(AssertionError, match="memory is unmapped that a copy uses"):
            device.arena.sweep(3)
        return
    while not device.arena.sweep(1):
        pass
    assert slot.piece.view(torch.float32)[0] == last
    assert ("ran", "copies", 1) in device.streams.log


def test_other_chunks_are_mapped_after_the_copies_that_read_the_place(device: Device) -> None:
    slot = device.copies.take(SHAPE.size_bytes)
    device.kv.pack([device.kv.num_blocks - 1], slot)
    device.kv.retire_tail(3)
    device.arena.await_retired()
    device.streams.locks.append(lock := Lock())
    with lock:
        device.kv.map_tail([4])
    assert slot.piece.view(torch.float32)[0] == 31.0


def test_each_thread_that_copies_has_the_device(device: Device) -> None:
    device.copies.give_back(device.copies.take(64))
    device.copies.give_back(device.copies.take(64))
    assert device.streams.bound == 1
    thread = Thread(target=lambda: device.copies.give_back(device.copies.take(64)))
    thread.start()
    thread.join()
    assert device.streams.bound == 2


@pytest.mark.skipif(not ON_GPU, reason="the streams are a GPU's")
@pytest.mark.parametrize("head_dim", [16, 3], ids=["words", "bytes"])
def test_copies_of_a_gpu_are_ordered_with_the_pass(head_dim: int) -> None:
    """Blocks of whole 64-bit words are copied as words, others as bytes."""
    from services.worker.engine.memory.cuda_driver import CudaDriver
    from services.worker.engine.memory.cuda_streams import CudaStreams

    device = torch.device(DEVICE)
    shape = KvBlockShape(block_size=1, num_kv_heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    streams = CudaStreams(device, copy_bytes=1 << 20, block_bytes=shape.size_bytes)
    copies = DeviceCopies(streams, block_bytes=shape.size_bytes)
    driver = CudaDriver(device)
    arena = CudaArena(
        driver, copies.fence, chunk_bytes=driver.granularity_bytes, total_chunks=CHUNKS
    )
    kv = KvRange(arena, "kv", shape)
    kv.map_tail(arena.free_handles(2))
    ids = torch.randperm(kv.num_blocks)[:1000].tolist()
    with copies.work():
        kv.blocks().copy_(torch.rand(kv.num_blocks, *shape.dims))
        expected = kv.pack(ids)
    copies.begin_work()
    torch.cuda._sleep(2_000_000_000)  # about a second of an iteration
    slot = copies.take(len(expected))
    kv.pack(ids, slot)
    slot.wait()
    ended = torch.cuda.Event()
    ended.record()
    assert not ended.query(), "the copy has waited for the iteration"
    assert torch.equal(slot.piece, expected)
    copies.give_back(slot)
    copies.end_work()
    slot = copies.take(len(expected))
    slot.piece.copy_(expected.flip(0))
    kv.unpack(ids, slot)
    copies.give_back(slot)
    with copies.work():
        assert torch.equal(kv.pack(ids), expected.flip(0))
    kv.retire_tail(1)
    while not arena.sweep(1):
        pass
    arena.close()
