"""Demand at one gateway, and the demand that other gateways report."""

import math
from dataclasses import dataclass

FADE_S = 2.0
"""Demand of this age counts e times less. The time is short, so that shares follow traffic that
moves between gateways, and long against the time between two reports."""


@dataclass(slots=True)
class FadingRate:
    """An amount per second over the last seconds; the latest count most."""

    _per_s: float = 0.0
    _at_s: float = 0.0

    def note(self, amount: float, now_s: float) -> None:
        """Note a demand of `amount` now."""
        self._per_s, self._at_s = self.per_s(now_s) + amount / FADE_S, now_s

    def per_s(self, now_s: float) -> float:
        """The rate at `now_s` if there is no further demand until then."""
        return self._per_s * math.exp((self._at_s - now_s) / FADE_S)


@dataclass(frozen=True, slots=True)
class Wish:
    """Demand of one owner at one gateway, and how many requests run there.

    The spilt amounts are the parts of its shares that it did not use, since it began.
    """

    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    running: int = 0
    requests_spilt: float = 0.0
    tokens_spilt: float = 0.0


def mean_share(own_per_s: float, others_per_s: float, length_s: float) -> float | None:
    """Mean part of all demand over a time in which the own one fades and that of others stays.

    None without demand. It is the mean and not the part at one moment, because requests come at
    moments at which the own demand is high.
    """
    if own_per_s <= 0:
        return 0.0 if others_per_s > 0 else None
    if others_per_s <= 0:
        return 1.0
    if length_s <= 0:
        return own_per_s / (own_per_s + others_per_s)
    fade = length_s / FADE_S
    left_per_s = own_per_s * math.exp(-fade)
    return math.log((own_per_s + others_per_s) / (left_per_s + others_per_s)) / fade
