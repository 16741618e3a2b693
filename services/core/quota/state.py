"""The quotas of one gateway. Pure: times and the reports of other gateways are arguments.

Each gateway reports to the others, about once a second, the recent demand of each owner. From these
reports each computes its own part of a limit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.core.quota.demand import FADE_S, Wish
from services.core.quota.limits import QuotaLimits
from services.core.quota.owner_use import OwnerUse

STALE_S = 5.0
"""A report of this age begins to fade: its gateway may have died."""
FORGET_S = 600.0
"""An owner without demand for this long is forgotten: its buckets are full again."""
OWNERS_TOLD_MAX = 4096
"""Most owners in a report: those with the highest demand."""

Wishes = Mapping[str, Wish]
"""By owner."""


@dataclass(frozen=True, slots=True)
class Told:
    """The report of a gateway; `revision` grows with each report."""

    revision: int
    wishes: Wishes


@dataclass(frozen=True, slots=True)
class _Heard:
    told: Told
    at_s: float


@dataclass(slots=True)
class QuotaState:
    """The use of each owner with limits. While `held`, shares stay as they are."""

    gateways: int = 1
    held: bool = False
    _uses: dict[str, OwnerUse] = field(default_factory=dict)
    _heard: dict[str, _Heard] = field(default_factory=dict)

    def use(self, owner: str, limits: QuotaLimits, now_s: float) -> OwnerUse:
        """The use of the owner here, with the limits that it has now."""
        found = self._uses.get(owner)
        if found is None:
            found = self._uses[owner] = OwnerUse.begin(limits, self.gateways, now_s)
            found.hear(self._elsewhere(owner, {}, now_s), self.gateways, now_s)
            found.hold(self.held, now_s)
        found.limits = limits
        return found

    def tell(self, now_s: float) -> dict[str, Wish]:
        """The report to others: owners with demand, or with requests that run."""
        for owner, use in list(self._uses.items()):
            if not use.running and now_s - use.asked_s > FORGET_S:
                del self._uses[owner]
        wishes = {owner: use.wish(now_s) for owner, use in self._uses.items()}
        active = {owner: wish for owner, wish in wishes.items() if _says_something(wish)}
        if len(active) <= OWNERS_TOLD_MAX:
            return active
        most = sorted(active, key=lambda owner: -active[owner].requests_per_s)
        return {owner: active[owner] for owner in most[:OWNERS_TOLD_MAX]}

    def hear(self, others: Mapping[str, Told], now_s: float) -> None:
        """Take the last reports of all other gateways that are alive."""
        before = self._heard
        self._heard = {
            name: last
            if (last := before.get(name)) is not None and last.told.revision == told.revision
            else _Heard(told, now_s)
            for name, told in others.items()
        }
        self.gateways = 1 + len(others)
        for owner, use in self._uses.items():
            use.hear(self._elsewhere(owner, before, now_s), self.gateways, now_s)

    def hold(self, held: bool, now_s: float) -> None:
        """Hold the shares while reports do not arrive; or follow the demand again."""
        if held != self.held:
            self.held = held
            for use in self._uses.values():
                use.hold(held, now_s)

    def _elsewhere(self, owner: str, before: Mapping[str, _Heard], now_s: float) -> Wish:
        """The sum of the reports; of the spilt amounts, the part since `before`."""
        requests_per_s = tokens_per_s = requests_spilt = tokens_spilt = 0.0
        running = 0
        for name, heard in self._heard.items():
            wish = heard.told.wishes.get(owner)
            if wish is None:
                continue
            late_s = max(0.0, now_s - heard.at_s - STALE_S)
            weight = math.exp(-late_s / FADE_S)
            requests_per_s += weight * wish.requests_per_s
            tokens_per_s += weight * wish.tokens_per_s
            running += wish.running if late_s == 0 else 0
            last = before[name].told.wishes.get(owner) if name in before else None
            if last is not None:
                requests_spilt += max(0.0, wish.requests_spilt - last.requests_spilt)
                tokens_spilt += max(0.0, wish.tokens_spilt - last.tokens_spilt)
        return Wish(requests_per_s, tokens_per_s, running, requests_spilt, tokens_spilt)


def _says_something(wish: Wish) -> bool:
    return wish.requests_per_s > 0 or wish.tokens_per_s > 0 or wish.running > 0
