"""Pins: holds on KV blocks that belong to no sequence.

A shipment of KV between workers (`core/shipments`) pins its blocks at both: at the source, so that
they stay after their sequence has ended, and at the target while they are filled. A recall of KV
from host memory (`host_tier.py`) pins blocks while they are filled. A pin is an entry of the block
table under a name that no sequence has. Only single workers use pins.
"""

from dataclasses import dataclass, field

from services.core.planner.block_table import StageTable
from services.core.planner.sequence import Sequence
from services.core.prefix.block_hash import THIN_STRIDE


@dataclass(slots=True)
class Pin:
    """Blocks held under `name`; block i has the KV of block i of a sequence, or will have it.

    The first `registered` blocks are in the prefix cache. `online`: whether the sequence that needs
    the KV is online. For a pin that is being filled, `request_id` is the request that will start
    with its KV, and `seq_id` the sequence of that request once it has arrived.
    """

    name: str
    online: bool
    registered: int
    request_id: str = ""
    seq_id: str = ""
    filled: bool = False


@dataclass(slots=True)
class Pins:
    """The pins of a worker, by name. Methods take O(blocks)."""

    table: StageTable
    _pins: dict[str, Pin] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._pins)

    def get(self, name: str) -> Pin | None:
        """The pin with this name; None if it was released."""
        return self._pins.get(name)

    def fill_for(self, request_id: str) -> Pin | None:
        """The pin that is filled for a request; None without such a pin."""
        # A search is fast enough: few pins exist, and only arriving requests with output search.
        return next((pin for pin in self._pins.values() if pin.request_id == request_id), None)

    @property
    def batch_names(self) -> list[str]:
        """Names of the pins for batch sequences."""
        return [name for name, pin in self._pins.items() if not pin.online]

    def share(self, name: str, sequence: Sequence) -> None:
        """Pin the registered blocks of a running sequence, also those added since the last call."""
        ids = self.table.block_ids(sequence.seq_id)[: sequence.registered]
        if not ids:
            return
        self.table.extend(name, ids)
        self._pins.setdefault(name, Pin(name, sequence.online, 0)).registered = len(ids)

    def allocate(
        self, name: str, request_id: str, online: bool, hashes: tuple[bytes, ...], blocks: int
    ) -> int:
        """Pin the cached blocks of a prefix, and allocate empty ones up to `blocks` in total.

        Returns the number of cached blocks. `blocks` is at least 1.

        Raises:
            IndexError: if too few blocks are free.
        """
        cached = tuple(self.table.pool.cache.find(hashes))[:blocks]
        self.table.share(name, cached)
        try:
            self.table.adopt(name, blocks)
        except IndexError:
            self.table.release(name)
            raise
        self._pins[name] = Pin(name, online, len(cached), request_id)
        return len(cached)

    def fill(self, name: str, hashes: tuple[bytes, ...]) -> str:
        """Register the first blocks of a pin, whose KV is complete, and free all others.

        `hashes` are those of the first blocks, at least one. Returns the id of the sequence that
        waits for the pin, "" if none does.
        """
        pin, cache = self._pins[name], self.table.pool.cache
        for place in range(pin.registered, len(hashes)):
            block = self.table.block_ids(name)[place]
            if not cache.register(block, hashes[place], (place + 1) % THIN_STRIDE == 0):
                # The block was computed here meanwhile: use it instead.
                same = cache.block_of(hashes[place])
                assert same is not None
                self.table.replace(name, place, same)
        pin.registered = max(pin.registered, len(hashes))
        pin.filled = True
        self.table.truncate(name, pin.registered)
        return pin.seq_id

    def release(self, name: str) -> str:
        """Release a pin; returns the id of the sequence that waits for it, "" if none does."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return ""
        self.table.release(name)
        return pin.seq_id

    def least(self, online: bool) -> str:
        """Name of the pin whose release gets blocks for a sequence of this class; "" if none helps.

        Batch pins first; pins of online sequences only for online sequences, newest first.
        """
        users, tables = self.table.pool.users, self.table.tables
        for pin in sorted(reversed(self._pins.values()), key=lambda pin: pin.online):
            if pin.online > online:
                break
            if any(users[block] == 1 for block in tables[pin.name]):
                return pin.name
        return ""

    def check_invariants(self) -> None:
        """Each pin has blocks, and its registered blocks come first."""
        for pin in self._pins.values():
            assert 0 <= pin.registered <= len(self.table.block_ids(pin.name)) > 0
