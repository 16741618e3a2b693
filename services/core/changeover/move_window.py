"""Limits the KV in flight from each source, as a congestion window does (KunServe §4.2).

Each step of a move (reserve, reserved, send, ended) waits for an engine's turn, which is an
iteration. A source therefore has twice the bytes in flight that its link carries in these turns:
with less the link would idle, and more would reserve memory long before its KV arrives.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

LINK_BLOCKS_PER_S = 30_000.0
"""Assumed bandwidth until measured: 1 GB/s with blocks of 32 KiB."""
FIRST_RESERVATION_S = 0.2
"""Assumed time of a reservation until measured."""
RESERVATIONS = 5.0
"""Moves in flight, in reservation times: a move takes five turns (reserve, reserved, send, arrived,
ended), two of them for the reservation, and twice that is in flight."""
MOVES_MIN = 2
"""Moves that a source may have in flight whatever their size."""


@dataclass(slots=True)
class _Source:
    """Traffic from a worker, in layer blocks (a block's KV in one layer)."""

    rate: float  # blocks per second: the best average so far, at least the assumed bandwidth
    moves: int = 0  # in flight
    blocks: int = 0  # in flight
    first_s: float = 0.0  # start of the first move
    arrived: int = 0  # blocks of completed moves


@dataclass(slots=True)
class MoveWindow:
    """The moves in flight in an exchange. Every `sizes` maps sources to layer blocks.

    The window grows with the measured bandwidth, and with the time that a reservation takes: that
    is pure turn latency, since no KV flows in it.
    """

    link_blocks_per_s: float = LINK_BLOCKS_PER_S  # lower bound of a link's bandwidth
    _reserving_s: float = 0.0  # the longest reservation so far
    _sources: dict[str, _Source] = field(default_factory=dict)  # by worker id
    _began_s: dict[str, float] = field(default_factory=dict)  # start of moves in flight, by request

    def has_room(self, sizes: Mapping[str, int]) -> bool:
        """Whether each source of `sizes` may start another move."""
        # Bandwidth × delay, where the delay is that of all turns of a move.
        turns_s = RESERVATIONS * (self._reserving_s or FIRST_RESERVATION_S)
        for worker_id in sizes:
            source = self._source(worker_id)
            is_full = source.blocks >= turns_s * source.rate
            if is_full and source.moves >= MOVES_MIN:
                return False
        return True

    def begin(self, seq_id: str, sizes: Mapping[str, int], now_s: float) -> None:
        """Note the start of a move."""
        self._began_s[seq_id] = now_s
        for worker_id, blocks in sizes.items():
            source = self._source(worker_id)
            if not source.moves and not source.arrived:
                source.first_s = now_s
            source.moves += 1
            source.blocks += blocks

    def reserve(self, seq_id: str, now_s: float) -> None:
        """Note that every destination of a move has reserved its blocks."""
        self._reserving_s = max(self._reserving_s, now_s - self._began_s[seq_id])

    def end(self, seq_id: str, sizes: Mapping[str, int]) -> None:
        """Remove a move that was abandoned."""
        del self._began_s[seq_id]
        for worker_id, blocks in sizes.items():
            source = self._source(worker_id)
            source.moves -= 1
            source.blocks -= blocks

    def arrive(self, seq_id: str, sizes: Mapping[str, int], now_s: float) -> None:
        """Remove a completed move, and update the measured bandwidth of its sources."""
        self.end(seq_id, sizes)
        for worker_id, blocks in sizes.items():
            source = self._source(worker_id)
            source.arrived += blocks
            elapsed_s = now_s - source.first_s
            # The maximum, so that idle times between moves do not shrink the window.
            if elapsed_s > 0:
                source.rate = max(source.rate, source.arrived / elapsed_s)

    def check_invariants(self, under_way: Mapping[str, Mapping[str, int]]) -> None:
        """Raise AssertionError unless the counters equal those of `under_way`, by request."""
        assert self._began_s.keys() == under_way.keys()
        for worker_id, source in self._sources.items():
            sizes = [move[worker_id] for move in under_way.values() if worker_id in move]
            assert (source.moves, source.blocks) == (len(sizes), sum(sizes))

    def _source(self, worker_id: str) -> _Source:
        return self._sources.setdefault(worker_id, _Source(self.link_blocks_per_s))
