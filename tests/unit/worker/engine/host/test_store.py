"""The host store: slots, stepwise growth, and behaviour without memory."""

import errno
import mmap
import subprocess
import sys

import numpy as np
import pytest

from services.worker.engine.host import store as store_module
from services.worker.engine.host.store import (
    SLICE_BYTES,
    SPARE_BYTES,
    STEP_BYTES,
    HostMemoryError,
    HostStore,
)

LAYERS, LAYER_BYTES = 3, 512
SLOT_BYTES = LAYERS * LAYER_BYTES
PLENTY = 1 << 40


def make_store(slots: int = 200, available: int = PLENTY) -> HostStore:
    return HostStore(LAYERS, LAYER_BYTES, slots * SLOT_BYTES + 7, lambda: available)


def rows(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 256, (count, LAYER_BYTES), np.uint8)


def test_blocks_round_trip_through_their_slots() -> None:
    store, rng = make_store(), np.random.default_rng(1)
    assert store.grow() == store.slots == store.slots_max == 200
    stored = {}
    for layer in range(LAYERS):
        stored[layer] = rows(rng, 3)
        store.write(layer, (7, 3, 199), stored[layer])
    for layer in range(LAYERS):
        read = np.empty((2, LAYER_BYTES), np.uint8)
        store.read(layer, (199, 7), read)
        assert np.array_equal(read, stored[layer][[2, 0]])


def test_a_block_is_contiguous_with_all_layers() -> None:
    store = make_store()
    store.grow()
    for layer in range(LAYERS):
        store.write(layer, (5,), np.full((1, LAYER_BYTES), layer + 1, np.uint8))
    block = store._bytes[5 * SLOT_BYTES : 6 * SLOT_BYTES]
    assert block.tolist() == [layer + 1 for layer in range(LAYERS) for _ in range(LAYER_BYTES)]


def test_changed_bytes_and_swapped_blocks_are_detected() -> None:
    store, rng = make_store(), np.random.default_rng(2)
    store.grow()
    for slot in (0, 1):
        for layer in range(LAYERS):
            store.write(layer, (slot,), rows(rng, 1))
        store.seal(slot)
    assert store.is_intact(0) and store.is_intact(1)
    store._bytes[SLOT_BYTES - 1] ^= 1
    assert not store.is_intact(0) and store.is_intact(1)
    store._bytes[SLOT_BYTES - 1] ^= 1
    assert store.is_intact(0)
    store._blocks[[0, 1]] = store._blocks[[1, 0]]
    assert not store.is_intact(0) and not store.is_intact(1)


def test_the_store_grows_in_steps_and_only_then_takes_memory() -> None:
    layer_bytes = 4096
    store = HostStore(1, layer_bytes, 5 * STEP_BYTES // 2, lambda: PLENTY)
    assert store.slots == 0 and store.backed_bytes == 0
    step = STEP_BYTES // layer_bytes
    assert store.step_slots == step
    assert [store.grow() for _ in range(3)] == [step, 2 * step, store.slots_max]
    assert store.backed_bytes == 5 * STEP_BYTES // 2


def test_a_step_has_room_for_two_jobs_of_large_blocks() -> None:
    store = HostStore(1, STEP_BYTES // 2, 100 * STEP_BYTES, lambda: PLENTY)
    assert store.step_slots == 64 < store.slots_max == 200


def test_less_than_a_block_is_an_error() -> None:
    with pytest.raises(HostMemoryError, match="'host_memory' is 1535 bytes, but a KV block of all"):
        HostStore(LAYERS, LAYER_BYTES, SLOT_BYTES - 1)


def test_a_capacity_beyond_the_address_space_is_an_error() -> None:
    with pytest.raises(HostMemoryError, match="the system refuses to map"):
        HostStore(LAYERS, LAYER_BYTES, 1 << 62)


def test_the_store_is_unchanged_without_memory() -> None:
    free = [PLENTY, SPARE_BYTES]
    store = HostStore(1, 4096, 2 * STEP_BYTES, lambda: free.pop(0))
    slots = store.grow()
    with pytest.raises(HostMemoryError, match="host copies stay at 64 MiB of 'host_memory': only"):
        store.grow()
    assert store.slots == slots


def test_an_allocation_that_the_system_refuses_is_an_error() -> None:
    """In a process of its own, which may map 1 GiB more than it has."""
    script = (
        "import psutil, resource\n"
        "from services.worker.engine.host.store import HostMemoryError, HostStore\n"
        "limit = psutil.Process().memory_info().vms + (1 << 30)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "assert HostStore(3, 512, 1 << 29, lambda: 1 << 40).grow()\n"
        "try:\n"
        "    HostStore(3, 512, 1 << 31)\n"
        "except HostMemoryError as error:\n"
        "    print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.startswith("the system refuses to map 2048 MiB for 'host_memory' ([Errno 12]")


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT])
def test_an_allocation_failure_ends_the_growth(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    store = make_store()
    monkeypatch.setattr(store_module._libc, "madvise", lambda *_: -1)
    monkeypatch.setattr(store_module.ctypes, "get_errno", lambda: code)
    with pytest.raises(HostMemoryError, match=f"provides no more \\({errno.errorcode[code]}\\)"):
        store.grow()
    assert store.slots == 0


def test_a_system_that_cannot_back_memory_at_once_gets_its_pages_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = make_store()
    monkeypatch.setattr(store_module._libc, "madvise", lambda *_: -1)
    monkeypatch.setattr(store_module.ctypes, "get_errno", lambda: errno.EINVAL)
    assert store.grow() == 200
    assert not store._bytes.any()


def test_slices_are_whole_pages_and_steps_keep_what_is_stored() -> None:
    assert SLICE_BYTES % mmap.PAGESIZE == 0
    # Slots of 1.5 KiB: a step ends within a page.
    store = HostStore(LAYERS, LAYER_BYTES, 3 * STEP_BYTES, lambda: PLENTY)
    last = store.grow() - 1
    kept = rows(np.random.default_rng(3), 1)
    store.write(2, (last,), kept)
    store.grow()
    read = np.empty_like(kept)
    store.read(2, (last,), read)
    assert np.array_equal(read, kept)
