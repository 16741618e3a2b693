"""Flap damping: detects workers that leave and return repeatedly.

A worker *leaves* when it exits, loses its registration or stops reporting. A worker that has left
`LEAVES_MAX` times within `WINDOW_S` flaps until it has stayed for `STEADY_S`. Services do not share
their observations: each judges by its own.
"""

import math
from collections import deque
from dataclasses import dataclass, field

LEAVES_MAX = 3
WINDOW_S = 300.0
STEADY_S = 120.0
LATE_S = 1.0
"""A longer pause between two ticks means that the observer itself has stalled."""
WAKING_S = 3.0
"""After a local stall, silence is ignored for this long: pending reports are not read yet."""
WORKERS_MAX = 10_000
"""Maximum number of tracked workers; replaced pods never reuse a name."""


@dataclass(slots=True)
class LocalPauseDetector:
    """Detects pauses of this process, during which all other workers appear silent."""

    _looked_s: float = math.inf  # last tick; inf before the first
    _woke_s: float = -math.inf  # end of the last detected pause

    def tick(self, now_s: float) -> bool:
        """Note a tick, a few times a second; returns whether silence of workers is conclusive."""
        if now_s - self._looked_s > LATE_S:
            self._woke_s = now_s
        self._looked_s = now_s
        return self.awake(now_s)

    def awake(self, now_s: float) -> bool:
        """Whether no recent pause of this process was seen, and none is in progress."""
        return now_s - self._looked_s <= LATE_S and now_s - self._woke_s > WAKING_S


@dataclass(slots=True)
class _Leaves:
    """Recent departures of a worker, newest last; the worker flaps until `steady_s`."""

    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=LEAVES_MAX))
    away: bool = False
    steady_s: float = -math.inf


@dataclass(slots=True)
class FlapDamping:
    """Tracks departures per worker."""

    _leaves: dict[str, _Leaves] = field(default_factory=dict)  # the latest to leave is last

    def note_departure(self, worker_id: str, now_s: float) -> None:
        """Note that a worker has left; no effect on a worker that has left already."""
        leaves = self._leaves.get(worker_id) or _Leaves()
        if leaves.away:
            return
        self._leaves.pop(worker_id, None)
        self._leaves[worker_id] = leaves
        leaves.away = True
        leaves.times_s.append(now_s)
        # `times_s` keeps the last LEAVES_MAX departures: all within the window means flapping.
        if len(leaves.times_s) == LEAVES_MAX and now_s - leaves.times_s[0] <= WINDOW_S:
            leaves.steady_s = now_s + STEADY_S
        self._forget_old(now_s)

    def note_presence(self, worker_id: str) -> None:
        """Note that a worker is present and reports."""
        leaves = self._leaves.get(worker_id)
        if leaves is not None:
            leaves.away = False

    def is_flapping(self, worker_id: str, now_s: float) -> bool:
        """Whether the worker flaps, by the departures seen here."""
        leaves = self._leaves.get(worker_id)
        return leaves is not None and now_s < leaves.steady_s

    def check_invariants(self) -> None:
        """Raise AssertionError if a bound or an order is violated."""
        assert len(self._leaves) <= WORKERS_MAX
        for leaves in self._leaves.values():
            assert 1 <= len(leaves.times_s) <= LEAVES_MAX
            assert list(leaves.times_s) == sorted(leaves.times_s)

    def _forget_old(self, now_s: float) -> None:
        """Drop workers whose departures have expired, and the oldest above `WORKERS_MAX`."""
        while self._leaves:
            worker_id, leaves = next(iter(self._leaves.items()))
            lapsed = now_s - leaves.times_s[-1] > WINDOW_S
            if not lapsed and len(self._leaves) <= WORKERS_MAX:
                return
            del self._leaves[worker_id]
