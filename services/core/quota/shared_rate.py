"""A gateway's share of an owner's per-minute limit: a token bucket that fills at its share.

The buckets of all gateways together fill at the limit's rate, each in proportion to its demand.
Together they hold a few seconds' worth of the limit, which bounds the burst within any minute.
Because buckets fill evenly, little is lost while shares lag behind traffic that moves between
gateways. Inflow that a full bucket cannot hold is spilt: it goes to the buckets of other gateways.
"""

import math
from dataclasses import dataclass, field

from services.core.quota.demand import DecayingRate, mean_share

BURST = 0.05
"""Size of all gateways' buckets together, as a fraction of the limit."""
FLOOR = 0.02
"""Fraction of the limit that is shared equally, regardless of demand, to admit new traffic."""
SLOW_S = 10.0
"""Time constant with which a bucket's size follows its share: short dips must not shrink it."""
MINUTE_S = 60.0
# Demand below this fraction of the limit counts as 0.
_DEMAND_MIN = 1e-6
_ROUNDING = 1e-9


@dataclass(slots=True)
class SharedRate:
    """A token bucket of a gateway; the argument `per_minute` is always the owner's whole limit."""

    # Least size of all gateways' buckets together (at most the limit), and of this bucket.
    burst_min: float
    unit: float
    # Demand here and at other gateways.
    demand: DecayingRate = field(default_factory=DecayingRate)
    others_per_s: float = 0.0
    gateways: int = 1
    # Consecutive reports to other gateways that contained demand.
    reports_sent: int = 0
    # Whether the share is frozen.
    held: bool = False
    # Share of the limit until now, and its slow mean for the bucket's size.
    share: float = 1.0
    slow_share: float = 1.0
    # Total inflow since the start that the full bucket could not hold.
    spilt: float = 0.0
    # Content of the bucket, and when it was computed; None before the first use.
    _level: float = 0.0
    _at_s: float | None = None

    def note_demand(self, amount: float, per_minute: float, now_s: float) -> None:
        """Count `amount` as demand, whether or not it fits into the bucket."""
        self.advance(per_minute, now_s)
        self.demand.note(amount, now_s)

    def advance(self, per_minute: float, now_s: float) -> float:
        """Fill the bucket up to now; returns its content, negative after an overdraft."""
        if self._at_s is None:
            self.share = self.slow_share = 1 / self.gateways
            self._level, self._at_s = self.size(per_minute), now_s
        length_s = max(0.0, now_s - self._at_s)
        # Keep what `give_back` returned beyond the size, but not a surplus of a larger former
        # limit.
        surplus = max(0.0, self._level - self.size(per_minute))
        self._follow(per_minute, length_s, now_s)
        size = self.size(per_minute)
        filled = self._level - surplus + self.share * per_minute / MINUTE_S * length_s
        self.spilt += max(0.0, filled - size)
        self._level, self._at_s = min(filled, size) + min(surplus, size), now_s
        return self._level

    def report(self, per_minute: float, now_s: float) -> float:
        """The demand per second to report to other gateways now; counts the report."""
        self.advance(per_minute, now_s)
        per_s = self.demand.per_s(now_s)
        if per_s < _DEMAND_MIN * per_minute / MINUTE_S:
            self.reports_sent = 0
            return 0.0
        self.reports_sent += 1
        return per_s

    def take_spilt(self, spilt: float, per_minute: float, now_s: float) -> None:
        """Add this gateway's share of the amount that others have spilt, up to the size."""
        room = self.size(per_minute) - self.advance(per_minute, now_s)
        self._level += max(0.0, min(room, spilt * self.share))

    def take(self, amount: float, per_minute: float, now_s: float) -> float | None:
        """Take `amount` and return None; a full bucket may be overdrawn by a larger amount.

        If it does not fit, take nothing and return the seconds until it does.
        """
        wait_s = self.wait_s(amount, per_minute, now_s)
        if wait_s > 0:
            return wait_s
        self._level -= amount
        return None

    def wait_s(self, amount: float, per_minute: float, now_s: float) -> float:
        """Seconds until `amount` can be taken, at the current share."""
        missing = min(amount, self.size(per_minute)) - self.advance(per_minute, now_s)
        return self._fill_s(missing, per_minute, now_s) if missing > _ROUNDING else 0.0

    def give_back(self, amount: float, per_minute: float, now_s: float) -> None:
        """Return an amount that was taken but not used; a negative amount is taken even if
        it overdraws the bucket."""
        self._level = self.advance(per_minute, now_s) + amount

    def reset_s(self, per_minute: float, now_s: float) -> float:
        """Seconds until the bucket is full."""
        missing = self.size(per_minute) - self.advance(per_minute, now_s)
        return self._fill_s(missing, per_minute, now_s) if missing > 0 else 0.0

    def _fill_s(self, amount: float, per_minute: float, now_s: float) -> float:
        """Seconds in which `amount` flows in, at the current share."""
        share = self.share
        if not self.held:
            share = self._share(now_s, 0.0, per_minute)
        return amount / (share * per_minute / MINUTE_S)

    def _follow(self, per_minute: float, length_s: float, now_s: float) -> None:
        """Compute the share for the `length_s` that have passed."""
        if not self.held and length_s > 0:
            self.share = self._share(now_s - length_s, length_s, per_minute)
        followed = 1 - math.exp(-length_s / SLOW_S)
        self.slow_share += (self.share - self.slow_share) * followed

    def _share(self, from_s: float, length_s: float, per_minute: float) -> float:
        """This gateway's share over a time; the shares of all gateways add up to 1."""
        demand_min = _DEMAND_MIN * per_minute / MINUTE_S
        own_per_s = self.demand.per_s(from_s)
        part = mean_share(
            own_per_s if own_per_s > demand_min else 0.0,
            self.others_per_s if self.others_per_s > demand_min else 0.0,
            length_s,
        )
        if part is None:
            return 1 / self.gateways
        # The floor admits new traffic here before this gateway has reported it to the others.
        share = FLOOR / self.gateways + (1 - FLOOR) * part
        # Another gateway may have received its first traffic at the same time: take at most an
        # equal share until its first report must have arrived here.
        return share if self.reports_sent > 1 else min(share, 1 / self.gateways)

    def size(self, per_minute: float) -> float:
        """Most that the bucket holds."""
        # At least `burst_min`, so that a small limit still admits a request of usual size.
        whole = max(BURST * per_minute, min(self.burst_min, per_minute))
        return max(whole * self.slow_share, self.unit)
