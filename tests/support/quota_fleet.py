"""Gateways that share a quota, in simulated time; they die, join, or lose contact."""

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from services.core.quota.limits import Exceeded, QuotaLimits
from services.core.quota.owner_use import OwnerUse
from services.core.quota.state import QuotaReport, QuotaState

OWNER = "alice"
EXCHANGE_INTERVAL_S = 1.0
LEASE_S = 10
WINDOW_S = 60.0

Rates = Callable[[str, float], float]
"""Request rate of a gateway, in requests per second, as a function of time."""


@dataclass
class Fleet:
    """Gateways and their published use; `used` are admitted amounts by time."""

    limits: QuotaLimits
    rng: Random
    sizes: Callable[[Random], int] | None = None
    states: dict[str, QuotaState] = field(default_factory=dict)
    table: dict[str, QuotaReport] = field(default_factory=dict)
    etcd_down: bool = False
    used: list[tuple[float, int]] = field(default_factory=list)
    now_s: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=itertools.count)

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """Schedule a call."""
        heapq.heappush(self._events, (time_s, next(self._order), act))

    def join(self, name: str, rates: Rates) -> None:
        """Start a gateway that receives requests at `rates`."""
        self.states[name] = QuotaState()
        self.table[name] = QuotaReport(0, {})
        self._exchange(name)
        self.at(self.now_s + self.rng.random() * EXCHANGE_INTERVAL_S, lambda: self._tick(name))
        self._next_request(name, rates)

    def die(self, name: str) -> None:
        """Kill a gateway; its record expires with its lease."""
        del self.states[name]
        self.at(self.now_s + LEASE_S, lambda: self.table.pop(name) and None)

    def run(self, end_s: float) -> None:
        """Run until `end_s`."""
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, act = heapq.heappop(self._events)
            act()

    def _tick(self, name: str) -> None:
        if name in self.states:
            self._exchange(name)
            # Delayed by up to a round trip to etcd.
            self.at(
                self.now_s + EXCHANGE_INTERVAL_S + 0.2 * self.rng.random(), lambda: self._tick(name)
            )

    def _exchange(self, name: str) -> None:
        state, now_s = self.states[name], self.now_s
        state.hold(self.etcd_down, now_s)
        if self.etcd_down:
            return
        self.table[name] = QuotaReport(self.table[name].revision + 1, state.report(now_s))
        state.receive(
            {other: reported for other, reported in self.table.items() if other != name}, now_s
        )

    def _next_request(self, name: str, rates: Rates) -> None:
        per_s = rates(name, self.now_s)
        wait_s = self.rng.expovariate(per_s) if per_s > 0 else 0.05
        self.at(self.now_s + wait_s, lambda: self._request(name, rates))

    def _request(self, name: str, rates: Rates) -> None:
        if name not in self.states:
            return
        if rates(name, self.now_s) > 0:
            use = self.states[name].use(OWNER, self.limits, self.now_s)
            amount = self._served(use)
            if amount:
                self.used.append((self.now_s, amount))
        self._next_request(name, rates)

    def _served(self, use: OwnerUse) -> int:
        if use.enter(self.now_s) is not None:
            return 0
        amount = 1
        if self.sizes is not None:
            amount = self.sizes(self.rng)
            reserved = use.reserve(amount, (0,), self.now_s)
            if isinstance(reserved, Exceeded):
                amount = 0
            else:
                assert reserved.charged == amount
                use.settle(reserved, 0, True, self.now_s)
        use.leave(0.0)
        return amount

    def minutes(self, end_s: float, begin_s: float = 0.0) -> tuple[float, float]:
        """Smallest and largest use in any minute between the two times."""
        times_s = [time_s for time_s, _ in self.used]
        sums = [0, *itertools.accumulate(amount for _, amount in self.used)]

        def within(from_s: float) -> int:
            return (
                sums[bisect_right(times_s, from_s + WINDOW_S)] - sums[bisect_right(times_s, from_s)]
            )

        steps = range(int(begin_s * 4), int((end_s - WINDOW_S) * 4) + 1)
        amounts = [within(step / 4) for step in steps]
        return min(amounts), max(amounts)


def parts(shares: Mapping[str, Sequence[tuple[float, float]]], per_s: float) -> Rates:
    """Rates that give each gateway a share of `per_s`, from given times on."""

    def rate(name: str, now_s: float) -> float:
        current = [part for from_s, part in shares.get(name, ()) if from_s <= now_s]
        return per_s * (current[-1] if current else 0.0)

    return rate
