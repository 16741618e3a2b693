"""Flap damping: detects workers that leave and return repeatedly, for scheduler and memory manager.

A worker *leaves* when it exits, loses its registration or stops reporting. A worker that has left
`LEAVES_MAX` times within `WINDOW_S` is *flapping* until `STEADY_S` after the last of these
departures. Each service uses only its own observations.
"""

import math
from collections import deque
from dataclasses import dataclass, field

LEAVES_MAX = 3  # departures within the window that make a worker flapping
WINDOW_S = 300.0  # seconds
STEADY_S = 120.0  # seconds
PAUSE_MIN_S = 1.0
"""A longer time between two ticks means that this process has stalled."""
RECOVERY_S = 3.0
"""Time after a stall in which silence of workers proves nothing: reports wait to be read."""
WORKERS_MAX = 10_000
"""Maximum number of tracked workers: each replaced pod adds a name that never recurs."""


@dataclass(slots=True)
class LocalPauseDetector:
    """Detects pauses of this process, during which all other workers appear silent."""

    _last_tick_s: float = math.inf  # last tick; inf before the first
    _pause_ended_s: float = -math.inf  # end of the last detected pause

    def tick(self, now_s: float) -> bool:
        """Note a tick, to be called a few times a second; returns `trusts_silence`."""
        if now_s - self._last_tick_s > PAUSE_MIN_S:
            self._pause_ended_s = now_s
        self._last_tick_s = now_s
        return self.trusts_silence(now_s)

    def trusts_silence(self, now_s: float) -> bool:
        """Whether silence proves that a worker stopped reporting: this process did not pause."""
        return now_s - self._last_tick_s <= PAUSE_MIN_S and now_s - self._pause_ended_s > RECOVERY_S


@dataclass(slots=True)
class _Departures:
    """Recent departures of a worker, newest last; the worker is flapping until `steady_s`."""

    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=LEAVES_MAX))
    away: bool = False  # left and not seen since
    steady_s: float = -math.inf  # -inf: never flapped


@dataclass(slots=True)
class FlapDamping:
    """Tracks departures per worker; all times are those of the same monotonic clock."""

    _departures: dict[str, _Departures] = field(default_factory=dict)  # the latest to leave is last

    def note_departure(self, worker_id: str, now_s: float) -> None:
        """Note that a worker has left; repeated notes of the same departure have no effect."""
        departures = self._departures.get(worker_id) or _Departures()
        if departures.away:
            return
        self._departures.pop(worker_id, None)
        self._departures[worker_id] = departures
        departures.away = True
        departures.times_s.append(now_s)
        # `times_s` keeps the last LEAVES_MAX departures: compare the first of them with the last.
        if len(departures.times_s) == LEAVES_MAX and now_s - departures.times_s[0] <= WINDOW_S:
            departures.steady_s = now_s + STEADY_S
        self._forget_old(now_s)

    def note_presence(self, worker_id: str) -> None:
        """Note that a worker is present and reports."""
        departures = self._departures.get(worker_id)
        if departures is not None:
            departures.away = False

    def is_flapping(self, worker_id: str, now_s: float) -> bool:
        """Whether the worker is flapping."""
        return self.flapping_s(worker_id, now_s) > 0

    def flapping_s(self, worker_id: str, now_s: float) -> float:
        """Remaining seconds for which the worker counts as flapping; 0 if it does not."""
        departures = self._departures.get(worker_id)
        return 0.0 if departures is None else max(0.0, departures.steady_s - now_s)

    def check_invariants(self) -> None:
        """The number of workers is bounded, and each has its departures in order."""
        assert len(self._departures) <= WORKERS_MAX
        for departures in self._departures.values():
            assert 1 <= len(departures.times_s) <= LEAVES_MAX
            assert list(departures.times_s) == sorted(departures.times_s)

    def _forget_old(self, now_s: float) -> None:
        """Forget workers without departures in the window, and the oldest above `WORKERS_MAX`."""
        while self._departures:
            worker_id, departures = next(iter(self._departures.items()))
            lapsed = now_s - departures.times_s[-1] > WINDOW_S
            if not lapsed and len(self._departures) <= WORKERS_MAX:
                return
            del self._departures[worker_id]
