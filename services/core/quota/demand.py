"""Demand of an owner of API keys, as exponentially decaying rates, from which shares follow."""

import math
from dataclasses import dataclass

DECAY_S = 2.0
"""Time constant of the decay: short, so that shares follow traffic that moves between gateways, but
long compared to the interval of reports (about a second)."""


@dataclass(slots=True)
class DecayingRate:
    """An exponentially weighted rate per second."""

    _per_s: float = 0.0
    # When `_per_s` was computed.
    _at_s: float = 0.0

    def note(self, amount: float, now_s: float) -> None:
        """Add `amount` (requests or tokens) of demand at `now_s`."""
        self._per_s, self._at_s = self.per_s(now_s) + amount / DECAY_S, now_s

    def per_s(self, now_s: float) -> float:
        """The rate at `now_s`, if there is no further demand until then."""
        return self._per_s * math.exp((self._at_s - now_s) / DECAY_S)


@dataclass(frozen=True, slots=True)
class OwnerDemand:
    """Demand of an owner at a gateway, as reported to the other gateways."""

    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    # Running requests.
    running: int = 0
    # Amounts that its token buckets could not hold, since the gateway's start (see SharedRate).
    requests_spilt: float = 0.0
    tokens_spilt: float = 0.0
    # Tokens used in the last minute, and those that running requests may use next.
    minute_tokens: float = 0.0


def mean_share(own_per_s: float, others_per_s: float, length_s: float) -> float | None:
    """Mean share of the own demand over `length_s`: it decays, that of others stays constant.

    None without any demand. The current share would be too high, because it is computed when
    requests arrive, which is when the own demand is high.
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
