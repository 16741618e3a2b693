"""Adapts the share of the slack that batch work gets, and limits batch-only iterations.

The *slack* of an iteration is the time between the predicted end of its online work and the first
online deadline. If batch work used all of it, each iteration would take longer, and online requests
would hold their KV blocks and slots longer. The share is reduced at once when online requests lack
either or miss deadlines, and grows slowly otherwise. A *lone* decode is an iteration of one decode.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf

SHARE_MIN = 0.02
"""Lower bound of the share after cuts, unless its maximum is lower."""
SHARE_CUT = 0.9
"""Factor of the share after an iteration with contention."""
SHARE_RISE = 0.01
"""Increment of the share after an iteration without contention."""
CROWDED = 0.6
"""Share of all blocks or slots from which their use by online sequences counts as contention."""
TARGET_KEPT_S = 120.0
"""Seconds for which the TTFT target of an online request is assumed for further arrivals."""
GAP_WEIGHT = 0.1
"""Weight of the newest inter-arrival gap in the moving average."""
LONE_DECODES = 4
"""Least limit of a batch-only iteration, in durations of a lone decode, so that it progresses."""


@dataclass(slots=True)
class HarvestShare:
    """Share of the slack for batch work, adapted between `SHARE_MIN` and `maximum` (0 to 1)."""

    maximum: float
    share: float = field(init=False)

    def __post_init__(self) -> None:
        self.share = self.maximum

    def observe(self, contended: bool) -> None:
        """Adapt the share after an iteration with online and batch work.

        `contended`: a deadline was missed, an online request waits for blocks or a slot, or online
        sequences hold most of either (`CROWDED`).
        """
        # Multiplicative decrease, additive increase.
        if contended:
            self.share = min(self.maximum, max(SHARE_MIN, SHARE_CUT * self.share))
        else:
            self.share = min(self.maximum, self.share + SHARE_RISE)


@dataclass(slots=True)
class OnlineArrivals:
    """Predicts the online requests that may arrive during a batch-only iteration."""

    # (arrival, TTFT target) of recent requests, ascending in both: a sliding-window minimum.
    _targets: deque[tuple[float, float]] = field(default_factory=deque)
    _last_s: float | None = None  # last arrival
    _gap_s: float = inf  # moving average of the gap between arrivals

    def note(self, now_s: float, ttft_s: float | None) -> None:
        """Note an online arrival and its TTFT target, if any."""
        if self._last_s is not None:
            gap_s = now_s - self._last_s
            known = self._gap_s < inf
            self._gap_s = self._gap_s + GAP_WEIGHT * (gap_s - self._gap_s) if known else gap_s
        self._last_s = now_s
        self._forget(now_s)
        if ttft_s is not None:
            # Older targets that are not smaller can never be the minimum again.
            while self._targets and self._targets[-1][1] >= ttft_s:
                self._targets.pop()
            self._targets.append((now_s, ttft_s))

    def least_target_s(self, now_s: float) -> float:
        """The smallest TTFT target of recent requests; `inf` without targets."""
        self._forget(now_s)
        return self._targets[0][1] if self._targets else inf

    def _forget(self, now_s: float) -> None:
        """Forget targets older than `TARGET_KEPT_S`."""
        while self._targets and self._targets[0][0] < now_s - TARGET_KEPT_S:
            self._targets.popleft()

    def expected_gap_s(self, now_s: float) -> float:
        """Expected seconds until the next online arrival; `inf` before the second arrival."""
        if self._last_s is None or self._gap_s == inf:
            return inf
        return max(self._gap_s, now_s - self._last_s)


def batch_only_bound_s(lone_decode_s: float, most_s: float, waits_s: float) -> float:
    """Maximum seconds of a batch-only iteration: half of `waits_s`, and at most `most_s`.

    `waits_s` is the tolerated time between an arrival and the end of the iteration, see
    `Harvester`. The limit is never below `LONE_DECODES` lone decodes of `lone_decode_s` seconds.
    """
    return max(LONE_DECODES * lone_decode_s, min(most_s, waits_s / 2))
