"""Memory as parameters and KV are moved: in order, through more of it than the caches hold."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

SLAB_BYTES_MIN = 256 << 20
CACHE_TIMES = 4
Bytes = npt.NDArray[np.uint8]
_LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


@dataclass(slots=True)
class SlabWalk:
    """Gives one part of `memory` after the other, and begins again at its end."""

    memory: Bytes
    _next: int = 0

    @classmethod
    def of_a_slab(cls) -> "SlabWalk":
        """Through a slab of `slab_bytes` that has been touched."""
        return cls(np.ones(slab_bytes(), np.uint8))

    def next(self, size_bytes: int) -> Bytes:
        """The next part, a view; `size_bytes` is at most the size of the memory."""
        if self._next + size_bytes > self.memory.size:
            self._next = 0
        first, self._next = self._next, self._next + size_bytes
        return self.memory[first : self._next]


def slab_bytes(last_cache: Path = _LAST_CACHE) -> int:
    """Several times what the last cache holds, whose size is in `last_cache` ("32768K")."""
    try:
        cache_bytes = int(last_cache.read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        cache_bytes = 0
    return max(SLAB_BYTES_MIN, CACHE_TIMES * cache_bytes)
