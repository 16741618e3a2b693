"""Arrivals and targets of online requests in co-serving. Pure."""

from dataclasses import dataclass, replace
from random import Random

WINDOW_FROM_S = 15.0
"""Offset of the measured window from the first online request: by then batch work is running."""


@dataclass(frozen=True, slots=True)
class OnlineTargets:
    """Latency targets of online requests; `tpot_s` is averaged over `token_group` tokens."""

    ttft_s: float
    tpot_s: float
    token_group: int = 1


@dataclass(frozen=True, slots=True)
class OnlineLoad:
    """Rate of online requests, and their targets in seconds.

    Figures cover the `window_s` seconds from `window_from_s` on; after the last arrival, answers
    have `drain_s` to finish.
    """

    rate_per_s: float
    targets: OnlineTargets
    window_s: float
    drain_s: float
    window_from_s: float = WINDOW_FROM_S

    @property
    def last_s(self) -> float:
        """Arrival time of the last request."""
        return self.window_from_s + self.window_s

    @property
    def limit_s(self) -> float:
        """Time limit of a round."""
        return self.last_s + self.drain_s

    def slowed(self, factor: float) -> "OnlineLoad":
        """The equivalent load for a device on which iterations take `factor` times as long."""
        targets = self.targets
        return replace(
            self,
            rate_per_s=self.rate_per_s / factor,
            targets=replace(
                targets, ttft_s=targets.ttft_s * factor, tpot_s=targets.tpot_s * factor
            ),
            window_s=self.window_s * factor,
            drain_s=self.drain_s * factor,
        )

    def times_s(self, rng: Random) -> list[float]:
        """Arrival times: uniform, with a fixed number before the window and in the window.

        A Poisson process has this distribution, given the number of arrivals. The first request
        arrives at the start of the round and the last at the end of the window, so that every round
        has the same rate.
        """
        times_s = [0.0]
        for begin_s, end_s in ((0.0, self.window_from_s), (self.window_from_s, self.last_s)):
            count = round(self.rate_per_s * (end_s - begin_s))
            times_s += [rng.uniform(begin_s, end_s) for _ in range(count - 1)]
        return sorted([*times_s, self.last_s])

    def __str__(self) -> str:
        targets = self.targets
        group = "" if targets.token_group == 1 else f" on average over {targets.token_group}"
        return (
            f"{self.window_s:g} s of arrivals after the first {self.window_from_s:g} s; targets"
            f" {targets.ttft_s * 1e3:,.0f} ms to the first token and"
            f" {targets.tpot_s * 1e3:,.0f} ms a token{group}"
        )
