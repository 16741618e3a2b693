"""Watches for overload and subsided demand: feeds the monitor, logs and keeps what it decides."""

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
from services.core.overload.action_plan import ActionPlan
from services.core.overload.events import (
    Action,
    Cause,
    Decision,
    DemandReported,
    Event,
    GroupsSeen,
    ManualChange,
    MergesPlanned,
)
from services.core.overload.group_use import group_uses
from services.core.overload.monitor import OverloadMonitor
from services.core.overload.worker_facts import WorkerFacts
from services.memmgr.demand_view import DemandView
from services.memmgr.worker_memory import MemoryView

PAUSE_S = 0.05
"""News within this time is looked at together."""
ALERT_S, CALM_S = 0.1, 0.5
DECISIONS_MAX = 100
OUTCOMES_MAX = 3

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LoggedDecision:
    """A decision, its time in seconds since 1970, and its outcome so far.

    `news` has the latest state of each of its changes, in words.
    """

    unix_s: int
    decision: Decision
    news: dict[str, str] = field(default_factory=dict)

    def note(self, change: str, text: str) -> None:
        """Note the state of a change."""
        self.news[change] = text

    @property
    def outcome(self) -> str:
        """The states of the first few changes, for people."""
        shown = list(self.news.values())[:OUTCOMES_MAX]
        more = len(self.news) - len(shown)
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
        news: asyncio.Event,
        event_log: EventLog | None = None,
    ) -> None:
        """`groups`: those that serve. `news` is set by the two views.

        `act` begins what a decision asks for and returns the plan, or None if it is not its to do.
        """
        self._monitor = monitor
        self._memory = memory
        self._demand = demand
        self._groups = groups
        self._facts = facts
        self._act = act
        self._news = news
        self._event_log = event_log
        self.decisions: deque[LoggedDecision] = deque(maxlen=DECISIONS_MAX)
        self.decided: Counter[Action] = Counter()
        self._short = set[str]()
        # It is set when another model lacks tokens, or one no longer; another one takes its place.
        self.shortfalls_changed = asyncio.Event()

    async def run(self) -> None:
        """Look at news soon, and now and then without any, until cancelled.

        That is ten times a second in an overload, else twice.
        """
        while True:
            every_s = ALERT_S if self._monitor.is_alert else CALM_S
            await wait_set(self._news, every_s - PAUSE_S)
            self.look()
            await asyncio.sleep(PAUSE_S)

    @property
    def shortfalls(self) -> dict[str, int]:
        """See `OverloadMonitor`."""
        return self._monitor.shortfalls

    def look(self) -> None:
        """Give the monitor the groups of now."""
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
        self, model: str, action: Action, group_ids: Iterable[str]
    ) -> LoggedDecision | None:
        """These groups were changed by hand, which stands for a while; None if none serves it."""
        event = ManualChange(monotonic_s(), model, action, tuple(group_ids))
        for decision in self._monitor.handle(event):
            return self._keep(decision)
        return None

    def _apply(self, event: Event) -> None:
        for decision in self._monitor.handle(event):
            logged = self._keep(decision)
            plan = self._act(logged) if decision.action is not Action.EXHAUSTED else None
            if plan is not None and plan.short_tokens is not None:
                self._apply(MergesPlanned(event.now_s, decision.model, plan.short_tokens))

    def _keep(self, decision: Decision) -> LoggedDecision:
        log.info("%s", text_of(decision))
        logged = LoggedDecision(unix_s(), decision)
        self.decisions.append(logged)
        self.decided[decision.action] += 1
        if self._event_log is not None:
            self._event_log.append(FACT, [MemoryDecided(monotonic_s(), decision)])
        return logged


def text_of(decision: Decision) -> str:
    """The decision in one line, with its numbers."""
    why, numbers = decision.why, decision.why.numbers
    names = ", ".join(decision.group_ids)
    merged = names if why.cause is Cause.MANUAL else f"{names}, which are full, with others"
    change = {
        Action.MERGE: f"merge {merged if names else f'to gain {decision.needed_tokens} tokens'}",
        Action.SPLIT: f"split {names}",
        Action.CALL_OFF: f"do not split {names}",
        Action.EXHAUSTED: f"{decision.needed_tokens} tokens short after all merges",
    }[decision.action]
    return (
        f"{decision.model}: {change} ({why.cause}): demand {numbers.demand_tokens}"
        f" (used {numbers.used_tokens}, waiting {numbers.waiting_tokens},"
        f" queued {numbers.queued_tokens}, refused {numbers.refused_tokens};"
        f" {numbers.waiting} requests) and forecast {numbers.forecast_tokens} against"
        f" {why.threshold_tokens} tokens for {why.held_s:.2f} of {why.dwell_s:g} s;"
        f" capacity {numbers.capacity_tokens}, undropped {numbers.undropped_tokens}"
    )
