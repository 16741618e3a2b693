"""Which workers come and go, so that little is built on them until they stay.

A worker *leaves* when it ends, loses its registration or falls silent. One that has left
`LEAVES_MAX` times within `WINDOW_S` flaps, until it has not left for `STEADY_S`. What has happened
at one service is not told to others: each judges by what it sees itself.
"""

import math
from collections import deque
from dataclasses import dataclass, field

LEAVES_MAX = 3
WINDOW_S = 300.0
STEADY_S = 120.0
LATE_S = 1.0
"""A longer pause between two looks means that the observer itself has stalled."""
WAKING_S = 3.0
"""After a stall, silence means nothing for this long: reports are still to be read, or to come."""
WORKERS_MAX = 10_000
"""Remembered at the same time; pods that never come back have names of their own."""


@dataclass(slots=True)
class SelfWatch:
    """Whether this observer itself has been running; if not, the silence of others is its fault."""

    _looked_s: float = math.inf
    _woke_s: float = -math.inf

    def look(self, now_s: float) -> bool:
        """Note a look, a few times a second; returns whether silent workers have left."""
        if now_s - self._looked_s > LATE_S:
            self._woke_s = now_s
        self._looked_s = now_s
        return self.awake(now_s)

    def awake(self, now_s: float) -> bool:
        """Whether no stall has been seen lately, and none is about to be."""
        return now_s - self._looked_s <= LATE_S and now_s - self._woke_s > WAKING_S


@dataclass(slots=True)
class _Leaves:
    """When a worker left lately, the newest last; it flaps before `steady_s`."""

    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=LEAVES_MAX))
    away: bool = False
    steady_s: float = -math.inf


@dataclass(slots=True)
class Steadiness:
    """Which workers have left, and how often."""

    _leaves: dict[str, _Leaves] = field(default_factory=dict)  # the latest to leave is last

    def left(self, worker_id: str, now_s: float) -> None:
        """A worker is gone, or silent; told again, it changes nothing until it has come back."""
        leaves = self._leaves.get(worker_id) or _Leaves()
        if leaves.away:
            return
        self._leaves.pop(worker_id, None)
        self._leaves[worker_id] = leaves
        leaves.away = True
        leaves.times_s.append(now_s)
        if len(leaves.times_s) == LEAVES_MAX and now_s - leaves.times_s[0] <= WINDOW_S:
            leaves.steady_s = now_s + STEADY_S
        self._forget_old(now_s)

    def came(self, worker_id: str) -> None:
        """A worker is there, and speaks."""
        leaves = self._leaves.get(worker_id)
        if leaves is not None:
            leaves.away = False

    def flaps(self, worker_id: str, now_s: float) -> bool:
        """Whether the worker comes and goes, as far as has been seen."""
        leaves = self._leaves.get(worker_id)
        return leaves is not None and now_s < leaves.steady_s

    def check_invariants(self) -> None:
        """Raise AssertionError if more is remembered than may be, or out of order."""
        assert len(self._leaves) <= WORKERS_MAX
        for leaves in self._leaves.values():
            assert 1 <= len(leaves.times_s) <= LEAVES_MAX
            assert list(leaves.times_s) == sorted(leaves.times_s)

    def _forget_old(self, now_s: float) -> None:
        """Drop workers whose leaves count no more, and the oldest if there are too many."""
        while self._leaves:
            worker_id, leaves = next(iter(self._leaves.items()))
            lapsed = now_s - leaves.times_s[-1] > WINDOW_S
            if not lapsed and len(self._leaves) <= WORKERS_MAX:
                return
            del self._leaves[worker_id]
