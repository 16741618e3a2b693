"""LoRA adapters of requests, and their use of a worker's slots.

An adapter is identified by its digest, the SHA-256 of its configuration and weights: two loads
under the same name may have different weights. A worker holds an adapter in a *slot*; an adapter
without requests is *idle*, and its slot may be given to another. The *key* of an adapter is the
first 64 bits of its digest.
"""

import re
from dataclasses import dataclass

_DIGEST = re.compile(r"[0-9a-f]{64}")
NAME_CHARS_MAX = 256
SOURCE_CHARS_MAX = 4096
RANK_MAX = 2**16
KEY_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as a gateway has checked it.

    `digest` is in lower-case hexadecimal; `source` is the folder of its files, as workers see it;
    `rank` is the largest rank of its matrices.
    """

    name: str
    digest: str
    source: str
    rank: int

    @property
    def key(self) -> int:
        """The first 64 bits of the digest."""
        return int(self.digest[:KEY_DIGITS], 16)

    def fault(self) -> str | None:
        """Why a field is invalid, or None."""
        if not 1 <= len(self.name) <= NAME_CHARS_MAX:
            return f"the adapter's name must have 1 to {NAME_CHARS_MAX} characters"
        if not _DIGEST.fullmatch(self.digest):
            return "the adapter's digest must be 64 hexadecimal digits"
        if not 1 <= len(self.source) <= SOURCE_CHARS_MAX:
            return f"the adapter's source must have 1 to {SOURCE_CHARS_MAX} characters"
        if not 1 <= self.rank <= RANK_MAX:
            return f"the adapter's rank is {self.rank}, but must lie in 1 to {RANK_MAX}"
        return None


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in a slot; `digest` is its key.

    `running` requests of it are at the worker, whether they wait or run. Its load took `load_s`
    seconds, 0 while `loading`.
    """

    digest: int
    loading: bool = False
    running: int = 0
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """A worker's adapters and slots; all zero for a worker that loads no adapters.

    `adapter_slots_free` slots hold no adapter. Of `adapter_slots` slots, `adapters_loaded` hold
    a loaded adapter. The totals count since the engine's start: loads that succeeded, and their
    time.
    """

    adapters: tuple[LoadedAdapter, ...] = ()
    adapter_slots_free: int = 0
    adapter_slots: int = 0
    adapters_loaded: int = 0
    adapter_loads_total: int = 0
    adapter_load_seconds_total: float = 0.0


NO_ADAPTERS = AdapterUse()
