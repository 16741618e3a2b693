"""When parameters are dropped, and when they are restored: KunServe §3, with forecast and dwell.

Demand is the KV that running requests use and that waiting requests need: at workers, in the
scheduler's queue, and of requests that were refused lately, since clients send those again.
Overload: requests wait, and demand at the end of the look-ahead exceeds the capacity of the model,
or demand at a single group exceeds that group's capacity (its requests cannot go elsewhere).
Subsided demand: demand is below half of the *undropped* capacity; then the second kind of overload
does not count. A drop only adds capacity, so demand is never overload and subsided at once. Dwell
times, and a longer one after each split that was too early, keep merges and splits from taking
turns.
A merged group with a leaving member is split immediately, without dwell time.
A split takes its group's capacity away while it is prepared. If that becomes an overload, the split
is called off; a split because a member leaves is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp

from services.core.demand import ModelDemand
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

CHANGING_MAX_S = 30.0
"""How long a group in a change-over delays decisions about the others of its model."""

_Layout = frozenset[tuple[str, tuple[str, ...]]]


@dataclass(slots=True)
class _Model:
    """What is known of a model over time.

    `rate_tokens_per_s`: KV that arriving requests need; `growth_tokens_per_s`: how fast demand
    rises, departures included; both smoothed. `mean_demand_tokens` is None after a change of
    groups. `held_s`: until when an action by hand stands. `leaving_s`: until when a split, decided
    because a member leaves, has time to show, by group. `splitting`: groups of a split for subsided
    demand, until they have split.
    """

    split_dwell_s: float
    layout: _Layout = frozenset()
    standing: frozenset[tuple[str, ReportStatus]] = frozenset()
    changing_since_s: float | None = None
    rate_tokens_per_s: float = 0.0
    growth_tokens_per_s: float = 0.0
    mean_demand_tokens: float | None = None
    rate_s: float | None = None
    overloaded_since_s: float | None = None
    subsided_since_s: float | None = None
    split_s: float | None = None
    settles_s: float = 0.0
    exhausted: bool = False
    calm_since_s: float | None = None
    held_s: dict[Action, float] = field(default_factory=dict)
    leaving_s: dict[str, float] = field(default_factory=dict)
    splitting: frozenset[str] = frozenset()

    def forecast_tokens(self, lookahead_s: float) -> int:
        """Net arrivals within the look-ahead: what arrives less what leaves, at least 0."""
        net = min(self.rate_tokens_per_s, max(0.0, self.growth_tokens_per_s))
        return round(net * lookahead_s)


@dataclass(slots=True)
class OverloadMonitor:
    """Watches demand and capacity of every model; models and groups that vanish are forgotten.

    Groups without current reports, and groups with a leaving member, are known, but count neither
    as demand nor as capacity.
    """

    config: OverloadConfig = field(default_factory=OverloadConfig)
    _groups: dict[str, list[GroupUse]] = field(default_factory=dict)  # with current reports
    _demands: dict[str, ModelDemand] = field(default_factory=dict)
    _models: dict[str, _Model] = field(default_factory=dict)

    def handle(self, event: Event) -> list[Decision]:
        """Apply one event; return what shall change."""
        match event:
            case GroupsSeen():
                self._see(event)
            case DemandReported():
                self._demands = {demand.model: demand for demand in event.demands}
            case ManualChange():
                return self._stand_by(event)
            case MergesPlanned():
                return self._note_planned(event)
        return [one for name in self._models for one in self._decide(name, event.now_s)]

    @property
    def shortfalls(self) -> dict[str, int]:
        """KV tokens that each model lacks beyond what all merges can gain; 0 if they suffice."""
        return {
            name: max(1, self.numbers(name).short_tokens) if state.exhausted else 0
            for name, state in self._models.items()
        }

    @property
    def is_alert(self) -> bool:
        """Whether a model was overloaded when last seen: time alone may then decide."""
        return any(state.calm_since_s is None for state in self._models.values())

    def numbers(self, model: str) -> ModelLoad:
        """The numbers of a model that groups serve, as of the last events."""
        groups = self._staying(model)
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
            assert state.overloaded_since_s is None or state.subsided_since_s is None
            assert self.config.split_dwell_s <= state.split_dwell_s <= longest
            assert state.rate_tokens_per_s >= 0

    def _see(self, seen: GroupsSeen) -> None:
        by_model: dict[str, list[GroupUse]] = {}
        for group in seen.groups:
            by_model.setdefault(group.model, []).append(group)
        before, self._models, self._groups = self._models, {}, {}
        for name, groups in by_model.items():
            state = before.get(name) or _Model(self.config.split_dwell_s)
            self._models[name] = state
            self._groups[name] = [
                one for one in groups if one.report_status is ReportStatus.CURRENT
            ]
            changing = any(one.report_status is ReportStatus.CHANGING for one in groups)
            state.changing_since_s = _since(changing, state.changing_since_s, seen.now_s)
            if changing and _held_s(state.changing_since_s, seen.now_s) < CHANGING_MAX_S:
                # The use of its requests is not known; sums over other groups would mislead.
                state.settles_s = max(state.settles_s, seen.now_s + self.config.report_s)
            self._note_layout(state, groups, seen.now_s)

    def _note_layout(self, state: _Model, groups: Sequence[GroupUse], now_s: float) -> None:
        """Forget what was measured on other groups, or on other sums."""
        layout, standing = (
            _layout(groups),
            frozenset((one.group_id, one.report_status) for one in groups),
        )
        if (layout, standing) != (state.layout, state.standing):
            state.mean_demand_tokens = None
            state.settles_s = max(state.settles_s, now_s + self.config.report_s)
        if layout != state.layout:
            # The last decision shows by now.
            state.settles_s = now_s + self.config.report_s
            state.overloaded_since_s = state.subsided_since_s = None
            ids = {group.group_id for group in groups}
            merged = {group.group_id for group in groups if len(group.worker_ids) > 1}
            state.splitting &= merged
            state.leaving_s = {one: s for one, s in state.leaving_s.items() if one in ids}
        state.layout, state.standing = layout, standing

    def _decide(self, name: str, now_s: float) -> list[Decision]:
        if not self._groups[name]:
            # No overload can be seen now; a shortfall that was told must end all the same.
            self._note_calm(self._models[name], True, now_s)
            return []
        numbers = self.numbers(name)
        self._smooth(name, numbers.demand_tokens, now_s)
        forecast = self._models[name].forecast_tokens(self.config.lookahead_s)
        numbers = replace(numbers, forecast_tokens=forecast)
        found = self._split_left(name, numbers, now_s)
        decision = self._decide_by_load(name, numbers, now_s)
        return found if decision is None else [*found, decision]

    def _decide_by_load(self, name: str, numbers: ModelLoad, now_s: float) -> Decision | None:
        config, state = self.config, self._models[name]
        subsided_tokens = self._subsided_tokens(numbers)
        low = numbers.expected_tokens < subsided_tokens
        state.splitting -= set(self._left(name))
        short = numbers.expected_tokens > numbers.capacity_tokens or numbers.stuck_tokens > 0
        overloaded = numbers.waiting > 0 and short and not low
        splits = self._splits(name)
        subsided = low and bool(splits)
        self._note_calm(state, not overloaded, now_s)
        if now_s < state.settles_s and not state.splitting:
            return None
        state.overloaded_since_s = _since(overloaded, state.overloaded_since_s, now_s)
        state.subsided_since_s = _since(subsided, state.subsided_since_s, now_s)
        if overloaded and now_s >= state.held_s.get(Action.SPLIT, now_s):
            held_s, dwell_s = _held_s(state.overloaded_since_s, now_s), config.overload_dwell_s
            if held_s >= dwell_s:
                why = DecisionReason(
                    Cause.OVERLOAD, numbers.capacity_tokens, held_s, dwell_s, numbers
                )
                act = self._call_off if state.splitting else self._merge
                return act(name, why, now_s)
        if now_s < state.settles_s:
            return None
        if subsided and now_s >= state.held_s.get(Action.MERGE, now_s):
            held_s, dwell_s = _held_s(state.subsided_since_s, now_s), state.split_dwell_s
            if held_s >= dwell_s:
                why = DecisionReason(Cause.SUBSIDED, subsided_tokens, held_s, dwell_s, numbers)
                return self._split_subsided(name, why, splits, now_s)
        return None

    def _note_calm(self, state: _Model, calm: bool, now_s: float) -> None:
        """End a shortfall once there was no overload for `calm_s`."""
        state.calm_since_s = _since(calm, state.calm_since_s, now_s)
        if _held_s(state.calm_since_s, now_s) >= self.config.calm_s:
            state.exhausted = False

    def _split_left(self, name: str, numbers: ModelLoad, now_s: float) -> list[Decision]:
        """Split merged groups with a leaving member; other groups of the model go on."""
        state = self._models[name]
        left = tuple(one for one in self._left(name) if now_s >= state.leaving_s.get(one, now_s))
        if not left:
            return []
        state.leaving_s |= dict.fromkeys(left, now_s + self.config.settle_s)
        why = DecisionReason(Cause.DRAINING, numbers.capacity_tokens, 0.0, 0.0, numbers)
        return [Decision(now_s, name, Action.SPLIT, why, group_ids=left)]

    def _stand_by(self, changed: ManualChange) -> list[Decision]:
        """Record a change by hand as a decision, and leave it alone for a while."""
        state = self._models.get(changed.model)
        if state is None:
            return []
        numbers = self.numbers(changed.model)
        merge = changed.action is Action.MERGE
        threshold = numbers.capacity_tokens if merge else self._subsided_tokens(numbers)
        why = DecisionReason(Cause.MANUAL, threshold, 0.0, 0.0, numbers)
        state.held_s = {changed.action: changed.now_s + self.config.manual_hold_s}
        # The groups that were seen last are gone: what was measured on them does not hold.
        state.settles_s = changed.now_s + self.config.settle_s
        state.overloaded_since_s = state.subsided_since_s = None
        return [
            Decision(changed.now_s, changed.model, changed.action, why, group_ids=changed.group_ids)
        ]

    def _merge(self, name: str, why: DecisionReason, now_s: float) -> Decision | None:
        """The decision to merge; or, once per overload, the decision that no merge is possible."""
        state, config = self._models[name], self.config
        needed = max(1, why.numbers.short_tokens)
        if config.policy is OverloadPolicy.RECOMPUTE or len(self._staying(name)) < 2:
            return self._exhaust(name, why, needed, now_s)
        state.settles_s = now_s + config.settle_s
        regretted = state.split_s is not None and now_s - state.split_s < config.regret_s
        state.split_dwell_s = self._longer_dwell_s(state) if regretted else config.split_dwell_s
        full: tuple[str, ...] = ()
        if why.numbers.expected_tokens <= why.numbers.capacity_tokens:
            full = tuple(one.group_id for one in self._staying(name) if one.stuck_tokens)
        return Decision(now_s, name, Action.MERGE, why, needed, full)

    def _call_off(self, name: str, why: DecisionReason, now_s: float) -> Decision:
        """Give a split up that was decided too early."""
        state = self._models[name]
        names, state.splitting = tuple(sorted(state.splitting)), frozenset()
        state.settles_s = now_s + self.config.report_s
        state.split_dwell_s = self._longer_dwell_s(state)
        state.split_s = state.overloaded_since_s = None
        return Decision(now_s, name, Action.CALL_OFF, why, group_ids=names)

    def _longer_dwell_s(self, state: _Model) -> float:
        """The dwell time after a split that is regretted."""
        longest = max(self.config.split_dwell_s, self.config.split_dwell_max_s)
        return min(2 * state.split_dwell_s, longest)

    def _note_planned(self, planned: MergesPlanned) -> list[Decision]:
        """Tell, once per overload, that all merges gain too little."""
        state = self._models.get(planned.model)
        if state is None:
            return []
        if planned.short_tokens <= 0:
            state.exhausted = False
            return []
        numbers, now_s = self.numbers(planned.model), planned.now_s
        held_s = _held_s(state.overloaded_since_s, now_s)
        dwell_s = self.config.overload_dwell_s
        why = DecisionReason(Cause.OVERLOAD, numbers.capacity_tokens, held_s, dwell_s, numbers)
        decision = self._exhaust(planned.model, why, planned.short_tokens, now_s)
        return [] if decision is None else [decision]

    def _exhaust(
        self, name: str, why: DecisionReason, short_tokens: int, now_s: float
    ) -> Decision | None:
        """Remember and tell a shortfall; None if it was told before in this overload."""
        if self._models[name].exhausted:
            return None
        self._models[name].exhausted = True
        return Decision(now_s, name, Action.EXHAUSTED, why, short_tokens)

    def _split_subsided(
        self, name: str, why: DecisionReason, splits: tuple[str, ...], now_s: float
    ) -> Decision:
        state = self._models[name]
        state.settles_s = now_s + self.config.settle_s
        state.split_s = now_s
        state.splitting = frozenset(splits).difference(self._left(name))
        return Decision(now_s, name, Action.SPLIT, why, group_ids=splits)

    def _splits(self, name: str) -> tuple[str, ...]:
        return tuple(group.group_id for group in self._groups[name] if group.can_split)

    def _left(self, name: str) -> tuple[str, ...]:
        """The merged groups with a leaving member, whether or not their KV fits after a split."""
        return tuple(
            group.group_id
            for group in self._groups[name]
            if group.draining and len(group.members) > 1
        )

    def _staying(self, name: str) -> list[GroupUse]:
        """The groups that count: those without a leaving member."""
        return [group for group in self._groups[name] if not group.draining]

    def _subsided_tokens(self, numbers: ModelLoad) -> int:
        return int(self.config.subsided_share * numbers.undropped_tokens)

    def _smooth(self, name: str, demand_tokens: int, now_s: float) -> None:
        """Smooth the rates of arrivals and of growth with the last report."""
        state, reported = self._models[name], self._demands.get(name)
        rate = reported.arriving_tokens_per_s if reported is not None else 0.0
        passed_s = max(0.0, now_s - state.rate_s) if state.rate_s is not None else 0.0
        weight = 1 - exp(-passed_s / self.config.smoothing_s)
        state.rate_s = now_s
        state.rate_tokens_per_s += weight * (rate - state.rate_tokens_per_s)
        if state.mean_demand_tokens is None:
            state.mean_demand_tokens = demand_tokens
        state.mean_demand_tokens += weight * (demand_tokens - state.mean_demand_tokens)
        # How far demand is ahead of its mean tells how fast it rises.
        ahead = demand_tokens - state.mean_demand_tokens
        state.growth_tokens_per_s = ahead / self.config.smoothing_s


def _layout(groups: Sequence[GroupUse]) -> _Layout:
    """Which workers serve together."""
    return frozenset((group.group_id, group.worker_ids) for group in groups)


def _since(holds: bool, since_s: float | None, now_s: float) -> float | None:
    """Since when something holds without a break."""
    if not holds:
        return None
    return now_s if since_s is None else since_s


def _held_s(since_s: float | None, now_s: float) -> float:
    return now_s - since_s if since_s is not None else 0.0
