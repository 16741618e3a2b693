import numpy as np

from services.worker.engine.transfer.frame import KEPT_S, LARGE_BYTES, FrameMemory


def test_returned_memory_is_reused() -> None:
    memory = FrameMemory(4 * LARGE_BYTES)
    first = memory.take(2 * LARGE_BYTES)
    second = memory.take(2 * LARGE_BYTES)
    assert first.size == second.size == 2 * LARGE_BYTES and not np.shares_memory(first, second)
    memory.give_back(first)
    smaller = memory.take(2 * LARGE_BYTES - 1)
    assert np.shares_memory(smaller, first) and smaller.size == 2 * LARGE_BYTES - 1
    memory.give_back(smaller)
    assert np.shares_memory(memory.take(2 * LARGE_BYTES), first)


def test_memory_of_another_size_is_not_reused() -> None:
    memory = FrameMemory(4 * LARGE_BYTES)
    kept = memory.take(2 * LARGE_BYTES)
    memory.give_back(kept)
    assert not np.shares_memory(memory.take(2 * LARGE_BYTES + 1), kept)
    assert not np.shares_memory(memory.take(LARGE_BYTES), kept)


def test_little_memory_is_pooled_and_no_small_buffers() -> None:
    memory = FrameMemory(3 * LARGE_BYTES)
    old, new = (memory.take(2 * LARGE_BYTES) for _ in range(2))
    memory.give_back(old)
    memory.give_back(new)
    assert np.shares_memory(memory.take(2 * LARGE_BYTES), new)
    assert not np.shares_memory(memory.take(2 * LARGE_BYTES), old)
    small = memory.take(LARGE_BYTES - 1)
    memory.give_back(small)
    assert not np.shares_memory(memory.take(LARGE_BYTES - 1), small)


def test_unused_memory_is_freed() -> None:
    memory = FrameMemory(16 * LARGE_BYTES)
    often, once, large = (memory.take(size * LARGE_BYTES) for size in (1, 1, 3))
    for buffer in (large, once, often):
        memory.give_back(buffer)
    for turn in range(3):
        memory.expire(turn * KEPT_S)
        taken = memory.take(LARGE_BYTES)
        assert np.shares_memory(taken, often)
        memory.give_back(taken)
        memory.expire((turn + 0.9) * KEPT_S)  # too early
    assert np.shares_memory(memory.take(LARGE_BYTES), often)
    assert not np.shares_memory(memory.take(LARGE_BYTES), once)
    assert not np.shares_memory(memory.take(3 * LARGE_BYTES), large)
