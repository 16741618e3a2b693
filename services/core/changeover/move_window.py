"""How much KV may be on its way from each worker (KunServe §4.2).

Each step of a move (reserve, reserved, send, ended) waits for a turn of an engine, which is an
iteration. So a source has twice the bytes under way that its link carries in all these turns: with
fewer the link would be idle, and more would hold memory for KV that comes late.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

LINK_BLOCKS_PER_S = 30_000.0
"""1 GB/s with blocks of 32 KiB."""
FIRST_RESERVATION_S = 0.2
"""How long a reservation is assumed to take until one is known."""
RESERVATIONS = 5.0
"""A move takes five turns (reserve, reserved, send, arrived, ended), two of them to reserve; twice
that is under way."""
MOVES_MIN = 2
"""So many moves a source may have under way, however large they are."""


@dataclass(slots=True)
class _Source:
    """What is under way from one worker, and what has come; in blocks of one layer."""

    rate: float
    moves: int = 0
    blocks: int = 0
    first_s: float = 0.0
    arrived: int = 0


@dataclass(slots=True)
class MoveWindow:
    """The moves under way in one exchange; `sizes` are blocks of one layer, by source.

    `link_blocks_per_s` is what a link carries at least. What more it carries is measured, and how
    long reservations take, in which nothing but turns passes.
    """

    link_blocks_per_s: float = LINK_BLOCKS_PER_S
    _reserving_s: float = 0.0  # the longest
    _sources: dict[str, _Source] = field(default_factory=dict)
    _began_s: dict[str, float] = field(default_factory=dict)

    def has_room(self, sizes: Mapping[str, int]) -> bool:
        """Whether every source may begin another move."""
        turns_s = RESERVATIONS * (self._reserving_s or FIRST_RESERVATION_S)
        for worker_id in sizes:
            source = self._source(worker_id)
            is_full = source.blocks >= turns_s * source.rate
            if is_full and source.moves >= MOVES_MIN:
                return False
        return True

    def begin(self, name: str, sizes: Mapping[str, int], now_s: float) -> None:
        """A move begins."""
        self._began_s[name] = now_s
        for worker_id, blocks in sizes.items():
            source = self._source(worker_id)
            if not source.moves and not source.arrived:
                source.first_s = now_s
            source.moves += 1
            source.blocks += blocks

    def reserve(self, name: str, now_s: float) -> None:
        """Every destination of a move expects it."""
        self._reserving_s = max(self._reserving_s, now_s - self._began_s[name])

    def end(self, name: str, sizes: Mapping[str, int]) -> None:
        """A move is given up."""
        del self._began_s[name]
        for worker_id, blocks in sizes.items():
            source = self._source(worker_id)
            source.moves -= 1
            source.blocks -= blocks

    def arrive(self, name: str, sizes: Mapping[str, int], now_s: float) -> None:
        """All KV of a move has come: measure by it."""
        self.end(name, sizes)
        for worker_id, blocks in sizes.items():
            source = self._source(worker_id)
            source.arrived += blocks
            elapsed_s = now_s - source.first_s
            if elapsed_s > 0:
                source.rate = max(source.rate, source.arrived / elapsed_s)

    def check_invariants(self, under_way: Mapping[str, Mapping[str, int]]) -> None:
        """Raise AssertionError unless it counts what is under way, by name and source."""
        assert self._began_s.keys() == under_way.keys()
        for worker_id, source in self._sources.items():
            sizes = [one[worker_id] for one in under_way.values() if worker_id in one]
            assert (source.moves, source.blocks) == (len(sizes), sum(sizes))

    def _source(self, worker_id: str) -> _Source:
        return self._sources.setdefault(worker_id, _Source(self.link_blocks_per_s))
