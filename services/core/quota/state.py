"""The quotas of a gateway, as a pure state machine: times and reports are arguments.

Limits belong to owners of API keys and hold over all gateways. About once a second each gateway
reports the recent demand of its owners to the others, and computes its own share of each limit
from their reports, so there is no coordinator.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.core.quota.demand import DECAY_S, OwnerDemand
from services.core.quota.limits import QuotaLimits
from services.core.quota.owner_use import OwnerUse

STALE_S = 5.0
"""Age from which the demand in a report decays, because its gateway may be dead."""
FORGET_S = 600.0
"""An owner is removed after this time without requests, if its buckets are full."""
OWNERS_REPORTED_MAX = 4096
"""Maximum number of owners in a report: those with the highest request rate."""

DemandByOwner = Mapping[str, OwnerDemand]
"""Demand by owner."""


@dataclass(frozen=True, slots=True)
class QuotaReport:
    """The report of another gateway; `revision` increases with each report."""

    revision: int
    demands: DemandByOwner


@dataclass(frozen=True, slots=True)
class _Received:
    """A report and the time at which it was first seen here."""

    report: QuotaReport
    at_s: float


@dataclass(slots=True)
class QuotaState:
    """The use of each owner with limits, and the latest reports of other gateways."""

    # Gateways that share the limits, including this gateway.
    gateways: int = 1
    # Whether the shares are frozen, because reports do not arrive.
    held: bool = False
    # By owner.
    _uses: dict[str, OwnerUse] = field(default_factory=dict)
    # By gateway.
    _received: dict[str, _Received] = field(default_factory=dict)

    def use(self, owner: str, limits: QuotaLimits, now_s: float) -> OwnerUse:
        """The use of an owner at this gateway, with its current limits."""
        use = self._uses.get(owner)
        if use is None:
            use = self._uses[owner] = OwnerUse.begin(limits, self.gateways, now_s)
            use.receive(self._elsewhere(owner, {}, now_s), self.gateways, now_s)
            use.hold(self.held, now_s)
        use.limits = limits
        return use

    def report(self, now_s: float) -> dict[str, OwnerDemand]:
        """The report to other gateways: owners with demand or running requests.

        Also removes owners without requests for `FORGET_S`, unless they are in debt.
        """
        for owner, use in list(self._uses.items()):
            if now_s - use.asked_s > FORGET_S and use.is_idle(now_s):
                del self._uses[owner]
        demands = {owner: use.demand(now_s) for owner, use in self._uses.items()}
        active = {owner: demand for owner, demand in demands.items() if _is_active(demand)}
        if len(active) <= OWNERS_REPORTED_MAX:
            return active
        most = sorted(active, key=lambda owner: -active[owner].requests_per_s)
        return {owner: active[owner] for owner in most[:OWNERS_REPORTED_MAX]}

    def receive(self, others: Mapping[str, QuotaReport], now_s: float) -> None:
        """Apply the latest reports of all other live gateways."""
        before = self._received
        # A repeated revision keeps its time of arrival, so that its demand decays with age.
        self._received = {
            name: last
            if (last := before.get(name)) is not None and last.report.revision == report.revision
            else _Received(report, now_s)
            for name, report in others.items()
        }
        self.gateways = 1 + len(others)
        for owner, use in self._uses.items():
            use.receive(self._elsewhere(owner, before, now_s), self.gateways, now_s)

    def hold(self, held: bool, now_s: float) -> None:
        """Freeze the shares while reports do not arrive, or follow the demand again."""
        if held != self.held:
            self.held = held
            for use in self._uses.values():
                use.hold(held, now_s)

    def _elsewhere(self, owner: str, before: Mapping[str, _Received], now_s: float) -> OwnerDemand:
        """The owner's demand at all other gateways; spilt amounts are those since `before`."""
        requests_per_s = tokens_per_s = requests_spilt = tokens_spilt = minute_tokens = 0.0
        running = 0
        for name, received in self._received.items():
            demand = received.report.demands.get(owner)
            if demand is None:
                continue
            late_s = max(0.0, now_s - received.at_s - STALE_S)
            weight = math.exp(-late_s / DECAY_S)
            requests_per_s += weight * demand.requests_per_s
            tokens_per_s += weight * demand.tokens_per_s
            if late_s == 0:
                running += demand.running
                minute_tokens += demand.minute_tokens
            last = before[name].report.demands.get(owner) if name in before else None
            if last is not None:
                # Reports carry totals; a restarted gateway counts from 0 again.
                requests_spilt += max(0.0, demand.requests_spilt - last.requests_spilt)
                tokens_spilt += max(0.0, demand.tokens_spilt - last.tokens_spilt)
        return OwnerDemand(
            requests_per_s, tokens_per_s, running, requests_spilt, tokens_spilt, minute_tokens
        )


def _is_active(demand: OwnerDemand) -> bool:
    return bool(
        demand.requests_per_s or demand.tokens_per_s or demand.running or demand.minute_tokens
    )
