"""The groups that the scheduler knows: by id, by model, and by the worker that leads them."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import inf

from services.core.ask import Ask
from services.core.cost.model import CostModel
from services.core.scheduler.class_rules import NO_CLASSES, ClassRules
from services.core.scheduler.dispatch import NOBODY, Score, ScoreFunction
from services.core.scheduler.group_index import GroupIndex
from services.core.scheduler.group_load import GroupLoad
from services.core.scheduler.prefix_ranking import PrefixRanking
from services.core.scheduler.rate import ClassRates, LinePace
from services.core.scheduler.vocabulary import LoadLost, LoadReported, ServingGroup
from services.core.steadiness import SelfWatch, Steadiness

ARRIVALS_S = 3
REFUSALS_S = 10


@dataclass(slots=True)
class RecentSum:
    """Sums of requests and their KV tokens, second by second, over the last `window_s`."""

    window_s: int
    _seconds: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, tokens: int, now_s: float) -> None:
        """Count one request."""
        self._drop_old(now_s)
        requests, total = self._seconds.get(int(now_s), (0, 0))
        self._seconds[int(now_s)] = requests + 1, total + tokens

    def at(self, now_s: float) -> tuple[int, int]:
        """Requests and tokens."""
        self._drop_old(now_s)
        counts = self._seconds.values()
        return sum(count[0] for count in counts), sum(count[1] for count in counts)

    def _drop_old(self, now_s: float) -> None:
        oldest = int(now_s) - self.window_s
        while self._seconds and (first := next(iter(self._seconds))) <= oldest:
            del self._seconds[first]


@dataclass(slots=True)
class DemandMeter:
    """Arrivals at, departures from and refusals by the scheduler, of one model."""

    arrived: RecentSum = field(default_factory=lambda: RecentSum(ARRIVALS_S))
    refused: RecentSum = field(default_factory=lambda: RecentSum(REFUSALS_S))
    dispatched: ClassRates = field(default_factory=ClassRates)
    pace: LinePace = field(default_factory=LinePace)

    def arrived_tokens_per_s(self, now_s: float) -> float:
        """KV tokens a second; of the running second, only what has passed counts."""
        return self.arrived.at(now_s)[1] / (ARRIVALS_S - 1 + now_s % 1)


ITERATIONS_AHEAD = 2
"""Iterations for which a group has prompt tokens of batch requests before it needs more."""


def harvest_blocks(load: GroupLoad) -> int:
    """KV blocks in which a batch request may start; 0 or less if the group needs no batch work.

    What is bound to a group late can go to any group. So a group gets no batch request while an
    online one waits there, nor before what waits there to be prefilled is less than two iterations
    compute. Online requests that wait at other groups do not count: in a large cluster one waits
    somewhere at any time. That batch work takes what online work leaves is ConServe §4.2.
    """
    ahead = ITERATIONS_AHEAD * load.group.max_batch_tokens
    if load.for_batch is False or load.online_waiting or load.prefill_tokens >= ahead:
        return 0
    return load.batch_start_blocks


def most_idle(load: GroupLoad) -> Score:
    """Score of a batch request: fewest online sequences, then most free blocks."""
    return (float(load.online_sequences), -float(load.batch_start_blocks))


MODELS_REMEMBERED_MAX = 1_000
REGROUP_S = 10.0
"""So long after a model's last group has left, new requests wait: a loss may have divided it."""


@dataclass(slots=True)
class ModelGroups:
    """The groups of one model, at least one, and the demand for them.

    `harvest` ranks them for batch requests, and has those that need batch work; None: as `index`.
    With `prefixes`, they are ranked by what they have cached, too. `divided`: no group takes both
    batch requests and others.
    """

    index: GroupIndex
    meter: DemandMeter
    prefixes: PrefixRanking | None = None
    harvest: GroupIndex | None = None
    divided: bool = False

    def can_hold(self, ask: Ask) -> bool:
        """Whether some group can ever run a request."""
        longest = self.index.tokens_max
        return longest is None or ask.prompt_tokens + ask.max_tokens <= longest

    def index_for(self, ask: Ask) -> GroupIndex:
        """The groups as they are ranked for a request of this class."""
        return self.index if self.harvest is None or ask.service.online else self.harvest

    def pick(
        self,
        ask: Ask,
        now_s: float,
        below_tokens: float,
        avoided: frozenset[str] = NOBODY,
        *,
        spread: bool = False,
    ) -> GroupLoad | None:
        """The group that is to take a request, or None; `below_tokens` as in `GroupIndex.pick`.

        Workers at `avoided` addresses take it only if no other one serves. `spread`: groups that
        are behind do not take it, see `GroupLoad.is_behind`.
        """
        if below_tokens < inf and below_tokens <= self.index.tokens_min:
            return None  # as for most batch requests while an online one waits
        loads = self.index.loads.values()
        if avoided and not any(
            load.is_fresh(now_s) and load.group.address not in avoided for load in loads
        ):
            avoided = NOBODY
        if spread:
            avoided |= {load.group.address for load in loads if load.is_behind}
        index = self.index_for(ask)
        if self.prefixes is not None:
            return self.prefixes.pick(index, ask, now_s, below_tokens, avoided)
        return index.pick(ask.prompt_tokens, ask.max_tokens, now_s, below_tokens, avoided)

    def reserve(self, load: GroupLoad, ask: Ask, blocks: int, now_s: float) -> int:
        """Hold blocks for a new assignment; returns how many of its tokens are not yet cached."""
        computed = ask.prompt_tokens
        if self.prefixes is not None:
            computed = self.prefixes.assign(load, ask)
        batch = self.harvest is not None and not ask.service.online
        self.index.reserve(load, ask.request_id, blocks, now_s, computed, batch)
        self.touch(load)
        return computed

    def touch(self, load: GroupLoad) -> None:
        """The load of one of the groups has changed."""
        self.index.touch(load)
        if self.harvest is not None:
            self.harvest.touch(load)

    def drop_lapsed(self, now_s: float) -> None:
        """Drop the reservations whose time is over."""
        for load in self.index.drop_lapsed(now_s):
            self.touch(load)

    def divide(self, batch_groups: int) -> None:
        """Keep the first `batch_groups`, by leader, for batch requests, the others for the rest.

        One of them is left to the rest, which takes all if it is the only one: a worker may be
        lost, or groups merge.
        """
        by_leader = sorted(self.index.loads.values(), key=lambda load: load.group.worker_id)
        batch_groups = min(batch_groups, len(by_leader) - 1)
        self.divided = batch_groups > 0
        for place, load in enumerate(by_leader):
            load.for_batch = place < batch_groups if self.divided else None
            self.touch(load)

    def check_invariants(self) -> None:
        """Raise AssertionError if the indexes disagree with the loads."""
        assert self.index.loads
        self.index.check_invariants()
        if self.harvest is not None:
            assert self.harvest.loads == self.index.loads
            self.harvest.check_invariants()
        if self.prefixes is not None:
            self.prefixes.check_invariants()

    def add(self, load: GroupLoad) -> None:
        """Take in a group that is not known."""
        self.index.add(load)
        if self.harvest is not None:
            self.harvest.add(load)
        if self.prefixes is not None:
            self.prefixes.add(load)

    def remove(self, group_id: str) -> None:
        """Forget a group that is known."""
        self.index.remove(group_id)
        if self.harvest is not None:
            self.harvest.remove(group_id)
        if self.prefixes is not None:
            self.prefixes.remove(group_id)


@dataclass(slots=True)
class GroupTable:
    """Groups come, report and go.

    `score`, `growth_blocks`, `ttft` and `rules` as in SchedulerState.
    """

    score: ScoreFunction
    growth_blocks: float
    ttft: CostModel | None = None
    rules: ClassRules = NO_CLASSES
    _loads: dict[str, GroupLoad] = field(default_factory=dict)
    _models: dict[str, ModelGroups] = field(default_factory=dict)
    _group_of_worker: dict[str, str] = field(default_factory=dict)
    # Models that groups have served, and the longest sequence that one of them held.
    _held: dict[str, int] = field(default_factory=dict)
    _left_s: dict[str, float] = field(default_factory=dict)  # of those that none serves now
    _steadiness: Steadiness = field(default_factory=Steadiness)
    _self_watch: SelfWatch = field(default_factory=SelfWatch)

    @property
    def models(self) -> Collection[str]:
        """Models that groups serve."""
        return self._models.keys()

    @property
    def served_before(self) -> Collection[str]:
        """Models that groups have served; some still do."""
        return self._held.keys()

    def left_s(self, model: str) -> float | None:
        """When the model's last group left; None if one serves, or none ever has."""
        return self._left_s.get(model)

    def longest_held(self, model: str) -> int:
        """The longest sequence that a group of the model has held; 0 if none is known."""
        return self._held.get(model, 0)

    @property
    def loads(self) -> Iterable[GroupLoad]:
        """All groups."""
        return self._loads.values()

    def of_model(self, model: str) -> ModelGroups | None:
        """The groups of a model; None without any."""
        return self._models.get(model)

    def at_epoch(self, group_id: str, epoch: int) -> GroupLoad | None:
        """The group if it is at that epoch, else None."""
        load = self.of_id(group_id)
        return load if load is not None and load.group.epoch == epoch else None

    def of_id(self, group_id: str) -> GroupLoad | None:
        """The group at whatever epoch, None if it does not serve."""
        return self._loads.get(group_id)

    def join(self, group: ServingGroup, now_s: float) -> None:
        """A group serves, maybe in another configuration than before."""
        known = self._loads.get(group.group_id)
        if known is not None and known.group == group:
            return
        # Demand does not change with the groups: its measure survives the model's only group.
        before = self._models.get(group.model)
        self.leave(group.group_id, now_s)
        self._left_s.pop(group.model, None)
        load = GroupLoad(group, self.growth_blocks)
        load.flaps = self._steadiness.flaps(group.worker_id, now_s)
        self._loads[group.group_id] = load
        if group.model not in self._models:
            meter = before.meter if before is not None else DemandMeter()
            prefixes = PrefixRanking(self.ttft) if self.ttft is not None else None
            harvest = GroupIndex(most_idle, harvest_blocks) if self.rules.on else None
            index = GroupIndex(self.score)
            self._models[group.model] = ModelGroups(index, meter, prefixes, harvest)
        self._models[group.model].add(load)
        self._note_held(load)
        self._divide(group.model)
        self._group_of_worker[group.worker_id] = group.group_id

    def leave(self, group_id: str, now_s: float) -> None:
        """A group serves no more; no effect if it is not known."""
        load = self._loads.pop(group_id, None)
        if load is None:
            return
        model, worker_id = load.group.model, load.group.worker_id
        self._models[model].remove(group_id)
        if not self._models[model].index.loads:
            del self._models[model]
            if model in self._held:
                self._left_s[model] = now_s
        self._divide(model)
        if self._group_of_worker.get(worker_id) == group_id:
            del self._group_of_worker[worker_id]

    def report(self, reported: LoadReported) -> GroupLoad | None:
        """Take a worker's load; returns its group, or None if it leads none."""
        report = reported.report
        load = self._of_worker(report.worker_id, report.incarnation)
        if load is None:
            return None
        counts = load.note_report(reported)
        prefixes = self._models[load.group.model].prefixes
        if prefixes is not None and report.epoch == load.group.epoch:
            prefixes.note_dropped(load, report)
            if counts:
                prefixes.note_load(load, report.load)
        if not reported.passed_on:
            self._steadiness.came(report.worker_id)
        self._note_held(load)
        self.touch(load)
        return load

    def lose(self, lost: LoadLost) -> None:
        """A worker's reports have ended."""
        if self._self_watch.awake(lost.now_s):
            self._steadiness.left(lost.worker_id, lost.now_s)
        load = self._of_worker(lost.worker_id, lost.incarnation)
        if load is not None:
            self.forget_report(load)

    def watch(self, now_s: float) -> None:
        """Note workers that fall silent, rank groups of flapping workers anew, drop lapsed
        reservations.
        """
        awake = self._self_watch.look(now_s)
        for load in self._loads.values():
            worker_id = load.group.worker_id
            if awake and load.is_silent(now_s):
                self._steadiness.left(worker_id, now_s)
            flaps = self._steadiness.flaps(worker_id, now_s)
            if flaps is not load.flaps:
                load.flaps = flaps
                self.touch(load)
        for model in self._models.values():
            model.drop_lapsed(now_s)

    def forget_report(self, load: GroupLoad) -> None:
        """Assign nothing to a group until its worker's next report."""
        load.forget_report()
        self.touch(load)

    def release(self, group_id: str, request_id: str) -> None:
        """Drop the reservation of a request; no effect if there is none."""
        if (load := self._loads.get(group_id)) is not None:
            load.release(request_id)
            self.touch(load)

    def touch(self, load: GroupLoad) -> None:
        """The load of a group has changed: it is ranked anew."""
        self._models[load.group.model].touch(load)

    def check_invariants(self) -> None:
        """Raise AssertionError if the orders contradict each other."""
        self._steadiness.check_invariants()
        for group_id, load in self._loads.items():
            load.check_invariants()
            assert load.group.group_id == group_id
            assert self._models[load.group.model].index.loads[group_id] is load
        indexes = [model.index for model in self._models.values()]
        assert sum(len(index.loads) for index in indexes) == len(self._loads)
        for model in self._models.values():
            model.check_invariants()
        assert set(self._group_of_worker.values()) <= set(self._loads)
        assert self._left_s.keys() <= self._held.keys() - self._models.keys()

    def _note_held(self, load: GroupLoad) -> None:
        model, tokens = load.group.model, load.tokens_max
        known = self._held.get(model)
        if known is None and len(self._held) >= MODELS_REMEMBERED_MAX:
            return
        if known is None or tokens > known:
            self._held[model] = tokens

    def _divide(self, name: str) -> None:
        """Reserve groups of a model anew, if some are to be, since there are other groups now."""
        model = self._models.get(name)
        if model is not None and self.rules.on and self.rules.batch_groups:
            model.divide(self.rules.batch_groups)

    def _of_worker(self, worker_id: str, incarnation: str) -> GroupLoad | None:
        """The group that this incarnation of a worker leads, or None."""
        group_id = self._group_of_worker.get(worker_id)
        load = self._loads.get(group_id) if group_id is not None else None
        return load if load is not None and load.group.incarnation == incarnation else None
