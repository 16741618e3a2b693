"""Assigns roles to workers: prefill workers compute prompts, decode workers the answers.

Roles are advice for dispatch (`scheduler/role_dispatch.py`), so a wrong or a late role costs time
only, and a change of a role needs no epoch. Only single workers have roles, of those the ones with
the same KV layout, which most of a model's workers have; all others are mixed, and so are all
workers of a model that is overloaded, in which no capacity may lie idle.

`auto` assigns roles while they help: while mixed workers would miss the tightest target of a time
per token, and prefill and decode workers carry the load (`role_need.py`). Hysteresis, a dwell time,
and a single change of the numbers at a time keep roles from alternating.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp

from services.core.demand import ModelDemand
from services.core.overload.events import GroupUse, ModelLoad, ReportStatus
from services.core.overload.role_need import RoleNeed, need_of
from services.core.overload.role_peers import PEERS_MAX
from services.core.overload.worker_facts import WorkerFacts
from services.core.role import Role

DWELL_S = 15.0
"""Least time between two changes of the numbers, and from an overload until roles return."""
HYSTERESIS = 0.25
"""Workers by which the need must lie beyond the rounding to the next number."""
QUEUED_S = 0.5
"""Time for which requests wait in the scheduler's queue from which a model is overloaded."""
SMOOTHING_S = 20.0
"""Time constant of the rates of prompts and answers."""
SILENT_S = 10.0
"""Time for which roles stay as they are while a worker does not report."""

_FIXED = re.compile(r"prefill=([1-9]\d{0,5}),decode=([1-9]\d{0,5})")


@dataclass(frozen=True, slots=True)
class RoleSetting:
    """The setting `roles`: numbers of workers of each model, or `auto`; else all are mixed."""

    auto: bool = False
    prefill: int = 0
    decode: int = 0

    @property
    def off(self) -> bool:
        """Whether every worker is mixed."""
        return not (self.auto or self.prefill)

    @staticmethod
    def parse(text: str) -> "RoleSetting":
        """The setting of `mixed`, `auto` or `prefill=N,decode=M`. Raises ValueError."""
        if text in ("mixed", "auto"):
            return RoleSetting(auto=text == "auto")
        fixed = _FIXED.fullmatch(text)
        if fixed is None:
            raise ValueError(f"'{text}' is not mixed, auto or prefill=N,decode=M, each at least 1")
        return RoleSetting(prefill=int(fixed[1]), decode=int(fixed[2]))


@dataclass(frozen=True, slots=True)
class RolesDue:
    """What the roles of a cluster follow from; `present` are the roles as they are.

    `loads` and `demands` are by model, `facts` and `present` by worker.
    """

    now_s: float
    uses: tuple[GroupUse, ...]
    facts: Mapping[str, WorkerFacts]
    loads: Mapping[str, ModelLoad]
    demands: Mapping[str, ModelDemand]
    present: Mapping[str, Role]


@dataclass(slots=True)
class _ModelRoles:
    """State of a model; `prefill` is the number of prefill workers that `auto` has chosen, or 0."""

    prefill: int = 0
    took_over: bool = False  # `prefill` follows from the roles of an earlier leader, if any
    changed_s: float | None = None
    queued_since_s: float | None = None
    overloaded_s: float | None = None  # the last overload
    silent_since_s: float | None = None
    smoothed_s: float | None = None
    rates: tuple[float, float] = (0.0, 0.0)  # smoothed tokens per second of prompts and answers

    def smooth(self, demand: ModelDemand, now_s: float) -> ModelDemand:
        """The demand with smoothed rates."""
        weight = 1.0
        if self.smoothed_s is not None and any(self.rates):
            weight = 1 - exp(-max(0.0, now_s - self.smoothed_s) / SMOOTHING_S)
        self.smoothed_s = now_s
        prompts, outputs = self.rates
        prompts += weight * (demand.prompt_tokens_per_s - prompts)
        outputs += weight * (demand.output_tokens_per_s - outputs)
        self.rates = prompts, outputs
        return replace(demand, prompt_tokens_per_s=prompts, output_tokens_per_s=outputs)


@dataclass(slots=True)
class RoleAssigner:
    """State machine of the leading memory manager; a new leader goes on from the present roles."""

    setting: RoleSetting = field(default_factory=RoleSetting)
    _models: dict[str, _ModelRoles] = field(default_factory=dict)

    def assign(self, due: RolesDue) -> dict[str, Role]:
        """The roles of all workers that are not mixed."""
        if self.setting.off:
            return {}
        by_model: defaultdict[str, list[GroupUse]] = defaultdict(list)
        for use in due.uses:
            by_model[use.model].append(use)
        self._models = {model: self._models.get(model) or _ModelRoles() for model in by_model}
        roles: dict[str, Role] = {}
        for model, uses in by_model.items():
            roles |= self._of_model(model, uses, due)
        return roles

    def _of_model(self, model: str, uses: Sequence[GroupUse], due: RolesDue) -> dict[str, Role]:
        state = self._models[model]
        if self._waits_for_reports(state, uses, due.now_s):
            names = [name for use in uses for name in use.worker_ids]
            kept = {name: due.present[name] for name in names if name in due.present}
            return kept if len(set(kept.values())) > 1 else {}
        singles = alike(uses, due.facts)
        demand = state.smooth(due.demands.get(model) or ModelDemand(model), due.now_s)
        if len(singles) < 2 or self._is_overloaded(state, due.loads.get(model), demand, due.now_s):
            # Also roles that an earlier leader has assigned end here.
            if state.prefill or any(
                due.present.get(name) for use in uses for name in use.worker_ids
            ):
                state.changed_s = due.now_s
            state.prefill, state.took_over = 0, True
            return {}
        ids = [use.members[0].worker_id for use in singles]
        wishes = {name: due.facts[name].role for name in ids if name in due.facts}
        if not self.setting.auto:
            return chosen(ids, self.setting.prefill, self.setting.decode, wishes, due.present)
        if not state.took_over:
            # Also the roles of workers that can hand over nothing now: others get these roles.
            state.prefill = sum(
                due.present.get(name) is Role.PREFILL for use in uses for name in use.worker_ids
            )
            state.took_over = True
        self._follow(state, singles, demand, due)
        if not 0 < state.prefill < len(ids):
            return {}
        return chosen(ids, state.prefill, len(ids) - state.prefill, wishes, due.present)

    def _follow(
        self, state: _ModelRoles, singles: Sequence[GroupUse], demand: ModelDemand, due: RolesDue
    ) -> None:
        """Change the number of prefill workers by one step towards the need, if that is due."""
        need = _need(singles, demand, due.facts)
        count = len(singles)
        # Workers may have gone.
        state.prefill = min(state.prefill, count - 1)
        wanted = wanted_prefill(need, count, state.prefill)
        if wanted == state.prefill:
            return
        if state.changed_s is not None and due.now_s - state.changed_s < DWELL_S:
            return
        step = wanted
        if state.prefill and wanted:
            step = state.prefill + (1 if wanted > state.prefill else -1)
        state.prefill, state.changed_s = step, due.now_s

    def _is_overloaded(
        self, state: _ModelRoles, load: ModelLoad | None, demand: ModelDemand, now_s: float
    ) -> bool:
        """Whether requests wait or lack KV, or did within `DWELL_S`."""
        if not demand.queued:
            state.queued_since_s = None
        elif state.queued_since_s is None:
            state.queued_since_s = now_s
        queued = state.queued_since_s is not None and now_s - state.queued_since_s >= QUEUED_S
        short = load is not None and load.short_tokens > 0
        if queued or short or demand.refused:
            state.overloaded_s = now_s
        return state.overloaded_s is not None and now_s - state.overloaded_s < DWELL_S

    def _waits_for_reports(
        self, state: _ModelRoles, uses: Sequence[GroupUse], now_s: float
    ) -> bool:
        """Whether the roles stay because a worker is silent, as all are for a new leader."""
        if not any(use.report_status is ReportStatus.SILENT for use in uses):
            state.silent_since_s = None
            return False
        if state.silent_since_s is None:
            state.silent_since_s = now_s
        return now_s - state.silent_since_s < SILENT_S


def alike(uses: Iterable[GroupUse], facts: Mapping[str, WorkerFacts]) -> list[GroupUse]:
    """The single workers that can hand requests over to each other, by worker id."""
    layouts: defaultdict[str, list[GroupUse]] = defaultdict(list)
    for use in uses:
        if not use.kv_layout or use.report_status is not ReportStatus.CURRENT or use.draining:
            continue
        worker = facts.get(use.members[0].worker_id)
        # Workers without a prefix cache, and those of older releases, ignore `hand_to`.
        if worker is not None and worker.hands_over:
            layouts[use.kv_layout].append(use)
    if not layouts:
        return []
    largest = max(layouts, key=lambda layout: (len(layouts[layout]), layout))
    return sorted(layouts[largest], key=lambda use: use.worker_ids)


def wanted_prefill(need: RoleNeed | None, count: int, present: int) -> int:
    """Prefill workers among `count` with `present` of them now; 0: all should be mixed."""
    if need is None or not need.prompts or need.mixed_keeps(bool(present)):
        return 0
    exact = count * need.prefill_share()
    keeps = present and abs(exact - present) < 0.5 + HYSTERESIS
    prefill = present if keeps else min(max(round(exact), 1), count - 1)
    return prefill if need.fits(prefill, count - prefill, bool(present)) else 0


def chosen(
    ids: Sequence[str],
    prefill: int,
    decode: int,
    wishes: Mapping[str, Role],
    present: Mapping[str, Role],
) -> dict[str, Role]:
    """The roles of workers: up to so many of each, in proportion if there are too few workers.

    Workers get the role that they wish, then the role that they have. At most `PEERS_MAX` have a
    role: dispatch would prefer idle decode workers to which no prefill worker is connected.
    """
    prefill, decode = min(prefill, PEERS_MAX), min(decode, PEERS_MAX)
    if len(ids) < prefill + decode:
        prefill = min(max(1, round(len(ids) * prefill / (prefill + decode))), len(ids) - 1)
        decode = len(ids) - prefill
    roles: dict[str, Role] = {}
    for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL

        def rank(worker_id: str, role: Role = role, other: Role = other) -> tuple[object, ...]:
            wish, has = wishes.get(worker_id), present.get(worker_id)
            return (wish is not role, wish is other, has is not role, has is other, worker_id)

        free = sorted((worker_id for worker_id in ids if worker_id not in roles), key=rank)
        roles |= dict.fromkeys(free[:count], role)
    return roles


def _need(
    singles: Sequence[GroupUse], demand: ModelDemand, facts: Mapping[str, WorkerFacts]
) -> RoleNeed | None:
    """The need by the costs of the first worker that publishes any; None without costs."""
    for use in singles:
        own = facts.get(use.members[0].worker_id)
        if own is not None and own.cost_model is not None:
            return need_of(demand, singles, own.cost_model, own.max_batch_tokens)
    return None
