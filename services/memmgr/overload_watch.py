"""The driver of the overload monitor: passes reports to it, logs and executes its decisions.

`OverloadMonitor` decides when to merge groups, which drops duplicate parameters to gain memory for
KV, and when to split them again. A *shortfall* is KV capacity that merges cannot provide.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from services.common.clock import monotonic_s, unix_s
from services.common.event_log import EventLog
from services.common.timeouts import wait_set
from services.core.audit.facts import MemoryDecided
from services.core.audit.record import FACT
from services.core.groups.vocabulary import Group
from services.core.overload.action_plan import ActionPlan, Change
from services.core.overload.events import (
    Action,
    Cause,
    Decision,
    DecisionReason,
    DemandReported,
    Event,
    GroupsSeen,
    ManualChange,
    MergesPlanned,
    ModelLoad,
    MoveEnded,
)
from services.core.overload.group_use import group_uses
from services.core.overload.monitor import OverloadMonitor
from services.core.overload.worker_facts import WorkerFacts
from services.memmgr.demand_view import DemandView
from services.memmgr.worker_memory import MemoryView

PAUSE_S = 0.05
"""Reports that arrive within this time are evaluated together."""
ALERT_S, CALM_S = 0.1, 0.5
"""Interval of evaluations during an overload, and otherwise."""
DECISIONS_MAX = 100
"""Maximum number of decisions that are kept for queries."""
MOVES_MAX = 30
"""Of these, maximum number of moves of running requests, which are more frequent than merges."""
OUTCOMES_MAX = 3
"""Maximum number of changes of a decision whose states are shown; the others are counted."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LoggedDecision:
    """A decision and the progress of its changes."""

    unix_s: int  # time of the decision, in seconds since 1970
    decision: Decision
    progress: dict[str, str] = field(default_factory=dict)  # latest state as text, by change

    def note(self, change: str, text: str) -> None:
        """Record the latest state of a change."""
        self.progress[change] = text

    @property
    def outcome(self) -> str:
        """The states of the first few changes, for people."""
        shown = list(self.progress.values())[:OUTCOMES_MAX]
        more = len(self.progress) - len(shown)
        return "; ".join([*shown, f"and {more} more"] if more else shown)


class OverloadWatch:
    """Owns the monitor. All methods run on the event loop's thread."""

    def __init__(
        self,
        monitor: OverloadMonitor,
        memory: MemoryView,
        demand: DemandView,
        groups: Callable[[], Iterable[Group]],
        facts: Callable[[], Mapping[str, WorkerFacts]],
        act: Callable[[LoggedDecision], ActionPlan | None],
        busy: Callable[[], Mapping[str, str]],
        updated: asyncio.Event,
        event_log: EventLog | None = None,
    ) -> None:
        """`groups` returns the serving groups. `memory` and `demand` set `updated`.

        `act` starts the changes of a decision and returns the plan, or None if there is no plan.
        `busy` returns why groups cannot change now, by group.
        """
        self._monitor = monitor
        self._memory = memory
        self._demand = demand
        self._groups = groups
        self._facts = facts
        self._act = act
        self._busy = busy
        self._updated = updated
        self._event_log = event_log
        self.decisions: deque[LoggedDecision] = deque(maxlen=DECISIONS_MAX)
        self.decided: Counter[Action] = Counter()
        self.moved: Counter[Cause] = Counter()  # running requests, by cause
        self._moves: deque[LoggedDecision] = deque(maxlen=MOVES_MAX)  # to be executed
        self._short = set[str]()  # models with a shortfall at the last evaluation
        # Set if the models with a shortfall change, and then replaced by a new event.
        self.shortfalls_changed = asyncio.Event()

    async def run(self) -> None:
        """Evaluate after new reports, and at an interval without reports, until cancelled."""
        while True:
            every_s = ALERT_S if self._monitor.is_alert else CALM_S
            await wait_set(self._updated, every_s - PAUSE_S)
            self.evaluate()
            await asyncio.sleep(PAUSE_S)

    @property
    def shortfalls(self) -> dict[str, int]:
        """Missing KV tokens by model; see `OverloadMonitor.shortfalls`."""
        return self._monitor.shortfalls

    @property
    def rising(self) -> dict[str, bool]:
        """Whether demand keeps rising, by model; see `OverloadMonitor.rising`."""
        return self._monitor.rising

    @property
    def split_obstacles(self) -> dict[str, str]:
        """Why merged groups do not split now, by group; see `OverloadMonitor.split_obstacles`."""
        return self._monitor.split_obstacles(monotonic_s(), self._busy())

    def load(self, model: str) -> ModelLoad:
        """Demand and capacity of a model; see `OverloadMonitor.load`."""
        return self._monitor.load(model)

    def evaluate(self) -> None:
        """Pass the current demand and usage of groups to the monitor, and act on its decisions."""
        now_s = monotonic_s()
        reports = self._memory.engines(now_s)
        self._apply(DemandReported(now_s, self._demand.demands()))
        self._apply(GroupsSeen(now_s, group_uses(self._groups(), reports, self._facts())))
        short = {model for model, tokens in self.shortfalls.items() if tokens}
        if short != self._short:
            self._short = short
            changed, self.shortfalls_changed = self.shortfalls_changed, asyncio.Event()
            changed.set()

    def note_manual_change(
        self, model: str, action: Action, change: Change
    ) -> LoggedDecision | None:
        """Report a manual change to the monitor; None if no group serves the model."""
        partial = action is Action.SPLIT and any(len(stages) > 1 for stages in change.targets)
        parts = (len(change.targets),) if partial else ()
        event = ManualChange(monotonic_s(), model, action, change.group_ids, parts)
        for decision in self._monitor.handle(event):
            return self._record(decision)
        return None

    def note_move(self, model: str, group_ids: tuple[str, str], cause: Cause) -> LoggedDecision:
        """Record that running requests move from a group to another."""
        reason = DecisionReason(cause, 0, 0.0, 0.0, self._monitor.load(model))
        return self._record(Decision(monotonic_s(), model, Action.MOVE, reason, 0, group_ids))

    def take_moves(self) -> list[LoggedDecision]:
        """Return the decisions to move requests since the last call; each ends by `end_move`."""
        moves = list(self._moves)
        self._moves.clear()
        return moves

    def end_move(self, logged: LoggedDecision, moved: int | None, outcome: str) -> None:
        """Report that a decision was executed: `moved` requests have left; None: it was not."""
        decision = logged.decision
        source_id, target_id = decision.group_ids
        logged.note(decision.model, outcome)
        self.moved[decision.reason.cause] += moved or 0
        self._apply(MoveEnded(monotonic_s(), decision.model, (source_id, target_id), moved))

    def _apply(self, event: Event) -> None:
        for decision in self._monitor.handle(event):
            logged = self._record(decision)
            if decision.action is Action.MOVE:
                self._moves.append(logged)
                continue
            # Report the tokens still missing after all merges; the monitor may decide EXHAUSTED.
            plan = self._act(logged) if decision.action is not Action.EXHAUSTED else None
            if plan is not None and plan.short_tokens is not None:
                self._apply(MergesPlanned(event.now_s, decision.model, plan.short_tokens))

    def _record(self, decision: Decision) -> LoggedDecision:
        log.info("%s", text_of(decision))
        logged = LoggedDecision(unix_s(), decision)
        if decision.action is Action.MOVE:
            moves = [entry for entry in self.decisions if entry.decision.action is Action.MOVE]
            if len(moves) >= MOVES_MAX:
                self.decisions.remove(moves[0])
        self.decisions.append(logged)
        self.decided[decision.action] += 1
        if self._event_log is not None:
            self._event_log.append(FACT, [MemoryDecided(monotonic_s(), decision)])
        return logged


def text_of(decision: Decision) -> str:
    """The decision with its reason, as a log line."""
    reason, load = decision.reason, decision.reason.load
    into = decision.parts_of
    names = ", ".join(f"{n} into {into[n]}" if n in into else n for n in decision.group_ids)
    merged = {Cause.MANUAL: names, Cause.START: f"{names} in pairs"}.get(
        reason.cause, f"full groups {names} with others"
    )
    change = {
        Action.MERGE: f"merge {merged if names else f'to gain {decision.needed_tokens} tokens'}",
        Action.SPLIT: f"split {names}",
        Action.CALL_OFF: f"do not split {names}",
        Action.EXHAUSTED: f"{decision.needed_tokens} tokens short after all merges",
        Action.MOVE: f"move requests from {' to '.join(decision.group_ids)}",
    }[decision.action]
    return (
        f"{decision.model}: {change} ({reason.cause}): demand {load.demand_tokens}"
        f" (used {load.used_tokens}, waiting {load.waiting_tokens},"
        f" queued {load.queued_tokens}, refused {load.refused_tokens};"
        f" {load.waiting} requests) and forecast {load.forecast_tokens} against"
        f" {reason.threshold_tokens} tokens for {reason.held_s:.2f} of {reason.dwell_s:g} s;"
        f" capacity {load.capacity_tokens}, undropped {load.undropped_tokens}"
    )
