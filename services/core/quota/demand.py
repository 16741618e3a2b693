"""Demand of an owner at this gateway and at others, as exponentially decaying rates."""

import math
from dataclasses import dataclass

DECAY_S = 2.0
"""Time constant of the decay. Short, so that shares follow traffic that moves between gateways,
and long compared to the interval of reports."""


@dataclass(slots=True)
class DecayingRate:
    """An exponentially weighted rate per second."""

    _per_s: float = 0.0
    # When `_per_s` was computed.
    _at_s: float = 0.0

    def note(self, amount: float, now_s: float) -> None:
        """Add a demand of `amount` at `now_s`."""
        self._per_s, self._at_s = self.per_s(now_s) + amount / DECAY_S, now_s

    def per_s(self, now_s: float) -> float:
        """The rate at `now_s` without further demand until then."""
        return self._per_s * math.exp((self._at_s - now_s) / DECAY_S)


@dataclass(frozen=True, slots=True)
class OwnerDemand:
    """Demand of an owner at a gateway, as reported to the other gateways."""

    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    # Requests that run there.
    running: int = 0
    # Parts of its shares that overflowed a full bucket, since the gateway's start.
    requests_spilt: float = 0.0
    tokens_spilt: float = 0.0


def mean_share(own_per_s: float, others_per_s: float, length_s: float) -> float | None:
    """Mean share of the own demand over `length_s`, while it decays and others' stays constant.

    None without any demand. The mean rather than the current share, because requests arrive at
    moments of high own demand, which would overestimate it.
    """
    if own_per_s <= 0:
        return 0.0 if others_per_s > 0 else None
    if others_per_s <= 0:
        return 1.0
    if length_s <= 0:
        return own_per_s / (own_per_s + others_per_s)
    # The integral of own / (own + others) with exponentially decaying own demand.
    fade = length_s / DECAY_S
    left_per_s = own_per_s * math.exp(-fade)
    return math.log((own_per_s + others_per_s) / (left_per_s + others_per_s)) / fade
