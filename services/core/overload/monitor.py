"""The overload monitor (KunServe §3): decides when to drop and when to restore parameters.

`OverloadMonitor` is a state machine of the memory manager: events in, decisions out. A *merge* of
groups drops duplicate parameters, which gains memory for KV; a *split* restores all layers at each
worker. All amounts are KV in tokens.

Demand is the KV that running requests use plus the KV that waiting requests need: at workers, in
the schedulers' queues, and of recently refused requests, since clients retry those. The *forecast*
is demand plus its predicted growth within the look-ahead. *Undropped* capacity is the capacity if
every worker held all layers.

Overload: requests wait, and the forecast exceeds the capacity of the model, or the demand at a
group exceeds that group's capacity (its requests cannot run elsewhere). Subsided demand: the
forecast is below `subsided_share` of the undropped capacity; full groups are then no overload, so
both conditions never hold at once.

A group splits into single workers only if its KV in use fits at each member with all layers. A
*partial split* into smaller merged groups has its own condition: the forecast is below
`subsided_share` of the capacity *after* it. While a split into single workers is about to be
decided, no group splits partially.

Hysteresis: each condition must hold for a dwell time, and if overload follows a split, the dwell
time of the next split is doubled. This keeps merges and splits from alternating.

The policies `recompute` and `static-pipeline` answer no overload; the latter merges single workers
once, whatever the demand. In every policy, demand that keeps rising while groups are merged is
reported (`rising`).

A merged group with a member that shuts down (*leaving*) is split immediately, without dwell time.
A split reduces capacity while it is prepared; if that causes overload, the split is cancelled,
unless it is due to a leaving member.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp

from services.core.demand import ModelDemand
from services.core.overload.demand_trend import DemandTrend
from services.core.overload.events import (
    Action,
    Cause,
    Decision,
    DecisionReason,
    DemandReported,
    Event,
    GroupsSeen,
    GroupUse,
    ManualChange,
    MergesPlanned,
    ModelLoad,
    OverloadConfig,
    OverloadPolicy,
    ReportStatus,
)
from services.core.overload.split_choice import SplitChoice, choose_splits
from services.core.overload.static_pipelines import StaticPipelines

CHANGING_MAX_S = 30.0
"""How long a group in a change-over delays decisions about other groups of its model."""

STATIC = "the policy static-pipeline splits no groups"

_Layout = frozenset[tuple[str, tuple[str, ...]]]
"""Groups with the ids of their workers."""


@dataclass(slots=True)
class _Model:
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

    def restart_dwell(self) -> None:
        """Restart all dwell times: what was measured belongs to other groups."""
        self.overloaded_since_s = self.subsided_since_s = self.partial_since_s = None

    def forecast_tokens(self, lookahead_s: float) -> int:
        """Predicted growth of demand within the look-ahead, at least 0."""
        # Growth is net of completed requests, so it cannot exceed the rate of arrivals.
        net = min(self.rate_tokens_per_s, max(0.0, self.growth_tokens_per_s))
        return round(net * lookahead_s)


@dataclass(slots=True)
class OverloadMonitor:
    """Monitors demand and capacity of every model; vanished models and groups are removed.

    Groups without current reports and groups with a leaving member count neither as demand nor as
    capacity.
    """

    config: OverloadConfig = field(default_factory=OverloadConfig)
    _groups: dict[str, list[GroupUse]] = field(default_factory=dict)  # with current reports
    _demands: dict[str, ModelDemand] = field(default_factory=dict)  # the schedulers' queues
    _models: dict[str, _Model] = field(default_factory=dict)  # by model name, as `_groups`

    def handle(self, event: Event) -> list[Decision]:
        """Apply an event; returns the decisions."""
        match event:
            case GroupsSeen():
                self._observe(event)
            case DemandReported():
                self._demands = {demand.model: demand for demand in event.demands}
            case ManualChange():
                return self._note_manual_change(event)
            case MergesPlanned():
                return self._note_planned(event)
        return [d for model in self._models for d in self._decide(model, event.now_s)]

    @property
    def shortfalls(self) -> dict[str, int]:
        """Tokens of KV that each model lacks after all possible merges; 0 if merges suffice."""
        return {
            model: max(1, self.load(model).short_tokens) if state.exhausted else 0
            for model, state in self._models.items()
        }

    @property
    def rising(self) -> dict[str, bool]:
        """Whether each model's demand keeps rising while groups are merged (`DemandTrend`)."""
        return {model: state.trend.is_rising(self.config) for model, state in self._models.items()}

    @property
    def is_alert(self) -> bool:
        """Whether a model is overloaded: a decision may then be due without a new report."""
        return any(state.calm_since_s is None for state in self._models.values())

    @property
    def split_obstacles(self) -> dict[str, str]:
        """Why merged groups are not split now, by group; "" for a group that is about to split."""
        obstacles = {}
        static = self.config.policy is OverloadPolicy.STATIC_PIPELINE
        for model, groups in self._groups.items():
            load = self.load(model)
            choice = self._choice(model, load)
            for group in groups:
                if len(group.members) > 1:
                    obstacle = choice.obstacle(group, load.expected_tokens)
                    obstacles[group.group_id] = STATIC if static else obstacle
        return obstacles

    def load(self, model: str) -> ModelLoad:
        """Demand and capacity of a served model, as of the last events."""
        groups = self._counted(model)
        demand = self._demands.get(model) or ModelDemand(model)
        used = sum(group.used_tokens for group in groups)
        waiting_tokens = sum(group.waiting_tokens for group in groups)
        return ModelLoad(
            demand_tokens=used + waiting_tokens + demand.queued_tokens + demand.refused_tokens,
            forecast_tokens=self._models[model].forecast_tokens(self.config.lookahead_s),
            capacity_tokens=sum(group.capacity_tokens for group in groups),
            undropped_tokens=sum(m.unmerged_tokens for group in groups for m in group.members),
            used_tokens=used,
            waiting_tokens=waiting_tokens,
            queued_tokens=demand.queued_tokens,
            refused_tokens=demand.refused_tokens,
            waiting=sum(group.waiting for group in groups) + demand.queued + demand.refused,
            stuck_tokens=sum(group.stuck_tokens for group in groups),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        assert self._models.keys() == self._groups.keys()
        longest = max(self.config.split_dwell_max_s, self.config.split_dwell_s)
        for state in self._models.values():
            subsided = state.subsided_since_s is not None or state.partial_since_s is not None
            assert state.overloaded_since_s is None or not subsided
            assert self.config.split_dwell_s <= state.split_dwell_s <= longest
            assert state.rate_tokens_per_s >= 0

    def _observe(self, seen: GroupsSeen) -> None:
        by_model: dict[str, list[GroupUse]] = {}
        for group in seen.groups:
            by_model.setdefault(group.model, []).append(group)
        before, self._models, self._groups = self._models, {}, {}
        for model, groups in by_model.items():
            state = before.get(model) or _Model(self.config.split_dwell_s)
            self._models[model] = state
            self._groups[model] = [g for g in groups if g.report_status is ReportStatus.CURRENT]
            changing = any(group.report_status is ReportStatus.CHANGING for group in groups)
            state.changing_since_s = _since(changing, state.changing_since_s, seen.now_s)
            if changing and _held_s(state.changing_since_s, seen.now_s) < CHANGING_MAX_S:
                # The changing group's demand is unknown, so the model's demand is not comparable.
                state.settle_until_s = max(state.settle_until_s, seen.now_s + self.config.report_s)
            self._note_layout(state, groups, seen.now_s)
            state.pipelines.note(groups)

    def _note_layout(self, state: _Model, groups: Sequence[GroupUse], now_s: float) -> None:
        """Reset measurements if the groups, or the groups that count, have changed."""
        layout = _layout(groups)
        statuses = frozenset((group.group_id, group.report_status) for group in groups)
        if (layout, statuses) != (state.layout, state.statuses):
            state.mean_demand_tokens = None
            state.settle_until_s = max(state.settle_until_s, now_s + self.config.report_s)
        if layout != state.layout:
            # The last decision has taken effect; wait only for reports of the new groups.
            state.settle_until_s = now_s + self.config.report_s
            state.restart_dwell()
            ids = {group.group_id for group in groups}
            # The first of the new groups keeps the id, so compare the workers, too.
            state.splitting &= {group_id for group_id, _ in layout & state.layout}
            state.departing_until_s = {
                group_id: until_s
                for group_id, until_s in state.departing_until_s.items()
                if group_id in ids
            }
        state.layout, state.statuses = layout, statuses

    def _decide(self, model: str, now_s: float) -> list[Decision]:
        if not self._groups[model]:
            # Without current reports no overload is detected, so a reported shortfall ends in time.
            self._note_calm(self._models[model], True, now_s)
            self._note_trend(self._models[model], None, now_s)
            return []
        load = self.load(model)
        self._note_trend(self._models[model], load, now_s)
        self._smooth(model, load.demand_tokens, now_s)
        forecast = self._models[model].forecast_tokens(self.config.lookahead_s)
        load = replace(load, forecast_tokens=forecast)
        decisions = self._split_departing(model, load, now_s)
        decision = self._decide_by_load(model, load, now_s)
        return decisions if decision is None else [*decisions, decision]

    def _decide_by_load(self, model: str, load: ModelLoad, now_s: float) -> Decision | None:
        config, state = self.config, self._models[model]
        choice = self._choice(model, load)
        low = load.expected_tokens < choice.singles_tokens
        state.splitting -= set(self._departing(model))
        # A full group is overloaded even while others have free memory: its requests cannot run
        # elsewhere. Without waiting requests there is no overload, however high the forecast.
        short = load.expected_tokens > load.capacity_tokens or load.stuck_tokens > 0
        overloaded = load.waiting > 0 and short and not low
        subsided = low and bool(choice.singles)
        eased = load.expected_tokens < choice.partial_tokens and not overloaded
        eased = eased and bool(choice.partial)
        self._note_calm(state, not overloaded, now_s)
        # While the last decision takes effect, only the cancellation of a split is decided.
        if now_s < state.settle_until_s and not state.splitting:
            return None
        if config.policy is OverloadPolicy.STATIC_PIPELINE and (ids := state.pipelines.due(now_s)):
            state.settle_until_s = now_s + config.settle_s
            reason = DecisionReason(Cause.START, load.capacity_tokens, 0.0, 0.0, load)
            return Decision(now_s, model, Action.MERGE, reason, group_ids=ids)
        state.overloaded_since_s = _since(overloaded, state.overloaded_since_s, now_s)
        state.subsided_since_s = _since(subsided, state.subsided_since_s, now_s)
        state.partial_since_s = _since(eased, state.partial_since_s, now_s)
        if overloaded and now_s >= state.manual_until_s.get(Action.SPLIT, now_s):
            held_s, dwell_s = _held_s(state.overloaded_since_s, now_s), config.overload_dwell_s
            if held_s >= dwell_s:
                reason = DecisionReason(Cause.OVERLOAD, load.capacity_tokens, held_s, dwell_s, load)
                act = self._call_off if state.splitting else self._merge
                return act(model, reason, now_s)
        held = now_s < state.settle_until_s or now_s < state.manual_until_s.get(Action.MERGE, now_s)
        return None if held else self._split_subsided(model, choice, load, now_s)

    def _note_trend(self, state: _Model, load: ModelLoad | None, now_s: float) -> None:
        """Add a load to the trend, or None if no group has current reports."""
        merged = any(len(worker_ids) > 1 for _, worker_ids in state.layout)
        changing_s = _held_s(state.changing_since_s, now_s)
        if state.changing_since_s is not None and changing_s < CHANGING_MAX_S:
            state.trend.skip(now_s)
        elif merged and load is not None:
            state.trend.sample(load, self.config, now_s)
        else:
            state.trend.clear()

    def _note_calm(self, state: _Model, calm: bool, now_s: float) -> None:
        """End a shortfall after `calm_s` without overload."""
        state.calm_since_s = _since(calm, state.calm_since_s, now_s)
        if _held_s(state.calm_since_s, now_s) >= self.config.calm_s:
            state.exhausted = False

    def _split_departing(self, model: str, load: ModelLoad, now_s: float) -> list[Decision]:
        """Split merged groups with a leaving member, once per `settle_s` until they have split."""
        state = self._models[model]
        due = tuple(
            group_id
            for group_id in self._departing(model)
            if now_s >= state.departing_until_s.get(group_id, now_s)
        )
        if not due:
            return []
        state.departing_until_s |= dict.fromkeys(due, now_s + self.config.settle_s)
        reason = DecisionReason(Cause.DRAINING, load.capacity_tokens, 0.0, 0.0, load)
        return [Decision(now_s, model, Action.SPLIT, reason, group_ids=due)]

    def _note_manual_change(self, changed: ManualChange) -> list[Decision]:
        """Record a manual change as a decision, and suppress the opposite action for a while."""
        state = self._models.get(changed.model)
        if state is None:
            return []
        load = self.load(changed.model)
        merge = changed.action is Action.MERGE
        choice = self._choice(changed.model, load)
        threshold = load.capacity_tokens if merge else choice.singles_tokens
        reason = DecisionReason(Cause.MANUAL, threshold, 0.0, 0.0, load)
        state.manual_until_s = {changed.action: changed.now_s + self.config.manual_hold_s}
        # Measurements belong to the groups before the change.
        state.settle_until_s = changed.now_s + self.config.settle_s
        state.restart_dwell()
        group_ids = changed.group_ids
        return [Decision(changed.now_s, changed.model, changed.action, reason, group_ids=group_ids)]

    def _merge(self, model: str, reason: DecisionReason, now_s: float) -> Decision | None:
        """Decide to merge; if merges are impossible, report a shortfall once per overload."""
        state, config = self._models[model], self.config
        needed = max(1, reason.load.short_tokens)
        if config.policy is not OverloadPolicy.DROP or len(self._counted(model)) < 2:
            return self._exhaust(model, reason, needed, now_s)
        state.settle_until_s = now_s + config.settle_s
        # Overload soon after a split: the split was too early (regretted), so delay the next.
        regretted = state.last_split_s is not None and now_s - state.last_split_s < config.regret_s
        state.split_dwell_s = self._longer_dwell_s(state) if regretted else config.split_dwell_s
        # If the model as a whole has capacity, only its full groups need to merge with others.
        full: tuple[str, ...] = ()
        if reason.load.expected_tokens <= reason.load.capacity_tokens:
            full = tuple(g.group_id for g in self._counted(model) if g.stuck_tokens)
        return Decision(now_s, model, Action.MERGE, reason, needed, full)

    def _call_off(self, model: str, reason: DecisionReason, now_s: float) -> Decision:
        """Cancel splits in preparation that turned out to be too early."""
        state = self._models[model]
        group_ids, state.splitting = tuple(sorted(state.splitting)), frozenset()
        state.settle_until_s = now_s + self.config.report_s
        state.split_dwell_s = self._longer_dwell_s(state)
        state.last_split_s = state.overloaded_since_s = None
        return Decision(now_s, model, Action.CALL_OFF, reason, group_ids=group_ids)

    def _longer_dwell_s(self, state: _Model) -> float:
        """The dwell time after a regretted split: doubled, within the limit."""
        longest = max(self.config.split_dwell_s, self.config.split_dwell_max_s)
        return min(2 * state.split_dwell_s, longest)

    def _note_planned(self, planned: MergesPlanned) -> list[Decision]:
        """Report a shortfall, once per overload, if all merges together gain too little."""
        state = self._models.get(planned.model)
        if state is None:
            return []
        if planned.short_tokens <= 0:
            state.exhausted = False
            return []
        load, now_s = self.load(planned.model), planned.now_s
        held_s = _held_s(state.overloaded_since_s, now_s)
        dwell_s = self.config.overload_dwell_s
        reason = DecisionReason(Cause.OVERLOAD, load.capacity_tokens, held_s, dwell_s, load)
        decision = self._exhaust(planned.model, reason, planned.short_tokens, now_s)
        return [] if decision is None else [decision]

    def _exhaust(
        self, model: str, reason: DecisionReason, short_tokens: int, now_s: float
    ) -> Decision | None:
        """Record and report a shortfall; None if it was reported in this overload before."""
        if self._models[model].exhausted:
            return None
        self._models[model].exhausted = True
        return Decision(now_s, model, Action.EXHAUSTED, reason, short_tokens)

    def _split_subsided(
        self, model: str, choice: SplitChoice, load: ModelLoad, now_s: float
    ) -> Decision | None:
        state = self._models[model]
        since_s, partial_since_s = state.subsided_since_s, state.partial_since_s
        dwell_s = state.split_dwell_s
        partial_due = partial_since_s is not None and now_s - partial_since_s >= dwell_s
        singles_due = since_s is not None and now_s - since_s >= dwell_s
        # Wait for singles: two changes would pause requests twice.
        if not singles_due and (since_s is not None or not partial_due):
            return None
        threshold = choice.singles_tokens if singles_due else choice.partial_tokens
        held_s = _held_s(since_s if singles_due else partial_since_s, now_s)
        reason = DecisionReason(Cause.SUBSIDED, threshold, held_s, dwell_s, load)
        group_ids, parts = choice.decided(singles_due, partial_due)
        state.settle_until_s = now_s + self.config.settle_s
        state.last_split_s = now_s
        state.splitting = frozenset(group_ids).difference(self._departing(model))
        return Decision(now_s, model, Action.SPLIT, reason, group_ids=group_ids, parts=parts)

    def _choice(self, model: str, load: ModelLoad) -> SplitChoice:
        config = self.config
        static = config.policy is OverloadPolicy.STATIC_PIPELINE
        return choose_splits(
            () if static else self._groups[model],
            *(load.undropped_tokens, config.subsided_share, config.partial_splits),
        )

    def _departing(self, model: str) -> tuple[str, ...]:
        """Merged groups with a leaving member; they split even if their KV does not fit then."""
        return tuple(
            group.group_id
            for group in self._groups[model]
            if group.draining and len(group.members) > 1
        )

    def _counted(self, model: str) -> list[GroupUse]:
        """The groups that count as demand and capacity: those without a leaving member."""
        return [group for group in self._groups[model] if not group.draining]

    def _smooth(self, model: str, demand_tokens: int, now_s: float) -> None:
        """Update the exponentially smoothed rates of arrivals and growth."""
        state, reported = self._models[model], self._demands.get(model)
        rate = reported.arriving_tokens_per_s if reported is not None else 0.0
        passed_s = max(0.0, now_s - state.smoothed_at_s) if state.smoothed_at_s is not None else 0.0
        weight = 1 - exp(-passed_s / self.config.smoothing_s)
        state.smoothed_at_s = now_s
        state.rate_tokens_per_s += weight * (rate - state.rate_tokens_per_s)
        if state.mean_demand_tokens is None:
            state.mean_demand_tokens = demand_tokens
        state.mean_demand_tokens += weight * (demand_tokens - state.mean_demand_tokens)
        # A first-order filter lags a ramp by slope * time constant, so slope = lag / time constant.
        ahead = demand_tokens - state.mean_demand_tokens
        state.growth_tokens_per_s = ahead / self.config.smoothing_s


def _layout(groups: Sequence[GroupUse]) -> _Layout:
    """The groups and their workers."""
    return frozenset((group.group_id, group.worker_ids) for group in groups)


def _since(holds: bool, since_s: float | None, now_s: float) -> float | None:
    """Start of the current run in which the condition holds; None if it does not hold."""
    if not holds:
        return None
    return now_s if since_s is None else since_s


def _held_s(since_s: float | None, now_s: float) -> float:
    return now_s - since_s if since_s is not None else 0.0
