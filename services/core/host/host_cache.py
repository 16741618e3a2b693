"""Index of the host copies of KV blocks, by block hash; see `vocabulary.py`.

    absent → FILLING → HELD → absent

A copy is *owed* while a preempted sequence needs it, else *spare*. `evict` removes only spare
copies, in LRU order; to evict owed copies, the caller settles their debt first (`settle`). A copy
that a recall reads stays until the recall has ended.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from typing import NamedTuple


class CopyState(Enum):
    """State of a host copy."""

    FILLING = auto()  # a save writes it
    HELD = auto()  # complete


class Lost(NamedTuple):
    """A copy that is gone; `reported`: the scheduler may count its block as cached."""

    block_hash: bytes
    reported: bool


@dataclass(slots=True)
class _Copy:
    slot: int
    reported: bool
    state: CopyState = CopyState.FILLING
    readers: int = 0  # number of recalls that read it
    condemned: bool = False  # damaged: removed once no recall reads it


@dataclass(slots=True)
class HostCache:
    """Slots of the host store, and the copies in them. Methods take O(hashes)."""

    slots: int = 0
    filling: int = 0  # copies that are being written
    lost_total: int = 0  # copies that are gone, so far
    _copies: dict[bytes, _Copy] = field(default_factory=dict)
    _empty: list[int] = field(default_factory=list)  # a heap: low slots get memory first
    _debts: dict[bytes, int] = field(default_factory=dict)  # hash → sequences that need the copy
    # Copies that no recall reads, least recently used first.
    _owed: dict[bytes, None] = field(default_factory=dict)
    _spare: dict[bytes, None] = field(default_factory=dict)

    def __contains__(self, block_hash: object) -> bool:
        """Whether the block has a copy, complete or being filled."""
        return block_hash in self._copies

    @property
    def held(self) -> int:
        """Number of complete copies."""
        return len(self._copies) - self.filling

    @property
    def owed(self) -> int:
        """Number of complete copies that are owed, without those that recalls read."""
        return len(self._owed)

    @property
    def evictable(self) -> int:
        """Number of copies that `evict` may remove."""
        return len(self._spare)

    @property
    def empty(self) -> int:
        """Number of slots without a copy."""
        return len(self._empty)

    def find(self, hashes: Iterable[bytes]) -> Iterator[int]:
        """The slots of the complete copies of these blocks, up to the first miss."""
        for block_hash in hashes:
            copy = self._copies.get(block_hash)
            if copy is None or copy.state is not CopyState.HELD or copy.condemned:
                return
            yield copy.slot

    # --- changes

    def grow(self, slots: int) -> None:
        """Add empty slots up to `slots` in total. Raises ValueError if there are more already."""
        if slots < self.slots:
            raise ValueError(f"{self.slots} slots cannot grow to {slots}")
        for slot in range(self.slots, slots):
            heappush(self._empty, slot)
        self.slots = slots

    def clear(self) -> list[Lost]:
        """Remove all slots and copies; returns the copies."""
        lost = [Lost(key, copy.reported) for key, copy in self._copies.items()]
        self.slots = self.filling = 0
        self.lost_total += len(lost)
        for part in (self._copies, self._owed, self._spare, self._empty):
            part.clear()
        return lost

    def reserve(self, block_hash: bytes, reported: bool) -> int:
        """Begin the copy of a block without a copy; returns the empty slot that it gets.

        Raises:
            IndexError: if no slot is empty.
        """
        assert block_hash not in self._copies, "the block has a copy already"
        slot = heappop(self._empty)
        self._copies[block_hash] = _Copy(slot, reported)
        self.filling += 1
        return slot

    def hold(self, block_hash: bytes) -> None:
        """Note that the copy of a block is complete; it becomes the most recently used."""
        copy = self._copies[block_hash]
        assert copy.state is CopyState.FILLING
        copy.state = CopyState.HELD
        self.filling -= 1
        self._insert(block_hash)

    def drop(self, block_hash: bytes) -> Lost | None:
        """Remove a copy; None if there is none, or if recalls read it: `end_read` removes it."""
        copy = self._copies.get(block_hash)
        if copy is None:
            return None
        if copy.readers:
            copy.condemned = True
            return None
        del self._copies[block_hash]
        self.lost_total += 1
        self.filling -= copy.state is CopyState.FILLING
        self._owed.pop(block_hash, None)
        self._spare.pop(block_hash, None)
        heappush(self._empty, copy.slot)
        return Lost(block_hash, copy.reported)

    def evict(self) -> Lost | None:
        """Remove the least recently used spare copy; None without spare copies."""
        oldest = next(iter(self._spare), None)
        return None if oldest is None else self.drop(oldest)

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Mark the spare copies of these blocks as used, the last block most recently."""
        for block_hash in hashes:
            if block_hash in self._spare:
                del self._spare[block_hash]
                self._spare[block_hash] = None

    def begin_read(self, hashes: Iterable[bytes]) -> None:
        """Keep the complete copies of these blocks until `end_read`."""
        for block_hash in hashes:
            copy = self._copies[block_hash]
            assert copy.state is CopyState.HELD
            copy.readers += 1
            self._owed.pop(block_hash, None)
            self._spare.pop(block_hash, None)

    def end_read(self, hashes: Iterable[bytes]) -> list[Lost]:
        """Undo `begin_read`; returns the damaged copies that are gone now.

        The last block becomes the most recently used.
        """
        lost = []
        for block_hash in hashes:
            copy = self._copies[block_hash]
            copy.readers -= 1
            if copy.readers:
                continue
            if copy.condemned and (gone := self.drop(block_hash)) is not None:
                lost.append(gone)
            else:
                self._insert(block_hash)
        return lost

    def owe(self, hashes: Iterable[bytes]) -> None:
        """Note that a sequence needs the copies of these blocks, also those made later."""
        for block_hash in hashes:
            self._debts[block_hash] = self._debts.get(block_hash, 0) + 1
            if block_hash in self._spare:
                del self._spare[block_hash]
                self._owed[block_hash] = None

    def settle(self, hashes: Iterable[bytes]) -> None:
        """Undo `owe`: copies that no sequence needs become spare, the last used most recently."""
        for block_hash in hashes:
            debts = self._debts[block_hash] - 1
            if debts:
                self._debts[block_hash] = debts
                continue
            del self._debts[block_hash]
            if block_hash in self._owed:
                del self._owed[block_hash]
                self._spare[block_hash] = None

    def _insert(self, block_hash: bytes) -> None:
        row = self._owed if block_hash in self._debts else self._spare
        row[block_hash] = None

    def check_invariants(self) -> None:
        """Each slot is empty or has a copy, and each copy is in exactly one state."""
        copies = self._copies
        taken = [copy.slot for copy in copies.values()]
        filling = [copy for copy in copies.values() if copy.state is CopyState.FILLING]
        assert self.filling == len(filling)
        assert len(taken) + len(self._empty) == self.slots
        assert {*taken, *self._empty} == set(range(self.slots)), "a slot is lost or shared"
        heap = list(self._empty)
        heapify(heap)
        assert not self._empty or self._empty[0] == heap[0], "the lowest slot is not first"
        assert self._owed.keys().isdisjoint(self._spare)
        assert self._owed.keys() <= self._debts.keys()
        assert self._spare.keys().isdisjoint(self._debts)
        listed = self._owed.keys() | self._spare.keys()
        for key, copy in copies.items():
            at_rest = copy.state is CopyState.HELD and not copy.readers
            assert (key in listed) == at_rest
            assert copy.readers >= 0 and not (copy.condemned and at_rest)
        assert listed <= copies.keys()
        assert all(debts > 0 for debts in self._debts.values())
