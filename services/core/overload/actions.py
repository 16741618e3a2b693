"""From the monitor's decisions to changes that may begin now.

Skips groups with a change in progress, and groups in exponential back-off after a failed change. A
model without a plan for merges is in back-off, too, except for splits. A worker that comes and goes
is not merged, but may be split off. Tokens that running merges will gain count towards the need.
A silent worker has not left if this service itself stalled, or if all workers fall silent at once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.core.groups.backoff import Backoff
from services.core.groups.vocabulary import Group
from services.core.overload.action_plan import (
    ActionPlan,
    Change,
    NoPlan,
    merges,
    merges_of_full,
    splits,
)
from services.core.overload.events import Action, Decision
from services.core.overload.worker_facts import WorkerFacts
from services.core.report import EngineReport
from services.core.steadiness import SelfWatch, Steadiness

LOAD_IS_BACK = "called off: load has returned"


@dataclass(slots=True)
class ActionState:
    """Actions in progress as changes, and back-off after failures."""

    backoff_s: float
    backoff_max_s: float
    _failed: Backoff = field(default_factory=Backoff)  # of workers
    _planless: Backoff = field(default_factory=Backoff)  # of models
    _steadiness: Steadiness = field(default_factory=Steadiness)
    _self_watch: SelfWatch = field(default_factory=SelfWatch)
    _present: dict[str, str] = field(default_factory=dict)  # incarnations of workers that speak
    _changing: set[str] = field(default_factory=set)
    _splits: list[Change] = field(default_factory=list)  # that run
    _called_off: set[Change] = field(default_factory=set)  # of these
    _gains: dict[tuple[str, ...], tuple[str, int]] = field(default_factory=dict)  # model, tokens

    def see(self, incarnations: Mapping[str, str], now_s: float) -> None:
        """These workers are there and speak; call it a few times a second."""
        gone = self._present.keys() - incarnations.keys()
        blind = len(self._present) > 1 and len(gone) == len(self._present)
        silent_left = self._self_watch.look(now_s) and not blind
        for worker_id, incarnation in self._present.items():
            left = silent_left if worker_id in gone else incarnations[worker_id] != incarnation
            if left:
                self._steadiness.left(worker_id, now_s)
        for worker_id, incarnation in incarnations.items():
            if self._present.get(worker_id) != incarnation:
                self._steadiness.came(worker_id)
        self._present = dict(incarnations)

    def begin(
        self,
        decision: Decision,
        stable_groups: Iterable[Group],
        facts: Mapping[str, WorkerFacts],
        reports: Mapping[str, EngineReport],
        now_s: float,
    ) -> ActionPlan:
        """The changes that carry out a decision to merge or split; call `ended` for each."""
        model = decision.model
        groups = [one for one in stable_groups if one.model == model and self._is_free(one, now_s)]
        coming = sum(tokens for name, tokens in self._gains.values() if name == model)
        missing = decision.needed_tokens - coming
        for_all = decision.action is Action.MERGE and not decision.group_ids
        try:
            if decision.action is Action.SPLIT:
                changes = splits([one for one in groups if one.group_id in decision.group_ids])
            else:
                changes = self._merges(decision, coming, groups, facts, reports, now_s)
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
        """The splits that run and that a decision calls off; call `ended` when they have ended."""
        found = [one for one in self._splits if one.group_ids[0] in decision.group_ids]
        self._called_off.update(found)
        return found

    def ended(self, change: Change, is_stable: bool, now_s: float) -> None:
        """A change is over: all members serve it, or it has failed.

        One that was called off is no failure: nobody backs off.
        """
        self._changing.difference_update(change.group_ids)
        del self._gains[change.group_ids]
        if change in self._splits:
            self._splits.remove(change)
        names = [stage.worker_id for target in change.targets for stage in target]
        called_off = change in self._called_off
        self._called_off.discard(change)
        if is_stable or called_off:
            self._failed.succeeded(names)
        else:
            self._failed.failed(names, now_s, self.backoff_s, self.backoff_max_s)

    def _merges(
        self,
        decision: Decision,
        coming: int,
        groups: list[Group],
        facts: Mapping[str, WorkerFacts],
        reports: Mapping[str, EngineReport],
        now_s: float,
    ) -> list[Change]:
        """Merges of free groups, for what is not `coming` from those that run. Raises NoPlan."""
        model, needed = decision.model, decision.needed_tokens
        wait_s = self._planless.wait_s([model], now_s)
        if wait_s > 0:
            raise NoPlan(f"there was no plan lately; looked for again in {wait_s:.1f} s")
        if 0 < needed <= coming:
            raise NoPlan(f"merges that run gain {coming} of {needed} tokens")
        groups = [one for one in groups if not self._flaps(one, now_s)]
        try:
            if decision.group_ids:
                return merges_of_full(groups, decision.group_ids, facts, reports)
            found = merges(groups, facts, reports, needed - coming)
        except NoPlan:
            self._planless.failed([model], now_s, self.backoff_s, self.backoff_max_s)
            raise
        self._planless.succeeded([model])
        return found

    def _flaps(self, group: Group, now_s: float) -> bool:
        return any(self._steadiness.flaps(one.worker_id, now_s) for one in group.members)

    def _is_free(self, group: Group, now_s: float) -> bool:
        names = [member.worker_id for member in group.members]
        busy = bool(group.attempt) or group.group_id in self._changing
        return not busy and self._failed.wait_s(names, now_s) == 0
