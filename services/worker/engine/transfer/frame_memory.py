"""Memory of large frames, used again: each page of new memory costs a fault."""

from threading import Lock

import numpy as np

from services.worker.engine.transfer.frame import Bytes

KEPT_BYTES_MAX = 16 << 20
LARGE_BYTES = 256 << 10  # smaller memory is not worth keeping


class FrameMemory:
    """Keeps up to `bytes_max` for later frames, the latest; any thread may use it."""

    def __init__(self, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._lock = Lock()  # guards the next two
        self._free: list[Bytes] = []
        self._free_bytes = 0

    def take(self, size_bytes: int) -> Bytes:
        """Memory of that size, with anything in it. Less than twice as much is kept busy by it."""
        with self._lock:
            for number in reversed(range(len(self._free))):
                if size_bytes <= self._free[number].size < 2 * size_bytes:
                    found = self._free.pop(number)
                    self._free_bytes -= found.size
                    return found[:size_bytes]
        return np.empty(size_bytes, np.uint8)

    def give_back(self, memory: Bytes) -> None:
        """Let memory that `take` gave be used again."""
        whole = memory.base if isinstance(memory.base, np.ndarray) else memory
        if whole.size < LARGE_BYTES:
            return
        with self._lock:
            self._free.append(whole)
            self._free_bytes += whole.size
            while self._free_bytes > self._bytes_max:
                self._free_bytes -= self._free.pop(0).size
