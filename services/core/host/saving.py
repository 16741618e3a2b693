"""The rate at which KV blocks are saved to host memory.

Blocks of running sequences are saved from a share `save_from` of used KV blocks on, at a rate that
grows with the share, as in random early detection (RED, ConServe §4.4). From there on the rate is
at least that at which online requests take blocks, so that saves keep up. Blocks that only the
prefix cache holds are lost when their memory is allocated: they are saved at a low rate always,
and at a higher rate when the empty blocks will soon be used up.
"""

from dataclasses import dataclass

from services.core.host.vocabulary import HostSettings

FULL = 0.9
"""Share of KV blocks in use from which saves run at the full `lane_share`."""
KEEP_UP = 1.2
"""Least rate of saves under pressure, over the rate at which online requests take blocks."""
TRICKLE = 0.1
"""Part of `lane_share` for cached blocks while empty blocks last."""
HURRY = 0.5
"""Part of `lane_share` for cached blocks that will be evicted within `HORIZON_S`."""
HORIZON_S = 2.0
"""Time constant of the measured rates, and how far ahead evictions are predicted, in seconds."""
WINDOW_S = 0.1
"""Seconds for which unused budget of saves accumulates."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """Use of the KV blocks of a worker.

    `used`: share of the blocks that sequences use, 0 to 1. `empty`: free blocks without cached KV.
    `taken`, `taken_online`: blocks that sequences, and online sequences, have taken so far.
    `cached_waits`: cached blocks without a host copy exist.
    """

    used: float
    empty: int
    taken: int
    taken_online: int
    cached_waits: bool


@dataclass(slots=True)
class SaveRate:
    """The budget of saves; the caller passes the saved blocks to `spend`."""

    settings: HostSettings
    _credit_bytes: float = 0.0
    _last_s: float | None = None
    _taken: int = 0
    _taken_online: int = 0
    _taking_per_s: float = 0.0
    _taking_online_per_s: float = 0.0

    @property
    def blocks(self) -> int:
        """Blocks that may be saved now."""
        return int(self._credit_bytes // self.settings.block_bytes)

    @property
    def trickle_block_s(self) -> float:
        """Seconds per block at which cached blocks are saved while empty blocks last."""
        settings = self.settings
        rate = TRICKLE * settings.lane_share * settings.link_bytes_per_s
        return settings.block_bytes / rate

    def spend(self, blocks: int) -> None:
        """Take blocks from the budget."""
        self._credit_bytes -= blocks * self.settings.block_bytes

    def ramp(self, used: float) -> float:
        """The pressure of a share of used blocks: 0 up to `save_from`, 1 from `FULL` on."""
        start = min(self.settings.save_from, FULL)
        if used <= start:
            return 0.0
        return min(1.0, (used - start) / (FULL - start)) if start < FULL else 1.0

    def advance(self, now_s: float, pressure: Pressure) -> None:
        """Add the budget of the time since the last call."""
        elapsed_s = 0.0 if self._last_s is None else max(0.0, now_s - self._last_s)
        self._measure(elapsed_s, pressure)
        self._last_s = now_s
        rate = self.share(pressure) * self.settings.link_bytes_per_s
        # The budget holds at least a block, so that saves advance over a slow link.
        most = max(rate * WINDOW_S, float(self.settings.block_bytes) if rate else 0.0)
        self._credit_bytes = min(self._credit_bytes + rate * elapsed_s, most)

    def share(self, pressure: Pressure) -> float:
        """Share of the link's bandwidth for saves."""
        settings = self.settings
        share = settings.lane_share * self.ramp(pressure.used)
        if share:
            keep_up = KEEP_UP * self._taking_online_per_s * settings.block_bytes
            share = max(share, keep_up / settings.link_bytes_per_s)
        if pressure.cached_waits:
            soon = pressure.empty < HORIZON_S * self._taking_per_s
            share = max(share, settings.lane_share * (HURRY if soon else TRICKLE))
        return min(settings.lane_share, share)

    def _measure(self, elapsed_s: float, pressure: Pressure) -> None:
        """Update the rates at which sequences take blocks: means that decay over `HORIZON_S`."""
        if elapsed_s:
            weight = elapsed_s / (HORIZON_S + elapsed_s)
            taking = (pressure.taken - self._taken) / elapsed_s
            online = (pressure.taken_online - self._taken_online) / elapsed_s
            self._taking_per_s += weight * (taking - self._taking_per_s)
            self._taking_online_per_s += weight * (online - self._taking_online_per_s)
        self._taken, self._taken_online = pressure.taken, pressure.taken_online
