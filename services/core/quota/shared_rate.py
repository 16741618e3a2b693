"""The share of one gateway in a limit per minute of one owner: a bucket that fills by share.

The buckets of all gateways together fill at the limit's rate, each by its part of the demand. They
hold a few seconds of the limit: so much can be used beyond the limit in a minute. So the quota
holds over any minute. Use is even, so little is lost in the seconds by which shares lag behind
traffic that moves between gateways. Other gateways take what a full bucket spills.
"""

import math
from dataclasses import dataclass, field

from services.core.quota.demand import FadingRate, mean_share

BURST = 0.05
"""The size of all gateways' buckets together, as a part of the limit."""
FLOOR = 0.02
"""Part of the limit that is shared equally, whatever the demand: it serves new traffic."""
SLOW_S = 10.0
"""Time constant with which the size of a bucket follows its share: noise must not drain it."""
MINUTE_S = 60.0
# Demand below this part of the limit is none.
_NOTHING = 1e-6
_ROUNDING = 1e-9


@dataclass(slots=True)
class SharedRate:
    """A bucket. `burst_min`: the least size of all gateways' together, unless the limit is less;
    `unit`: the least of one gateway's.

    `others_per_s` is the demand at other gateways. `told` counts the reports in a row that told
    them of demand here. `share` is this gateway's until now, unchanged while `held`. `spilt` is
    what has not fitted since the beginning.
    """

    burst_min: float
    unit: float
    demand: FadingRate = field(default_factory=FadingRate)
    others_per_s: float = 0.0
    gateways: int = 1
    told: int = 0
    held: bool = False
    share: float = 1.0
    slow_share: float = 1.0
    spilt: float = 0.0
    _level: float = 0.0
    _at_s: float | None = None

    def ask(self, amount: float, per_minute: float, now_s: float) -> None:
        """Count `amount` as demand, whether there is room or not."""
        self.advance(per_minute, now_s)
        self.demand.note(amount, now_s)

    def advance(self, per_minute: float, now_s: float) -> float:
        """Fill the bucket up to now; returns what is in it, below 0 if more was taken."""
        if self._at_s is None:
            self.share = self.slow_share = 1 / self.gateways
            self._level, self._at_s = self._size(per_minute), now_s
        length_s = max(0.0, now_s - self._at_s)
        # Tokens given back beyond the size stay; the rest of a larger limit does not.
        surplus = max(0.0, self._level - self._size(per_minute))
        self._follow(per_minute, length_s, now_s)
        size = self._size(per_minute)
        filled = self._level - surplus + self.share * per_minute / MINUTE_S * length_s
        self.spilt += max(0.0, filled - size)
        self._level, self._at_s = min(filled, size) + min(surplus, size), now_s
        return self._level

    def tell(self, per_minute: float, now_s: float) -> float:
        """The demand to report to others now."""
        self.advance(per_minute, now_s)
        per_s = self.demand.per_s(now_s)
        if per_s < _NOTHING * per_minute / MINUTE_S:
            self.told = 0
            return 0.0
        self.told += 1
        return per_s

    def catch(self, spilt: float, per_minute: float, now_s: float) -> None:
        """Add this gateway's part of what other gateways have spilt, as far as there is room."""
        room = self._size(per_minute) - self.advance(per_minute, now_s)
        self._level += max(0.0, min(room, spilt * self.share))

    def take(self, amount: float, per_minute: float, now_s: float) -> float | None:
        """Take `amount`, more than there is if the bucket is full, and return None.

        If there is no room take nothing, and return the seconds until there is.
        """
        wait_s = self.wait_s(amount, per_minute, now_s)
        if wait_s > 0:
            return wait_s
        self._level -= amount
        return None

    def wait_s(self, amount: float, per_minute: float, now_s: float) -> float:
        """Seconds until `amount` can be taken, at the share of this moment."""
        missing = min(amount, self._size(per_minute)) - self.advance(per_minute, now_s)
        return self._fill_s(missing, per_minute, now_s) if missing > _ROUNDING else 0.0

    def put(self, amount: float, per_minute: float, now_s: float) -> None:
        """Give back what was taken and not used; a negative amount is taken without a check."""
        self._level = self.advance(per_minute, now_s) + amount

    def reset_s(self, per_minute: float, now_s: float) -> float:
        """Seconds until the bucket is full."""
        missing = self._size(per_minute) - self.advance(per_minute, now_s)
        return self._fill_s(missing, per_minute, now_s) if missing > 0 else 0.0

    def _fill_s(self, amount: float, per_minute: float, now_s: float) -> float:
        """Seconds in which `amount` flows in at the present share."""
        share = self.share
        if not self.held:
            share = self._share(now_s, 0.0, per_minute)
        return amount / (share * per_minute / MINUTE_S)

    def _follow(self, per_minute: float, length_s: float, now_s: float) -> None:
        """Compute the share of the `length_s` that have passed."""
        if not self.held and length_s > 0:
            self.share = self._share(now_s - length_s, length_s, per_minute)
        followed = 1 - math.exp(-length_s / SLOW_S)
        self.slow_share += (self.share - self.slow_share) * followed

    def _share(self, from_s: float, length_s: float, per_minute: float) -> float:
        """Our part of the limit in a time; the parts of all gateways are 1 together."""
        nothing = _NOTHING * per_minute / MINUTE_S
        own_per_s = self.demand.per_s(from_s)
        part = mean_share(
            own_per_s if own_per_s > nothing else 0.0,
            self.others_per_s if self.others_per_s > nothing else 0.0,
            length_s,
        )
        if part is None:
            return 1 / self.gateways
        share = FLOOR / self.gateways + (1 - FLOOR) * part
        # Another gateway may have begun at the same time; its first report has arrived by then.
        return share if self.told > 1 else min(share, 1 / self.gateways)

    def _size(self, per_minute: float) -> float:
        whole = max(BURST * per_minute, min(self.burst_min, per_minute))
        return max(whole * self.slow_share, self.unit)
