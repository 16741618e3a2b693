"""The overload monitor's state of a model: smoothed rates, dwell times, and decisions in progress.

See `monitor.py` for the terms and for the conditions that use them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, exp

from services.core.demand import ModelDemand
from services.core.overload.demand_trend import DemandTrend
from services.core.overload.events import (
    Action,
    GroupUse,
    ModelLoad,
    OverloadConfig,
    ReportStatus,
)
from services.core.overload.rebalance import Rebalancer
from services.core.overload.static_pipelines import StaticPipelines

CHANGING_MAX_S = 30.0
"""How long a group in a change-over delays decisions about other groups of its model."""

_Layout = frozenset[tuple[str, tuple[str, ...]]]
"""Groups with the ids of their workers."""


@dataclass(slots=True)
class ModelState:
    """The monitor's state of a model."""

    split_dwell_s: float  # doubled by regretted splits
    layout: _Layout = frozenset()  # in the last `GroupsSeen`
    statuses: frozenset[tuple[str, ReportStatus]] = frozenset()  # by group, in the last event
    changing_since_s: float | None = None  # a group changes since then
    rate_tokens_per_s: float = 0.0  # smoothed KV need of arriving requests
    growth_tokens_per_s: float = 0.0  # smoothed growth of demand, net of completed requests
    mean_demand_tokens: float | None = None  # smoothed demand; None after a change of groups
    smoothed_at_s: float | None = None  # last update of these rates
    overloaded_since_s: float | None = None  # None: not overloaded
    subsided_since_s: float | None = None  # None: demand has not subsided
    partial_since_s: float | None = None  # the same for partial splits
    last_split_s: float | None = None  # last split for subsided demand
    settle_until_s: float = 0.0  # until then, the last decision or change takes effect
    exhausted: bool = False  # merges cannot meet the demand of this overload
    calm_since_s: float | None = None  # no overload since then
    # Time until which a manual change is not reverted, by its action.
    manual_until_s: dict[Action, float] = field(default_factory=dict)
    # Time of the next decision to split a group with a leaving member, by group.
    departing_until_s: dict[str, float] = field(default_factory=dict)
    splitting: frozenset[str] = frozenset()  # groups in a split for subsided demand
    trend: DemandTrend = field(default_factory=DemandTrend)
    pipelines: StaticPipelines = field(default_factory=StaticPipelines)
    moves: Rebalancer = field(default_factory=Rebalancer)

    def restart_dwell(self) -> None:
        """Restart all dwell times: what was measured belongs to other groups."""
        self.overloaded_since_s = self.subsided_since_s = self.partial_since_s = None

    def longer_dwell_s(self, config: OverloadConfig) -> float:
        """The dwell time after a regretted split: doubled, within the limit."""
        return min(2 * self.split_dwell_s, max(config.split_dwell_s, config.split_dwell_max_s))

    def split_delay(self, now_s: float) -> str:
        """Why a split that demand and KV allow is not decided yet; "" if it is due."""
        low_since_s = self.subsided_since_s
        if low_since_s is None:
            low_since_s = self.partial_since_s
        dwell_s = self.split_dwell_s - elapsed_s(low_since_s, now_s)
        manual_s = self.manual_until_s.get(Action.MERGE, now_s) - now_s
        settle_s = self.settle_until_s - now_s
        if manual_s > max(0.0, dwell_s, settle_s):
            return f"a manual change delays splits for {ceil(manual_s)} s more"
        if settle_s > max(0.0, dwell_s):
            return f"the last change delays splits for {ceil(settle_s)} s more"
        if dwell_s <= 0:
            return ""
        return f"demand must stay low for {ceil(dwell_s)} s more (of {self.split_dwell_s:g} s)"

    def forecast_tokens(self, lookahead_s: float) -> int:
        """Predicted growth of demand within the look-ahead, at least 0."""
        # Growth is net of completed requests, so it cannot exceed the rate of arrivals.
        net = min(self.rate_tokens_per_s, max(0.0, self.growth_tokens_per_s))
        return round(net * lookahead_s)

    def note_groups(self, groups: Sequence[GroupUse], config: OverloadConfig, now_s: float) -> None:
        """Record all groups of the model."""
        changing = any(group.report_status is ReportStatus.CHANGING for group in groups)
        self.changing_since_s = since(changing, self.changing_since_s, now_s)
        if self._awaits_change(now_s):
            # The changing group's demand is unknown, so the model's demand is not comparable.
            self.settle_until_s = max(self.settle_until_s, now_s + config.report_s)
        self._note_layout(groups, config, now_s)
        self.pipelines.note(groups)

    def _note_layout(
        self, groups: Sequence[GroupUse], config: OverloadConfig, now_s: float
    ) -> None:
        """Reset measurements if the groups, or the groups that count, have changed."""
        layout = frozenset((group.group_id, group.worker_ids) for group in groups)
        statuses = frozenset((group.group_id, group.report_status) for group in groups)
        if (layout, statuses) != (self.layout, self.statuses):
            self.mean_demand_tokens = None
            self.settle_until_s = max(self.settle_until_s, now_s + config.report_s)
        if layout != self.layout:
            # The last decision has taken effect; wait only for reports of the new groups.
            self.settle_until_s = now_s + config.report_s
            self.restart_dwell()
            ids = {group.group_id for group in groups}
            # The first of the new groups keeps the id, so compare the workers, too.
            self.splitting &= {group_id for group_id, _ in layout & self.layout}
            self.departing_until_s = {
                group_id: until_s
                for group_id, until_s in self.departing_until_s.items()
                if group_id in ids
            }
        self.layout, self.statuses = layout, statuses

    def note_calm(self, calm: bool, config: OverloadConfig, now_s: float) -> None:
        """End a shortfall after `calm_s` without overload."""
        self.calm_since_s = since(calm, self.calm_since_s, now_s)
        if elapsed_s(self.calm_since_s, now_s) >= config.calm_s:
            self.exhausted = False

    def note_trend(self, load: ModelLoad | None, config: OverloadConfig, now_s: float) -> None:
        """Add a load to the trend, or None if no group has current reports."""
        merged = any(len(worker_ids) > 1 for _, worker_ids in self.layout)
        if self._awaits_change(now_s):
            self.trend.skip(now_s)
        elif merged and load is not None:
            self.trend.sample(load, config, now_s)
        else:
            self.trend.clear()

    def smooth(
        self,
        demand_tokens: int,
        reported: ModelDemand | None,
        config: OverloadConfig,
        now_s: float,
    ) -> None:
        """Update the exponentially smoothed rates of arrivals and growth."""
        rate = reported.arriving_tokens_per_s if reported is not None else 0.0
        passed_s = max(0.0, now_s - self.smoothed_at_s) if self.smoothed_at_s is not None else 0.0
        weight = 1 - exp(-passed_s / config.smoothing_s)
        self.smoothed_at_s = now_s
        self.rate_tokens_per_s += weight * (rate - self.rate_tokens_per_s)
        if self.mean_demand_tokens is None:
            self.mean_demand_tokens = demand_tokens
        self.mean_demand_tokens += weight * (demand_tokens - self.mean_demand_tokens)
        # A first-order filter lags a ramp by slope * time constant, so slope = lag / time constant.
        ahead = demand_tokens - self.mean_demand_tokens
        self.growth_tokens_per_s = ahead / config.smoothing_s

    def _awaits_change(self, now_s: float) -> bool:
        """Whether a group is in a change-over that delays decisions."""
        changing_s = elapsed_s(self.changing_since_s, now_s)
        return self.changing_since_s is not None and changing_s < CHANGING_MAX_S


def since(holds: bool, since_s: float | None, now_s: float) -> float | None:
    """Start of the current run in which the condition holds; None if it does not hold."""
    if not holds:
        return None
    return now_s if since_s is None else since_s


def elapsed_s(since_s: float | None, now_s: float) -> float:
    """How long a condition has held; 0 if it does not hold."""
    return now_s - since_s if since_s is not None else 0.0
