"""Limits the KV in flight from each source worker, as a congestion window does (KunServe §4.2).

A *move* is the transfer of a sequence's KV between workers after a change of groups. Each step of a
move (reserve, reserved, send, ended) waits for a turn of an engine, which is up to an iteration
long. A source therefore has twice as much KV in flight as its link carries in these turns: with
less, the link would idle; with more, memory would be reserved long before its KV arrives.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

LINK_BLOCKS_PER_S = 30_000.0
"""Assumed bandwidth until measured: 1 GB/s with blocks of 32 KiB."""
FIRST_RESERVATION_S = 0.2
"""Assumed time of a reservation until measured."""
RESERVATIONS = 5.0
"""The window's length in reservation times: a move takes five turns (reserve, reserved, send,
arrived, ended), a reservation takes two of them, and the window covers the five turns twice."""
MOVES_MIN = 2
"""Moves that a source may have in flight regardless of their sizes."""


@dataclass(slots=True)
class _Source:
    """Traffic from a worker, in layer blocks (the KV of a block in a single layer)."""

    rate: float  # blocks per second: the best average so far, at least the assumed bandwidth
    moves: int = 0  # in flight
    blocks: int = 0  # in flight
    first_s: float = 0.0  # start of the first move
    arrived: int = 0  # blocks of completed moves


@dataclass(slots=True)
class MoveWindow:
    """The moves in flight in an exchange. Every `sizes` maps source workers to layer blocks.

    The window grows with the measured bandwidth, and with the measured time of a reservation, which
    is pure latency of turns, since it transfers no KV.
    """

    link_blocks_per_s: float = LINK_BLOCKS_PER_S  # lower bound of a link's bandwidth
    _reserving_s: float = 0.0  # the longest reservation so far
    _sources: dict[str, _Source] = field(default_factory=dict)  # by worker id
    _began_s: dict[str, float] = field(default_factory=dict)  # start of moves in flight, by seq_id

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

    def note_started(self, seq_id: str, sizes: Mapping[str, int], now_s: float) -> None:
        """Record the start of a move."""
        self._began_s[seq_id] = now_s
        for worker_id, blocks in sizes.items():
            source = self._source(worker_id)
            if not source.moves and not source.arrived:
                source.first_s = now_s
            source.moves += 1
            source.blocks += blocks

    def note_reserved(self, seq_id: str, now_s: float) -> None:
        """Record that every destination of a move has reserved its blocks."""
        self._reserving_s = max(self._reserving_s, now_s - self._began_s[seq_id])

    def note_abandoned(self, seq_id: str, sizes: Mapping[str, int]) -> None:
        """Remove a move that was abandoned."""
        del self._began_s[seq_id]
        for worker_id, blocks in sizes.items():
            source = self._source(worker_id)
            source.moves -= 1
            source.blocks -= blocks

    def note_arrived(self, seq_id: str, sizes: Mapping[str, int], now_s: float) -> None:
        """Remove a completed move, and update the measured bandwidth of its sources."""
        self.note_abandoned(seq_id, sizes)
        for worker_id, blocks in sizes.items():
            source = self._source(worker_id)
            source.arrived += blocks
            elapsed_s = now_s - source.first_s
            # The maximum, so that idle times between moves do not shrink the window.
            if elapsed_s > 0:
                source.rate = max(source.rate, source.arrived / elapsed_s)

    def check_invariants(self, under_way: Mapping[str, Mapping[str, int]]) -> None:
        """Raise AssertionError unless the counters match `under_way`: `sizes` by sequence id."""
        assert self._began_s.keys() == under_way.keys()
        for worker_id, source in self._sources.items():
            sizes = [move[worker_id] for move in under_way.values() if worker_id in move]
            assert (source.moves, source.blocks) == (len(sizes), sum(sizes))

    def _source(self, worker_id: str) -> _Source:
        return self._sources.setdefault(worker_id, _Source(self.link_blocks_per_s))
