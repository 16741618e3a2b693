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
forecast is below `subsided_share` of the undropped capacity; full groups are then no overload,
unless a split causes it, so both conditions never hold at once.

A group splits into single workers only if its KV in use fits at each member with all layers. A
*partial split* into smaller merged groups has its own condition: the forecast is below
`subsided_share` of the capacity *after* it. While a split into single workers is about to be
decided, no group splits partially.

Hysteresis: each condition must hold for a dwell time, and if overload follows a split, the dwell
time of the next split is doubled. This keeps merges and splits from alternating.

The policies `recompute`, `migrate` and `static-pipeline` drop nothing in an overload; the last
merges single workers once, whatever the demand. In every policy, demand that keeps rising while
groups are merged is reported (`rising`).

With `rebalance`, running requests move from full groups to others first (`rebalance.py`). Groups
merge for a full one only if no move can help, or if it has been full for `settle_s` in spite of
moves. Nothing moves while requests wait, demand exceeds all capacity, and merges can raise it.

A merged group with a member that shuts down (*leaving*) is split immediately, without dwell time.
A split reduces capacity while it is prepared; if that causes overload, even at subsided demand, the
split is cancelled, unless it is due to a leaving member.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
    MoveEnded,
    OverloadConfig,
    OverloadPolicy,
    Rebalance,
    ReportStatus,
)
from services.core.overload.model_state import ModelState, elapsed_s, since
from services.core.overload.split_choice import SplitChoice, choose_splits

STATIC = "the policy static-pipeline splits no groups"


@dataclass(slots=True)
class OverloadMonitor:
    """Monitors demand and capacity of every model; vanished models and groups are removed.

    Groups without current reports and groups with a leaving member count neither as demand nor as
    capacity.
    """

    config: OverloadConfig = field(default_factory=OverloadConfig)
    _groups: dict[str, list[GroupUse]] = field(default_factory=dict)  # with current reports
    _unknown: dict[str, str] = field(default_factory=dict)  # why other merged groups do not split
    _demands: dict[str, ModelDemand] = field(default_factory=dict)  # the schedulers' queues
    _models: dict[str, ModelState] = field(default_factory=dict)  # by model name, as `_groups`

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
            case MoveEnded():
                if (state := self._models.get(event.model)) is not None:
                    state.moves.note_over(*event.group_ids, event.moved, event.now_s)
                return []
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

    def split_obstacles(self, now_s: float, busy: Mapping[str, str]) -> dict[str, str]:
        """Why merged groups are not split now, by group; "" for a group that is about to split.

        `busy`: why groups cannot change now, by group (`ActionState.busy`).
        """
        obstacles = dict(self._unknown)
        static = self.config.policy is OverloadPolicy.STATIC_PIPELINE
        for model, groups in self._groups.items():
            load = self.load(model)
            choice, delay = self._choice(model, load), self._models[model].split_delay(now_s)
            for group in groups:
                if len(group.members) > 1:
                    obstacle = choice.obstacle(group, load.expected_tokens) or delay
                    # A group with a leaving member splits at once.
                    obstacle = "" if group.draining else STATIC if static else obstacle
                    obstacles[group.group_id] = busy.get(group.group_id) or obstacle
        return obstacles

    def load(self, model: str) -> ModelLoad:
        """Demand and capacity of a model as of the last events; zeros before its first groups."""
        groups, state = self._counted(model), self._models.get(model)
        lookahead_s = self.config.lookahead_s
        demand = self._demands.get(model) or ModelDemand(model)
        used = sum(group.used_tokens for group in groups)
        waiting_tokens = sum(group.waiting_tokens for group in groups)
        return ModelLoad(
            demand_tokens=used + waiting_tokens + demand.queued_tokens + demand.refused_tokens,
            forecast_tokens=0 if state is None else state.forecast_tokens(lookahead_s),
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
        unknown = [g for g in seen.groups if g.report_status is not ReportStatus.CURRENT]
        self._unknown = {g.group_id: g.whole_reason for g in unknown if len(g.worker_ids) > 1}
        for model, groups in by_model.items():
            state = before.get(model) or ModelState(self.config.split_dwell_s)
            self._models[model] = state
            self._groups[model] = [g for g in groups if g.report_status is ReportStatus.CURRENT]
            state.note_groups(groups, self.config, seen.now_s)

    def _decide(self, model: str, now_s: float) -> list[Decision]:
        state, config = self._models[model], self.config
        if not self._groups[model]:
            # Without current reports no overload is detected, so a reported shortfall ends in time.
            state.note_calm(True, config, now_s)
            state.note_trend(None, config, now_s)
            return []
        load = self.load(model)
        state.note_trend(load, config, now_s)
        state.smooth(load.demand_tokens, self._demands.get(model), config, now_s)
        load = replace(load, forecast_tokens=state.forecast_tokens(config.lookahead_s))
        decisions = self._split_departing(model, load, now_s)
        decisions += self._move(model, load, now_s)
        decision = self._decide_by_load(model, load, now_s)
        return decisions if decision is None else [*decisions, decision]

    def _move(self, model: str, load: ModelLoad, now_s: float) -> list[Decision]:
        """Decide which running requests move to other groups."""
        state, mode = self._models[model], self.config.moves
        if mode is Rebalance.OFF:
            return []
        state.moves.note_groups(self._groups[model], now_s)
        if self._needs_merges(model, load, now_s):
            return []
        demand = self._demands.get(model)
        first = 0 if demand is None or mode is Rebalance.STUCK else demand.first_queued_tokens
        evenly = self.config.policy is OverloadPolicy.MIGRATE
        moves = state.moves.choose(
            self._counted(model), now_s, first_queued_tokens=first, evenly=evenly
        )
        return [
            Decision(
                *(now_s, model, Action.MOVE),
                DecisionReason(move.cause, load.capacity_tokens, 0.0, 0.0, load),
                *(move.tokens, (move.source_id, move.target_id)),
                requests_max=move.requests,
            )
            for move in moves
        ]

    def _needs_merges(self, model: str, load: ModelLoad, now_s: float) -> bool:
        """Whether only merges can meet the demand, and are decided."""
        # No group has room for long then, and requests that move now pause twice.
        state = self._models[model]
        possible = self.config.policy is OverloadPolicy.DROP and len(self._counted(model)) > 1
        # Without waiting requests, and for a while after an operator has split, none is decided.
        decided = load.waiting > 0 and now_s >= state.manual_until_s.get(Action.SPLIT, now_s)
        short = load.expected_tokens > load.capacity_tokens
        return possible and decided and short and not state.exhausted

    def _decide_by_load(self, model: str, load: ModelLoad, now_s: float) -> Decision | None:
        config, state = self.config, self._models[model]
        choice = self._choice(model, load)
        low = load.expected_tokens < choice.singles_tokens
        state.splitting -= set(self._departing(model))
        # A full group is overloaded even while others have free memory: its requests cannot run
        # elsewhere. Without waiting requests there is no overload, however high the forecast.
        short = load.expected_tokens > load.capacity_tokens
        short = short or (load.stuck_tokens > 0 and not self._moves_may_help(model, now_s))
        crowded = self._crowded(model, load)
        overloaded = load.waiting > 0 and (bool(crowded) if low else short)
        subsided = low and bool(choice.singles) and not overloaded
        eased = load.expected_tokens < choice.partial_tokens and not overloaded
        eased = eased and bool(choice.partial)
        state.note_calm(not overloaded, config, now_s)
        # While the last decision takes effect, only the cancellation of a split is decided.
        if now_s < state.settle_until_s and not state.splitting:
            return None
        if config.policy is OverloadPolicy.STATIC_PIPELINE and (ids := state.pipelines.due(now_s)):
            state.settle_until_s = now_s + config.settle_s
            reason = DecisionReason(Cause.START, load.capacity_tokens, 0.0, 0.0, load)
            return Decision(now_s, model, Action.MERGE, reason, group_ids=ids)
        state.overloaded_since_s = since(overloaded, state.overloaded_since_s, now_s)
        state.subsided_since_s = since(subsided, state.subsided_since_s, now_s)
        state.partial_since_s = since(eased, state.partial_since_s, now_s)
        if overloaded and now_s >= state.manual_until_s.get(Action.SPLIT, now_s):
            held_s, dwell_s = elapsed_s(state.overloaded_since_s, now_s), config.overload_dwell_s
            if held_s >= dwell_s:
                reason = DecisionReason(
                    *(Cause.OVERLOAD, load.capacity_tokens, held_s, dwell_s, load),
                    self._moves_may_help(model, now_s),
                )
                if not state.splitting:
                    return self._merge(model, reason, now_s)
                return self._call_off(model, crowded if low else state.splitting, reason, now_s)
        held = now_s < state.settle_until_s or now_s < state.manual_until_s.get(Action.MERGE, now_s)
        return None if held else self._split_subsided(model, choice, load, now_s)

    def _moves_may_help(self, model: str, now_s: float) -> bool:
        """Whether moves may still end that groups are full."""
        if self.config.moves is Rebalance.OFF:
            return False
        moves, within_s = self._models[model].moves, self.config.settle_s
        return moves.may_help(self._counted(model), within_s, now_s)

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
        # A further split would revert a partial split as well.
        kept = (Action.SPLIT, Action.MERGE) if changed.parts else (changed.action,)
        until_s = changed.now_s + self.config.manual_hold_s
        state.manual_until_s = dict.fromkeys(kept, until_s)
        # Measurements belong to the groups before the change.
        state.settle_until_s = changed.now_s + self.config.settle_s
        state.restart_dwell()
        ids, parts = changed.group_ids, changed.parts
        return [Decision(changed.now_s, changed.model, changed.action, reason, 0, ids, parts)]

    def _merge(self, model: str, reason: DecisionReason, now_s: float) -> Decision | None:
        """Decide to merge; if merges are impossible, report a shortfall once per overload."""
        state, config = self._models[model], self.config
        needed = max(1, reason.load.short_tokens)
        if config.policy is not OverloadPolicy.DROP or len(self._counted(model)) < 2:
            return self._exhaust(model, reason, needed, now_s)
        state.settle_until_s = now_s + config.settle_s
        # Overload soon after a split: the split was too early (regretted), so delay the next.
        regretted = state.last_split_s is not None and now_s - state.last_split_s < config.regret_s
        state.split_dwell_s = state.longer_dwell_s(config) if regretted else config.split_dwell_s
        # If the model as a whole has capacity, only its full groups need to merge with others.
        full: tuple[str, ...] = ()
        if reason.load.expected_tokens <= reason.load.capacity_tokens:
            full = tuple(g.group_id for g in self._counted(model) if g.stuck_tokens)
        return Decision(now_s, model, Action.MERGE, reason, needed, full)

    def _call_off(
        self, model: str, groups: frozenset[str], reason: DecisionReason, now_s: float
    ) -> Decision:
        """Cancel splits in preparation that turned out to be too early."""
        state = self._models[model]
        group_ids, state.splitting = tuple(sorted(groups)), state.splitting - groups
        state.settle_until_s = now_s + self.config.report_s
        state.split_dwell_s = state.longer_dwell_s(self.config)
        state.last_split_s = state.overloaded_since_s = None
        return Decision(now_s, model, Action.CALL_OFF, reason, group_ids=group_ids)

    def _note_planned(self, planned: MergesPlanned) -> list[Decision]:
        """Report a shortfall, once per overload, if all merges together gain too little."""
        state = self._models.get(planned.model)
        if state is None:
            return []
        if planned.short_tokens <= 0:
            state.exhausted = False
            return []
        load, now_s = self.load(planned.model), planned.now_s
        held_s = elapsed_s(state.overloaded_since_s, now_s)
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
        held_s = elapsed_s(since_s if singles_due else partial_since_s, now_s)
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

    def _crowded(self, model: str, load: ModelLoad) -> frozenset[str]:
        """Groups whose split leaves too little room for their demand, or for the model's."""
        splitting = self._models[model].splitting
        if load.expected_tokens > load.capacity_tokens:
            return splitting
        full = {group.group_id for group in self._counted(model) if group.stuck_tokens}
        return splitting & full

    def _counted(self, model: str) -> list[GroupUse]:
        """The groups that count as demand and capacity: those without a leaving member."""
        return [group for group in self._groups.get(model, ()) if not group.draining]
