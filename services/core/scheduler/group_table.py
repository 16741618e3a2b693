"""The worker groups that the scheduler knows, by id, model and leader, with load and demand.

A group is a set of workers that serve a model together; requests go to its leader. An epoch numbers
its configurations, an incarnation is the id of a worker process. Online requests are those of all
classes except batch.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from services.core.ask import Ask
from services.core.cost.model import CostModel
from services.core.destination import Destination
from services.core.flap_damping import FlapDamping, LocalPauseDetector
from services.core.prefix.block_hash import ThinHashes
from services.core.report import OtherRoom
from services.core.request import admission_blocks
from services.core.scheduler.adapter_places import is_holder, load_s
from services.core.scheduler.class_rules import NO_CLASSES, ClassRules
from services.core.scheduler.dispatch import (
    NO_ADDRESSES,
    Score,
    ScoreFunction,
    serves,
    start_blocks,
)
from services.core.scheduler.group_index import GroupIndex
from services.core.scheduler.group_load import GroupLoad
from services.core.scheduler.late_refusals import RecentRefusals
from services.core.scheduler.mix_meter import MixMeter
from services.core.scheduler.prediction import WaitPredictor
from services.core.scheduler.prefix_ranking import PrefixRanking
from services.core.scheduler.rate import ClassRates, QueuePace, RecentSum
from services.core.scheduler.role_dispatch import RoleDispatch, destination_of
from services.core.scheduler.vocabulary import LoadLost, LoadReported, ServingGroup
from services.core.service import ServiceClass

ARRIVALS_S = 3
"""Window of the arrival rate, in seconds."""
INTERACTIVE_S = 10
"""Window of the arrival rate of interactive requests, in seconds."""
REFUSALS_S = 10
"""Window of the refusals that count as demand, in seconds."""


@dataclass(slots=True)
class DemandMeter:
    """Arrivals, dispatches and refusals of a model; `late`: refusals for lateness."""

    arrived: RecentSum = field(default_factory=lambda: RecentSum(ARRIVALS_S))
    # Those of the class interactive, which other requests let pass if classes order the queue.
    interactive: RecentSum = field(default_factory=lambda: RecentSum(INTERACTIVE_S))
    # Interactive requests that were admitted: those that others really let pass.
    passing: RecentSum = field(default_factory=lambda: RecentSum(INTERACTIVE_S))
    refused: RecentSum = field(default_factory=lambda: RecentSum(REFUSALS_S))
    late: RecentRefusals = field(default_factory=RecentRefusals)
    dispatched: ClassRates = field(default_factory=ClassRates)
    pace: QueuePace = field(default_factory=QueuePace)
    waits: WaitPredictor = field(default_factory=WaitPredictor)
    mix: MixMeter = field(default_factory=MixMeter)

    def note_arrival(self, ask: Ask, tokens: int, now_s: float) -> None:
        """Count a request that needs `tokens` of KV; its other choices do not count."""
        requests = int(ask.choice == 0)
        self.arrived.add(tokens, now_s, requests)
        if ask.service.service_class is ServiceClass.INTERACTIVE:
            self.interactive.add(tokens, now_s, requests)

    def begin_pace(self, now_s: float) -> None:
        """Restart the measurement of the rates: a request joins the empty queue."""
        self.pace.begin(now_s)
        self.waits.rate.begin(now_s)

    def note_start(self, tokens: int, now_s: float) -> None:
        """Count a dispatch from the queue."""
        self.pace.note(now_s)
        self.waits.rate.note(now_s, tokens)

    def arrived_tokens_per_s(self, now_s: float) -> float:
        """KV tokens that arrive per second, over the window including the unfinished second."""
        return self.arrived.per_s(now_s)


ITERATIONS_AHEAD = 2
"""Prefill backlog of a group, in iterations, from which it gets no further batch request."""


def batch_room(load: GroupLoad) -> int:
    """KV blocks in which a batch request may start; 0 or less if the group should get none.

    Batch requests use the capacity that online requests leave (ConServe §4.2). So a group gets none
    while an online request waits there, or while its prefill backlog fills `ITERATIONS_AHEAD`:
    in the queue, a batch request can still go to any group. Online requests that wait at other
    groups do not count, because a large cluster always has some.
    """
    ahead = ITERATIONS_AHEAD * load.group.max_batch_tokens
    if load.for_batch is False or load.online_waiting or load.prefill_tokens >= ahead:
        return 0
    return load.batch_start_blocks


def most_idle(load: GroupLoad) -> Score:
    """Score for batch requests: fewest online sequences, then most free blocks."""
    return (float(load.online_sequences), -float(load.batch_start_blocks))


FEW_HELD = 2
"""Multiple of `held_tokens` that a worker with at most one request may get."""


def timely_room(load: GroupLoad) -> int:
    """Blocks in which an online request may start; 0 if the group has prefill work for a while.

    In the queue, a request that arrives later but is more urgent can still start first, and a
    request that would be late can still be refused. A worker that is idle by its last report gets
    more, so that it has work even if requests take long to reach it; so does a worker with a single
    request, or the next would go to a fuller worker that has room a moment earlier.
    """
    factor = FEW_HELD if load.reported_idle or load.sequences < 2 else 1
    return 0 if load.tokens_ahead >= factor * load.held_tokens else start_blocks(load)


HELD_S = 0.2
"""Predicted time of a group's prefill backlog from which further requests wait in the queue."""
FULL_TOKENS = 1024
"""Prefill tokens from which a larger iteration hardly raises the throughput."""


def held_tokens(group: ServingGroup, costs: CostModel | None) -> float:
    """Tokens of prefill backlog from which further requests wait in the queue; see `timely_room`.

    Enough for the iteration that runs and the next, which begins before a report can bring further
    requests, but of large iterations only a part.
    """
    iteration_tokens = group.members * group.max_batch_tokens
    costs = group.cost_model or costs
    if costs is None:
        return ITERATIONS_AHEAD * iteration_tokens
    token_s = costs.beyond_knee.chunk_s(0, group.max_batch_tokens) / group.max_batch_tokens
    least = min(ITERATIONS_AHEAD * iteration_tokens, FULL_TOKENS * group.members)
    return max(least, iteration_tokens / 2, HELD_S * group.members / max(token_s, 1e-9))


MODELS_REMEMBERED_MAX = 1_000
REGROUP_S = 10.0
"""How long new requests of a model wait after its last group left, which may just be splitting; and
its meter is kept."""


@dataclass(slots=True)
class ModelGroups:
    """The groups of a model, never empty, and the demand for the model."""

    # Groups ranked for online requests; for all requests if `batch_index` is None.
    index: GroupIndex
    meter: DemandMeter
    # Prefix-aware ranking, if the dispatch uses it.
    prefixes: PrefixRanking | None = None
    # Groups ranked for batch requests; None if the scheduling policy ignores classes.
    batch_index: GroupIndex | None = None
    # Whether groups take either batch or online requests (setting `batch_groups`).
    partitioned: bool = False
    # Share of the KV that standard requests keep free for interactive ones.
    kept_share: float = 0.0

    def can_hold(self, ask: Ask) -> bool:
        """Whether a group can run the request when it is empty; True if no group is known."""
        longest = self.index.tokens_max
        return longest is None or ask.prompt_tokens + ask.max_tokens <= longest

    def index_for(self, ask: Ask) -> GroupIndex:
        """The ranking of groups for the class of a request."""
        return self.index if self.batch_index is None or ask.service.online else self.batch_index

    def pick(
        self,
        ask: Ask,
        now_s: float,
        below_tokens: float,
        avoided: frozenset[str] = NO_ADDRESSES,
        *,
        spread: bool = False,
        closed: frozenset[str] = NO_ADDRESSES,
    ) -> GroupLoad | None:
        """The group that should run a request, or None; `below_tokens` as in `GroupIndex.pick`.

        Workers at `avoided` addresses are used only if no other worker serves. With `spread`,
        groups with a prefill backlog are skipped; see `GroupLoad.is_backlogged`. Workers at
        `closed` addresses are never used.
        """
        # Fast path: while an online request waits, a batch request can seldom use any group.
        if below_tokens < inf and below_tokens <= self.index.tokens_min:
            return None
        loads = self.index.loads.values()
        # If only avoided workers serve, try them: the gateway may reach them again.
        if avoided and not any(
            load.is_fresh(now_s) and load.group.address not in avoided for load in loads
        ):
            avoided = NO_ADDRESSES
        if spread:
            avoided |= {load.group.address for load in loads if load.is_backlogged}
        avoided |= closed
        index = self.index_for(ask)
        if self.prefixes is not None:
            picked = self.prefixes.pick(index, ask, now_s, below_tokens, avoided)
        else:
            picked = index.pick(ask.prompt_tokens, ask.max_tokens, now_s, below_tokens, avoided)
        return None if picked is None or self.is_kept_from(ask, picked) else picked

    def pick_with_adapter(
        self,
        ask: Ask,
        now_s: float,
        below_tokens: float,
        avoided: frozenset[str],
        *,
        spread: bool,
        closed: frozenset[str],
        waited_s: float,
    ) -> GroupLoad | None:
        """As `pick`, for a request with an adapter; `closed` has the groups that do not take it.

        A group with the adapter runs it, unless another predicts an earlier first token although
        it has to load the adapter. While all groups with the adapter are full, the request waits
        for as long as that load would take: `waited_s` counts from its arrival.
        """
        adapter, loads = ask.adapter, self.index.loads.values()
        assert adapter is not None
        every = frozenset(load.group.address for load in loads)
        holders = frozenset(
            load.group.address for load in loads if is_holder(load, adapter)
        ).difference(closed)
        pick = partial(self.pick, ask, now_s, below_tokens, avoided, spread=spread)
        with_it = pick(closed=closed | (every - holders)) if holders else None
        if holders and with_it is None and waited_s < min(load_s(load, loads) for load in loads):
            return None
        without = pick(closed=closed | holders)
        if with_it is None or without is None or self.prefixes is None:
            return with_it or without
        loaded_s = self.prefixes.ttft_s(without, ask) + load_s(without, loads)
        return without if loaded_s < self.prefixes.ttft_s(with_it, ask) else with_it

    def is_kept_from(self, ask: Ask, load: GroupLoad) -> bool:
        """Whether a group keeps its room for interactive requests."""
        is_standard = ask.service.service_class is ServiceClass.STANDARD and not ask.resumed
        if not self.kept_share or not is_standard or load.is_idle:
            return False
        tokens_max = ask.prompt_tokens + ask.max_tokens
        needed = admission_blocks(ask.prompt_tokens, tokens_max, load.group.block_size)
        return start_blocks(load) - needed < self.kept_share * load.capacity_blocks

    def keep_room(self, now_s: float) -> None:
        """Compute how much KV is kept for interactive requests."""
        requests, _ = self.meter.interactive.at(now_s)
        kept = self.meter.waits.interactive.kept_tokens(requests / INTERACTIVE_S, now_s)
        loads = self.index.loads.values()
        total = sum(load.capacity_blocks * load.group.block_size for load in loads)
        self.kept_share = min(1.0, kept / total) if total else 0.0

    @property
    def bucket_tokens(self) -> int:
        """KV token slots for the requests that buckets order: batch, or all without classes."""
        loads = self.index.loads.values()
        if self.batch_index is not None:
            return sum(load.batch_tokens for load in loads)
        return sum(load.capacity_blocks * load.group.block_size for load in loads)

    def room(self, now_s: float, own: str) -> OtherRoom:
        """Room for resumed requests in the groups except `own`, an id."""
        loads = [
            load
            for group_id, load in self.index.loads.items()
            if group_id != own and serves(load, now_s)
        ]
        return OtherRoom(
            longest_tokens=max((load.tokens_max for load in loads), default=0),
            group_tokens=tuple(
                blocks * load.group.block_size
                for load in loads
                if not load.is_backlogged and (blocks := start_blocks(load) - 1) > 0
            ),
        )

    def reserve(self, load: GroupLoad, ask: Ask, blocks: int, now_s: float) -> int:
        """Reserve blocks for a new assignment; returns how many prompt tokens it must compute."""
        computed = ask.prompt_tokens
        if self.prefixes is not None:
            computed = self.prefixes.assign(load, ask)
        batch = self.batch_index is not None and not ask.service.online
        self.index.reserve(load, ask.request_id, blocks, now_s, computed, batch, ask.adapter)
        self.touch(load)
        return computed

    def reserve_target(
        self, load: GroupLoad, ask: Ask, computed: int, now_s: float
    ) -> Destination | None:
        """Reserve blocks at the group that takes a request over from `load`; None if none does.

        `computed`: prompt tokens that `load` computes.
        """
        if self.prefixes is None or not self.prefixes.roles.is_long(load, computed):
            return None
        target = self.prefixes.target(self.index, ask, now_s)
        if target is None:
            return None
        tokens_max = ask.prompt_tokens + ask.max_tokens
        blocks = admission_blocks(ask.prompt_tokens, tokens_max, target.group.block_size)
        batch = self.batch_index is not None and not ask.service.online
        self.index.reserve(target, ask.request_id, blocks, now_s, batch=batch)
        self.touch(target)
        return destination_of(target)

    def touch(self, load: GroupLoad) -> None:
        """Rank a group again after a change of its load."""
        self.index.touch(load)
        if self.batch_index is not None:
            self.batch_index.touch(load)

    def remove_expired(self, now_s: float) -> None:
        """Remove expired reservations."""
        for load in self.index.remove_expired(now_s):
            self.touch(load)

    def partition(self, batch_groups: int) -> None:
        """Use the first `batch_groups` groups, sorted by leader, for batch, the rest for online.

        At least one group takes online requests and an only group takes all, because workers may
        fail and groups may merge.
        """
        by_leader = sorted(self.index.loads.values(), key=lambda load: load.group.worker_id)
        batch_groups = min(batch_groups, len(by_leader) - 1)
        self.partitioned = batch_groups > 0
        for number, load in enumerate(by_leader):
            load.for_batch = number < batch_groups if self.partitioned else None
            self.touch(load)

    def check_invariants(self) -> None:
        """Raise AssertionError if an index disagrees with the loads."""
        assert self.index.loads
        self.index.check_invariants()
        if self.batch_index is not None:
            assert self.batch_index.loads == self.index.loads
            self.batch_index.check_invariants()
        if self.prefixes is not None:
            self.prefixes.check_invariants()

    def add(self, load: GroupLoad) -> None:
        """Add a group that is not in the table."""
        self.index.add(load)
        if self.batch_index is not None:
            self.batch_index.add(load)
        if self.prefixes is not None:
            self.prefixes.add(load)

    def remove(self, group_id: str) -> None:
        """Remove a group that is in the table."""
        self.index.remove(group_id)
        if self.batch_index is not None:
            self.batch_index.remove(group_id)
        if self.prefixes is not None:
            self.prefixes.remove(group_id)


@dataclass(slots=True)
class GroupTable:
    """All groups; group records in etcd and load reports of workers change them.

    `score`, `growth_blocks`, `ttft`, `rules` and `hand_over_min_tokens` as in SchedulerState.
    `holds`: online requests wait in the queue while groups have a prefill backlog.
    """

    score: ScoreFunction
    growth_blocks: float
    ttft: CostModel | None = None
    rules: ClassRules = NO_CLASSES
    holds: bool = False
    hand_over_min_tokens: int | None = None
    # By group id.
    _loads: dict[str, GroupLoad] = field(default_factory=dict)
    # By model; only models that some group serves.
    _models: dict[str, ModelGroups] = field(default_factory=dict)
    # Group id by the leader's worker id.
    _group_of_worker: dict[str, str] = field(default_factory=dict)
    # Longest sequence in tokens that a group of the model could ever hold, by model.
    _longest_served: dict[str, int] = field(default_factory=dict)
    # When the last group left, for models that no group serves now.
    _left_s: dict[str, float] = field(default_factory=dict)
    # The meters of such models until `REGROUP_S` later, if `holds`: with bookings and predictions.
    _left_meters: dict[str, DemandMeter] = field(default_factory=dict)
    # Ranks workers lower that leave and return often; detects stalls of this process.
    _flap_damping: FlapDamping = field(default_factory=FlapDamping)
    _pause_detector: LocalPauseDetector = field(default_factory=LocalPauseDetector)

    @property
    def models(self) -> Collection[str]:
        """Models that groups serve."""
        return self._models.keys()

    @property
    def models_served(self) -> Collection[str]:
        """Models that a group has served since this process started."""
        return self._longest_served.keys()

    def left_s(self, model: str) -> float | None:
        """When the model's last group left; None if a group serves it now, or never did."""
        return self._left_s.get(model)

    def longest_served(self, model: str) -> int:
        """Longest sequence in tokens that a group of the model could ever hold; 0 if unknown."""
        return self._longest_served.get(model, 0)

    @property
    def loads(self) -> Iterable[GroupLoad]:
        """All groups."""
        return self._loads.values()

    def of_model(self, model: str) -> ModelGroups | None:
        """The groups of a model; None if no group serves it."""
        return self._models.get(model)

    def room(self, model: str, worker_id: str, outage: bool, now_s: float) -> OtherRoom:
        """Room for the requests of a worker in the other groups; none while its group still serves.

        With an `outage`, its group serves but gets no requests.
        """
        groups, own = self._models.get(model), self._group_of_worker.get(worker_id, "")
        # Returned requests would be assigned to the same worker again.
        if groups is None or (own and not outage and self._loads[own].is_fresh(now_s)):
            return OtherRoom()
        return groups.room(now_s, own)

    def at_epoch(self, group_id: str, epoch: int) -> GroupLoad | None:
        """The group if it serves at that epoch, else None."""
        load = self.of_id(group_id)
        return load if load is not None and load.group.epoch == epoch else None

    def of_id(self, group_id: str) -> GroupLoad | None:
        """The group at any epoch; None if it does not serve."""
        return self._loads.get(group_id)

    def join(self, group: ServingGroup, now_s: float) -> None:
        """Add a group, or replace it in its new configuration."""
        known = self._loads.get(group.group_id)
        if known is not None and group == replace(
            known.group, cost_model=group.cost_model, role=group.role
        ):
            known.group = group  # at most cost model and role are new: its load and cache stay
            known.held_tokens = held_tokens(group, self.ttft)
            if (prefixes := self._models[group.model].prefixes) is not None:
                prefixes.note_group(known)
            return
        # The demand of a model outlives its groups: keep its meter when the only group is replaced.
        before = self._models.get(group.model)
        self.leave(group.group_id, now_s)
        self._forget_meters(now_s)
        left_meter = self._left_meters.pop(group.model, None)
        self._left_s.pop(group.model, None)
        load = GroupLoad(group, self.growth_blocks, held_tokens=held_tokens(group, self.ttft))
        load.flaps = self._flap_damping.is_flapping(group.worker_id, now_s)
        self._loads[group.group_id] = load
        if group.model not in self._models:
            meter = before.meter if before is not None else left_meter or DemandMeter()
            if before is None and left_meter is not None:
                meter.begin_pace(now_s)  # nothing could start in the meantime
            prefixes = None
            if self.ttft is not None:
                prefixes = PrefixRanking(self.ttft, roles=RoleDispatch(self.hand_over_min_tokens))
            batch_index = GroupIndex(most_idle, batch_room) if self.rules.enabled else None
            index = GroupIndex(self.score, timely_room if self.holds else start_blocks)
            self._models[group.model] = ModelGroups(index, meter, prefixes, batch_index)
        self._models[group.model].add(load)
        self._note_longest(load)
        self._partition(group.model)
        self._group_of_worker[group.worker_id] = group.group_id

    def leave(self, group_id: str, now_s: float) -> None:
        """Remove a group; no effect if it is unknown."""
        load = self._loads.pop(group_id, None)
        if load is None:
            return
        model, worker_id = load.group.model, load.group.worker_id
        self._models[model].remove(group_id)
        if not self._models[model].index.loads:
            meter = self._models.pop(model).meter
            if model in self._longest_served:
                self._left_s[model] = now_s
                if self.holds:
                    self._left_meters[model] = meter
        self._partition(model)
        if self._group_of_worker.get(worker_id) == group_id:
            del self._group_of_worker[worker_id]

    def apply_report(self, reported: LoadReported) -> GroupLoad | None:
        """Apply a worker's load report; returns the group it leads, or None."""
        report = reported.report
        load = self._of_worker(report.worker_id, report.incarnation)
        if load is None:
            return None
        is_load_used = load.note_report(reported)
        prefixes = self._models[load.group.model].prefixes
        # Evictions of another epoch refer to a cache that no longer exists.
        if prefixes is not None and report.epoch == load.group.epoch:
            prefixes.note_evicted(load, report)
            if is_load_used:
                prefixes.note_load(load, report.load)
        if not reported.passed_on:
            self._flap_damping.note_presence(report.worker_id)
        self._note_longest(load)
        self.touch(load)
        return load

    def suspend(self, lost: LoadLost) -> None:
        """Stop dispatch to a worker whose report stream has ended."""
        # If this process was suspended, streams end although the workers are healthy.
        if self._pause_detector.trusts_silence(lost.now_s):
            self._flap_damping.note_departure(lost.worker_id, lost.now_s)
        load = self._of_worker(lost.worker_id, lost.incarnation)
        if load is not None:
            self.forget_report(load)

    def check_liveness(self, now_s: float) -> None:
        """Record silent workers, update which workers flap, and remove expired reservations."""
        self._forget_meters(now_s)
        trusts_silence = self._pause_detector.tick(now_s)
        for load in self._loads.values():
            worker_id = load.group.worker_id
            if trusts_silence and load.is_silent(now_s):
                self._flap_damping.note_departure(worker_id, now_s)
            flaps = self._flap_damping.is_flapping(worker_id, now_s)
            if flaps is not load.flaps:
                load.flaps = flaps
                self.touch(load)
        for model in self._models.values():
            model.remove_expired(now_s)
            if not self.holds:
                continue
            serving = [load for load in model.index.loads.values() if load.is_fresh(now_s)]
            model.meter.waits.refresh(serving, self.ttft, now_s)
            if self.rules.by_class:
                model.keep_room(now_s)

    def forget_report(self, load: GroupLoad) -> None:
        """Stop dispatch to a group until its worker's next report."""
        load.forget_report()
        self.touch(load)

    def note_moved(self, group_id: str, prefix: ThinHashes) -> None:
        """Note that the KV of a prompt is in the prefix cache of a group, if it serves."""
        load = self._loads.get(group_id)
        prefixes = self._models[load.group.model].prefixes if load is not None else None
        if prefixes is not None:
            prefixes.note_moved(group_id, prefix)

    def release(self, group_id: str, request_id: str) -> None:
        """Remove the reservation of a request; no effect if there is none."""
        if (load := self._loads.get(group_id)) is not None:
            load.release(request_id)
            self.touch(load)

    def touch(self, load: GroupLoad) -> None:
        """Rank a group again after a change of its load."""
        self._models[load.group.model].touch(load)

    def check_invariants(self) -> None:
        """Raise AssertionError if the indexes contradict each other."""
        self._flap_damping.check_invariants()
        for group_id, load in self._loads.items():
            load.check_invariants()
            assert load.group.group_id == group_id
            assert self._models[load.group.model].index.loads[group_id] is load
        indexes = [model.index for model in self._models.values()]
        assert sum(len(index.loads) for index in indexes) == len(self._loads)
        for model in self._models.values():
            model.check_invariants()
            model.meter.waits.check_invariants()
        assert set(self._group_of_worker.values()) <= set(self._loads)
        assert self._left_s.keys() <= self._longest_served.keys() - self._models.keys()
        assert self._left_meters.keys() <= self._left_s.keys()

    def _forget_meters(self, now_s: float) -> None:
        """Forget the meters of models whose groups have not returned within `REGROUP_S`."""
        for model in [m for m in self._left_meters if now_s >= self._left_s[m] + REGROUP_S]:
            del self._left_meters[model]

    def _note_longest(self, load: GroupLoad) -> None:
        model, tokens = load.group.model, load.tokens_max
        known = self._longest_served.get(model)
        # Limit the number of models, since worker records may have any model name.
        if known is None and len(self._longest_served) >= MODELS_REMEMBERED_MAX:
            return
        if known is None or tokens > known:
            self._longest_served[model] = tokens

    def _partition(self, name: str) -> None:
        """Partition the groups of a model by class again, after a group has joined or left."""
        model = self._models.get(name)
        if model is not None and self.rules.enabled and self.rules.batch_groups:
            model.partition(self.rules.batch_groups)

    def _of_worker(self, worker_id: str, incarnation: str) -> GroupLoad | None:
        """The group led by this incarnation of a worker, or None."""
        group_id = self._group_of_worker.get(worker_id)
        load = self._loads.get(group_id) if group_id is not None else None
        return load if load is not None and load.group.incarnation == incarnation else None
