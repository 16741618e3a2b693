"""Converts the overload monitor's decisions into changes of groups that can start now.

Skips groups with a change in progress, and groups in exponential back-off after a failed change. If
no merge of a model was possible, its merges are in back-off, too. Flap damping: the groups of a
worker that repeatedly leaves and returns are not merged, but may be split. Tokens that merges in
progress will gain are subtracted from the need. A worker that stops reporting does not count as
departed if this service itself stalled, or if all workers stopped at once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.core.flap_damping import LEAVES_MAX, WINDOW_S, FlapDamping, LocalPauseDetector
from services.core.groups.backoff import Backoff
from services.core.groups.vocabulary import Group
from services.core.overload.action_plan import (
    ActionPlan,
    Change,
    NoPlan,
    merges,
    merges_of_full,
    splits,
    static_pipelines,
    unmergeable,
)
from services.core.overload.events import Action, Cause, Decision
from services.core.overload.worker_facts import WorkerFacts
from services.core.report import EngineReport

LOAD_IS_BACK = "called off: load has returned"
REASONS_MAX = 3
"""Maximum number of groups for which a failed plan explains why they do not merge."""


@dataclass(slots=True)
class ActionState:
    """State machine that selects changes: those in progress, back-off, and flap damping."""

    backoff_s: float  # after the first failure
    backoff_max_s: float
    _change_backoff: Backoff = field(default_factory=Backoff)  # of workers, after failed changes
    _no_plan_backoff: Backoff = field(default_factory=Backoff)  # of models without a possible merge
    _no_plan_reasons: dict[str, str] = field(default_factory=dict)  # why not, by model in back-off
    _flap_damping: FlapDamping = field(default_factory=FlapDamping)  # flap damping of workers
    _pause_detector: LocalPauseDetector = field(
        default_factory=LocalPauseDetector
    )  # detects stalls of this service
    _present: dict[str, str] = field(default_factory=dict)  # incarnations of reporting workers
    _changing: set[str] = field(default_factory=set)  # ids of groups with a change in progress
    _splits: list[Change] = field(default_factory=list)  # splits in progress
    _called_off: set[Change] = field(default_factory=set)  # cancelled splits in progress
    # Tokens that changes in progress gain: group ids -> (model, tokens).
    _gains: dict[tuple[str, ...], tuple[str, int]] = field(default_factory=dict)

    def note_workers(self, incarnations: Mapping[str, str], now_s: float) -> None:
        """Record the incarnations of the workers that report now; call it a few times a second."""
        gone = self._present.keys() - incarnations.keys()
        # If all workers are silent at once, or this process stalled, the fault is here, so silence
        # is no evidence of a departure. A new incarnation always is.
        all_silent = len(self._present) > 1 and len(gone) == len(self._present)
        gone_counts = self._pause_detector.tick(now_s) and not all_silent
        for worker_id, incarnation in self._present.items():
            departed = gone_counts if worker_id in gone else incarnations[worker_id] != incarnation
            if departed:
                self._flap_damping.note_departure(worker_id, now_s)
        for worker_id, incarnation in incarnations.items():
            if self._present.get(worker_id) != incarnation:
                self._flap_damping.note_presence(worker_id)
        self._present = dict(incarnations)

    def begin(
        self,
        decision: Decision,
        stable_groups: Iterable[Group],
        facts: Mapping[str, WorkerFacts],
        reports: Mapping[str, EngineReport],
        now_s: float,
    ) -> ActionPlan:
        """Plan changes for a MERGE or SPLIT decision; they are in progress until `ended`."""
        model = decision.model
        groups = [group for group in stable_groups if group.model == model]
        pending_tokens = sum(tokens for name, tokens in self._gains.values() if name == model)
        # Merges in progress meet part of the need; planning for all of it would drop too much.
        missing = decision.needed_tokens - pending_tokens
        for_all = decision.action is Action.MERGE and not decision.group_ids
        try:
            if decision.action is Action.SPLIT:
                asked = [group for group in groups if group.group_id in decision.group_ids]
                free = [group for group in asked if not self._busy(group, now_s)]
                changes = splits(free, facts, decision.parts_of)
            else:
                changes = self._merges(decision, pending_tokens, groups, facts, reports, now_s)
        except NoPlan as error:
            return ActionPlan((), max(0, missing) if for_all else None, str(error))
        if decision.action is Action.SPLIT:
            self._splits += changes
        for change in changes:
            self._changing.update(change.group_ids)
            self._gains[change.group_ids] = model, change.gain_tokens
        missing -= sum(change.gain_tokens for change in changes)
        return ActionPlan(tuple(changes), max(0, missing) if for_all else None)

    def to_call_off(self, decision: Decision) -> list[Change]:
        """Record and return the splits in progress that a CALL_OFF decision cancels."""
        changes = [split for split in self._splits if split.group_ids[0] in decision.group_ids]
        self._called_off.update(changes)
        return changes

    def ended(self, change: Change, is_stable: bool, now_s: float) -> None:
        """Record the end of a change, which is stable or failed.

        A cancelled change is no failure, so its workers are not in back-off.
        """
        self._changing.difference_update(change.group_ids)
        del self._gains[change.group_ids]
        if change in self._splits:
            self._splits.remove(change)
        names = [stage.worker_id for target in change.targets for stage in target]
        called_off = change in self._called_off
        self._called_off.discard(change)
        if is_stable or called_off:
            self._change_backoff.note_success(names)
        else:
            self._change_backoff.note_failure(names, now_s, self.backoff_s, self.backoff_max_s)

    def busy(self, groups: Iterable[Group], now_s: float) -> dict[str, str]:
        """Why groups cannot change now, by group; without groups that can."""
        reasons = {group.group_id: self._busy(group, now_s) for group in groups}
        return {group_id: reason for group_id, reason in reasons.items() if reason}

    def _merges(
        self,
        decision: Decision,
        pending_tokens: int,
        groups: list[Group],
        facts: Mapping[str, WorkerFacts],
        reports: Mapping[str, EngineReport],
        now_s: float,
    ) -> list[Change]:
        """Merges for the need beyond `pending_tokens` of changes in progress. Raises NoPlan."""
        model, needed = decision.model, decision.needed_tokens
        wait_s = self._no_plan_backoff.wait_s([model], now_s)
        if wait_s > 0:
            raise NoPlan(f"{self._no_plan_reasons[model]}; next try in {wait_s:.1f} s")
        if 0 < needed <= pending_tokens:
            raise NoPlan(f"merges in progress gain {pending_tokens} of {needed} tokens")
        blocked = {group.group_id: self._blocked(group, now_s) for group in groups}
        free = [group for group in groups if not blocked[group.group_id]]
        try:
            if decision.reason.cause is Cause.START:
                asked = [group for group in free if group.group_id in decision.group_ids]
                return static_pipelines(asked, facts, reports)
            if decision.group_ids:
                return merges_of_full(free, decision.group_ids, facts, reports)
            changes = merges(free, facts, reports, needed - pending_tokens)
        except NoPlan as error:
            reasons = [blocked[g.group_id] or unmergeable(g, facts) for g in groups]
            text = self._no_plan_reasons[model] = "; ".join([str(error), *_first(reasons)])
            self._no_plan_backoff.note_failure([model], now_s, self.backoff_s, self.backoff_max_s)
            raise NoPlan(text) from error
        self._no_plan_backoff.note_success([model])
        self._no_plan_reasons.pop(model, None)
        return changes

    def _blocked(self, group: Group, now_s: float) -> str:
        """Why a group that could merge does not merge now; empty if it may."""
        # Each departure of a flapping worker would break its merged group and stall the members.
        for member in group.members:
            if flapping_s := self._flap_damping.flapping_s(member.worker_id, now_s):
                return (
                    f"{member.worker_id} left {LEAVES_MAX} times within {WINDOW_S:.0f} s and does"
                    f" not merge for another {flapping_s:.0f} s"
                )
        return self._busy(group, now_s)

    def _busy(self, group: Group, now_s: float) -> str:
        """Why a group cannot change now; empty if it can."""
        if group.attempt or group.group_id in self._changing:
            return f"{group.group_id} is changing"
        wait_s = self._change_backoff.wait_s([m.worker_id for m in group.members], now_s)
        if wait_s > 0:
            return f"a change of {group.group_id} failed, next try in {wait_s:.1f} s"
        return ""


def _first(reasons: list[str]) -> list[str]:
    """The first reasons; the others are counted."""
    given = [reason for reason in reasons if reason]
    more = len(given) - REASONS_MAX
    return [*given[:REASONS_MAX], *([f"and {more} more"] if more > 0 else [])]
