"""Flap damping: detects workers that leave and return repeatedly, for scheduler and memory manager.

A worker *leaves* when it exits, loses its registration or stops reporting. A worker that
has left `LEAVES_MAX` times within `WINDOW_S` is *flapping* until `STEADY_S` after the last of these
departures. Each service uses only its own observations.
"""

import math
from collections import deque
from dataclasses import dataclass, field

LEAVES_MAX = 3  # departures within the window that make a worker flapping
WINDOW_S = 300.0  # seconds
STEADY_S = 120.0  # seconds
LATE_S = 1.0
"""A longer time between two ticks means that this process has stalled."""
WAKING_S = 3.0
"""Time after a stall in which silence of workers proves nothing: reports wait to be read."""
WORKERS_MAX = 10_000
"""Maximum number of tracked workers: each replaced pod adds a name that never recurs."""


@dataclass(slots=True)
class LocalPauseDetector:
    """Detects pauses of this process, during which all other workers appear silent."""

    _looked_s: float = math.inf  # last tick; inf before the first
    _woke_s: float = -math.inf  # end of the last detected pause

    def tick(self, now_s: float) -> bool:
        """Note a tick, to be called a few times a second; returns `trusts_silence`."""
        if now_s - self._looked_s > LATE_S:
            self._woke_s = now_s
        self._looked_s = now_s
        return self.awake(now_s)

    def awake(self, now_s: float) -> bool:
        """Whether silence proves that a worker stopped reporting: this process did not pause."""
        return now_s - self._looked_s <= LATE_S and now_s - self._woke_s > WAKING_S


@dataclass(slots=True)
class _Leaves:
    """Recent departures of a worker, newest last; the worker is flapping until `steady_s`."""

    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=LEAVES_MAX))
    away: bool = False  # left and not seen since
    steady_s: float = -math.inf  # -inf: never flapped


@dataclass(slots=True)
class FlapDamping:
    """Tracks departures per worker; all times are those of the same monotonic clock."""

    _leaves: dict[str, _Leaves] = field(default_factory=dict)  # the latest to leave is last

    def note_departure(self, worker_id: str, now_s: float) -> None:
        """Note that a worker has left; repeated notes of the same departure have no effect."""
        leaves = self._leaves.get(worker_id) or _Leaves()
        if leaves.away:
            return
        self._leaves.pop(worker_id, None)
        self._leaves[worker_id] = leaves
        leaves.away = True
        leaves.times_s.append(now_s)
        # `times_s` keeps the last LEAVES_MAX departures: compare the first of them with the last.
        if len(leaves.times_s) == LEAVES_MAX and now_s - leaves.times_s[0] <= WINDOW_S:
            leaves.steady_s = now_s + STEADY_S
        self._forget_old(now_s)

    def note_presence(self, worker_id: str) -> None:
        """Note that a worker is present and reports."""
        leaves = self._leaves.get(worker_id)
        if leaves is not None:
            leaves.away = False

    def is_flapping(self, worker_id: str, now_s: float) -> bool:
        """Whether the worker is flapping."""
        leaves = self._leaves.get(worker_id)
        return leaves is not None and now_s < leaves.steady_s

    def check_invariants(self) -> None:
        """The number of workers is bounded, and each has its departures in order."""
        assert len(self._leaves) <= WORKERS_MAX
        for leaves in self._leaves.values():
            assert 1 <= len(leaves.times_s) <= LEAVES_MAX
            assert list(leaves.times_s) == sorted(leaves.times_s)

    def _forget_old(self, now_s: float) -> None:
        """Forget workers without departures in the window, and the oldest above `WORKERS_MAX`."""
        while self._leaves:
            worker_id, leaves = next(iter(self._leaves.items()))
            lapsed = now_s - leaves.times_s[-1] > WINDOW_S
            if not lapsed and len(self._leaves) <= WORKERS_MAX:
                return
            del self._leaves[worker_id]
