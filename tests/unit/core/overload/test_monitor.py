"""Detection of overload and of subsided demand, without oscillation."""

from collections.abc import Iterator
from dataclasses import fields, replace
from random import Random

import pytest

from services.core.demand import ModelDemand
from services.core.overload.events import (
    Action,
    Cause,
    Decision,
    DemandReported,
    GroupsSeen,
    GroupUse,
    ManualChange,
    MemberUse,
    MergesPlanned,
    ModelLoad,
    MoveEnded,
    OverloadConfig,
    OverloadPolicy,
    Rebalance,
    ReportStatus,
)
from services.core.overload.monitor import OverloadMonitor

MODEL = "m"
UNMERGED = 1000
MERGED = 1800
TICK_S = 0.1


class World:
    """Two workers that merge and split as decided, `delay_s` later; time passes in ticks."""

    def __init__(self, delay_s: float = 0.3, **config: object) -> None:
        self.monitor = OverloadMonitor(OverloadConfig(**config))  # type: ignore[arg-type]
        self.delay_s = delay_s
        self.now_s = 100.0
        self.merged = self.leaving = False
        self.limit = MERGED  # less while a split is prepared
        self.used = self.queued_tokens = self.refused_tokens = 0
        self.rate = 0.0
        self.decisions: list[Decision] = []
        self._change: tuple[float, bool] | None = None

    def tick(self, count: int = 1) -> list[Decision]:
        """Let time pass in ticks; returns the decisions."""
        before = len(self.decisions)
        for _ in range(count):
            self.now_s += TICK_S
            if self._change is not None and self.now_s >= self._change[0]:
                self.merged, self._change = self._change[1], None
            self._take(self.monitor.handle(GroupsSeen(self.now_s, self._groups())))
            demand = ModelDemand(
                MODEL,
                queued=self.queued_tokens > 0,
                queued_tokens=self.queued_tokens,
                refused=self.refused_tokens > 0,
                refused_tokens=self.refused_tokens,
                arriving_tokens_per_s=self.rate,
            )
            self._take(self.monitor.handle(DemandReported(self.now_s, (demand,))))
        return self.decisions[before:]

    def change(self, action: Action) -> Decision:
        """Merge or split the groups."""
        (decision,) = self.monitor.handle(ManualChange(self.now_s, MODEL, action, ("g0",)))
        self._take([decision])
        return decision

    def _take(self, decisions: list[Decision]) -> None:
        self.monitor.check_invariants()
        self.decisions += decisions
        for decision in decisions:
            if decision.action is Action.CALL_OFF:
                self._change, self.limit = None, MERGED
            elif decision.action is not Action.EXHAUSTED:
                merge = decision.action is Action.MERGE
                if self._change is None or self._change[1] is not merge:
                    self._change = self.now_s + self.delay_s, merge

    def _groups(self) -> tuple[GroupUse, ...]:
        if self.merged:
            used = min(self.used, MERGED)
            members = [MemberUse(f"w{n}", self.limit, used, UNMERGED) for n in range(2)]
            return (GroupUse("g0", MODEL, tuple(members), draining=self.leaving),)
        used = min(self.used // 2, UNMERGED)
        return tuple(
            GroupUse(
                f"g{n}", MODEL, (MemberUse(f"w{n}", UNMERGED, used, UNMERGED),), 0, 0, self.leaving
            )
            for n in range(2)
        )


@pytest.fixture
def world() -> World:
    """A world of settled groups."""
    made = World()
    assert made.tick(20) == []
    return made


def test_a_short_overload_is_ignored(world: World) -> None:
    world.used, world.queued_tokens = 1900, 300
    assert world.tick(2) == []
    world.queued_tokens = 0
    assert world.tick(1) == []
    world.queued_tokens = 300
    (decision,) = world.tick(4)
    assert (decision.action, decision.model) == (Action.MERGE, MODEL)
    assert decision.needed_tokens == 200
    reason = decision.reason
    assert (reason.cause, reason.threshold_tokens) == (Cause.OVERLOAD, 2000)
    assert reason.held_s >= reason.dwell_s == 0.2
    load = reason.load
    assert (load.demand_tokens, load.used_tokens, load.queued_tokens) == (2200, 1900, 300)
    assert (load.capacity_tokens, load.undropped_tokens, load.waiting) == (2000, 2000, 1)


def test_a_full_cluster_without_a_queue_is_not_overloaded(world: World) -> None:
    world.used, world.rate = 2000, 500.0
    assert world.tick(50) == []


def test_a_queue_without_demand_is_not_overload(world: World) -> None:
    """The queue may wait for a place in the batch."""
    world.used, world.queued_tokens = 500, 300
    assert world.tick(50) == []


def test_the_forecast_counts_arriving_and_staying_requests(world: World) -> None:
    world.used, world.queued_tokens, world.rate = 1700, 100, 400.0
    (decision,) = world.tick(60)[:1]
    assert decision.action is Action.MERGE
    load = decision.reason.load
    assert load.demand_tokens == 1800 and 200 < load.forecast_tokens <= 400
    assert decision.needed_tokens == load.expected_tokens - 2000


def test_the_forecast_counts_no_more_than_demand_grows(world: World) -> None:
    """Requests end at the arrival rate; a few always wait for the next iteration."""
    world.used, world.queued_tokens = 1700, 10
    assert world.tick(200) == []
    world.rate = 400.0
    assert world.tick(300) == []
    assert world.monitor.load(MODEL).forecast_tokens == 0
    for _ in range(60):
        world.queued_tokens += 10
        if decisions := world.tick():
            break
    (decision,) = decisions
    assert decision.action is Action.MERGE and decision.reason.load.forecast_tokens > 0
    assert decision.reason.load.demand_tokens < 2000


def full_beside_half_empty(half_empty: int) -> tuple[GroupUse, ...]:
    """Two full single-worker groups with waiting requests, and a merged group with this use."""
    pair = tuple(MemberUse(f"w{n}", 5600, half_empty, 1300) for n in range(2))
    full = (
        GroupUse(f"g{n}", MODEL, (MemberUse(f"w{n}", 1300, 1300, 1300),), 5, 600) for n in (2, 3)
    )
    return (GroupUse("g0", MODEL, pair), *full)


def decisions_of(
    groups: tuple[GroupUse, ...], count: int = 100, queue: tuple[ModelDemand, ...] = ()
) -> list[Decision]:
    """The decisions of a new monitor for these groups and this queue within `count` ticks."""
    monitor, decisions = OverloadMonitor(), []
    for tick in range(count):
        decisions += monitor.handle(DemandReported(tick * TICK_S, queue))
        decisions += monitor.handle(GroupsSeen(tick * TICK_S, groups))
        monitor.check_invariants()
    return decisions


def test_full_groups_are_overloaded_despite_room_elsewhere() -> None:
    """Requests of full groups are assigned and cannot move."""
    first = decisions_of(full_beside_half_empty(2800))[0]
    assert (first.action, first.reason.cause) == (Action.MERGE, Cause.OVERLOAD)
    load = first.reason.load
    assert load.expected_tokens < load.capacity_tokens
    assert first.needed_tokens == load.stuck_tokens == 1200
    assert first.group_ids == ("g2", "g3"), "the others have nothing to gain"


def full_beside_roomy(used: int = 1300, waiting: int = 200) -> tuple[GroupUse, ...]:
    """A full group with waiting requests, and three with room; requests may move."""
    alone = [MemberUse(f"w{n}", 1300, 400 if n else used, 1300) for n in range(4)]
    return tuple(
        GroupUse(
            *(f"g{n}", MODEL, (member,), 0 if n else bool(waiting), 0 if n else waiting),
            running=3,
            kv_layout="weights",
        )
        for n, member in enumerate(alone)
    )


class Moving:
    """A monitor with `rebalance`, whose moves end after a second with `moved` requests."""

    def __init__(self, moved: int = 1, **config: object) -> None:
        self.monitor = OverloadMonitor(OverloadConfig(**config))  # type: ignore[arg-type]
        self.moved, self.now_s = moved, 100.0
        self.decisions: list[Decision] = []
        self._ends: list[tuple[float, Decision]] = []

    def tick(self, groups: tuple[GroupUse, ...], count: int, **demand: int) -> list[Decision]:
        """Let time pass; returns the decisions."""
        before = len(self.decisions)
        for _ in range(count):
            self.now_s += TICK_S
            for at_s, decision in [end for end in self._ends if end[0] <= self.now_s]:
                self._ends.remove((at_s, decision))
                ids = decision.group_ids[0], decision.group_ids[1]
                assert not self.monitor.handle(MoveEnded(self.now_s, MODEL, ids, self.moved))
            decisions = self.monitor.handle(
                DemandReported(self.now_s, (ModelDemand(MODEL, **demand),))
            )
            decisions += self.monitor.handle(GroupsSeen(self.now_s, groups))
            self.monitor.check_invariants()
            self.decisions += decisions
            self._ends += [(self.now_s + 1, d) for d in decisions if d.action is Action.MOVE]
        return self.decisions[before:]


def test_a_move_comes_before_a_merge_which_follows_if_moves_do_not_help() -> None:
    moving = Moving(rebalance=Rebalance.STUCK)
    decisions = moving.tick(full_beside_roomy(), 40)
    assert {decision.action for decision in decisions} == {Action.MOVE}
    assert decisions[0].group_ids[0] == "g0" and decisions[0].reason.cause is Cause.FULL
    assert decisions[0].needed_tokens >= 200
    decisions = moving.tick(full_beside_roomy(), 40)  # still full after 5 s
    merges = [decision for decision in decisions if decision.action is Action.MERGE]
    assert merges and merges[0].group_ids == ("g0",) and not merges[0].reason.moves_help
    assert merges[0].now_s >= 105.0


def test_no_merge_follows_if_moves_help() -> None:
    moving = Moving(rebalance=Rebalance.STUCK)
    assert {d.action for d in moving.tick(full_beside_roomy(), 20)} == {Action.MOVE}
    assert moving.tick(full_beside_roomy(900, 0), 100) == []


def test_a_move_that_fails_delays_a_merge_by_its_own_time() -> None:
    moving = Moving(moved=0, rebalance=Rebalance.STUCK)
    decisions = moving.tick(full_beside_roomy()[:2], 60)
    assert decisions[0].action is Action.MOVE
    (merge, *_) = [decision for decision in decisions if decision.action is Action.MERGE]
    assert (
        merge.now_s <= decisions[0].now_s + 1 + moving.monitor.config.overload_dwell_s + 4 * TICK_S
    )


def test_without_rebalance_a_full_group_merges_as_before() -> None:
    decisions = Moving(rebalance=Rebalance.OFF).tick(full_beside_roomy(), 20)
    assert [decision.action for decision in decisions] == [Action.MERGE]


@pytest.mark.parametrize(
    ("policy", "default"),
    [
        (OverloadPolicy.DROP, Rebalance.STUCK),
        (OverloadPolicy.RECOMPUTE, Rebalance.OFF),
        (OverloadPolicy.STATIC_PIPELINE, Rebalance.OFF),
        (OverloadPolicy.MIGRATE, Rebalance.ALL),
    ],
)
def test_each_policy_has_its_default(policy: OverloadPolicy, default: Rebalance) -> None:
    assert OverloadConfig(policy).moves is default
    given = OverloadConfig(policy, Rebalance.OFF).moves
    assert given is (default if policy is OverloadPolicy.MIGRATE else Rebalance.OFF)


@pytest.mark.parametrize("mode", [Rebalance.STUCK, Rebalance.ALL])
def test_demand_beyond_all_groups_merges_at_once(mode: Rebalance) -> None:
    moving = Moving(rebalance=mode)
    decisions = moving.tick(full_beside_roomy(), 20, queued=5, queued_tokens=5000)
    assert [decision.action for decision in decisions] == [Action.MERGE]


def test_moves_resume_once_merges_cannot_meet_the_demand() -> None:
    moving = Moving(rebalance=Rebalance.STUCK)
    demand = {"queued": 5, "queued_tokens": 5000}
    moving.tick(full_beside_roomy(), 20, **demand)
    exhausted = moving.monitor.handle(MergesPlanned(moving.now_s, MODEL, 1000))
    assert [decision.action for decision in exhausted] == [Action.EXHAUSTED]
    actions = {decision.action for decision in moving.tick(full_beside_roomy(), 20, **demand)}
    assert Action.MOVE in actions


def test_requests_move_while_an_operator_has_suppressed_merges() -> None:
    moving = Moving(rebalance=Rebalance.STUCK)
    moving.tick(full_beside_roomy(400, 0), 1)
    moving.monitor.handle(ManualChange(moving.now_s, MODEL, Action.SPLIT, ("g0",)))
    decisions = moving.tick(full_beside_roomy(), 20, queued=5, queued_tokens=5000)
    assert {decision.action for decision in decisions} == {Action.MOVE}


def test_requests_move_while_only_the_forecast_exceeds_the_capacity() -> None:
    def growing(used: int) -> tuple[GroupUse, ...]:
        alone = [MemberUse(f"w{n}", 1300, 400 if n == 3 else used, 1300) for n in range(4)]
        return tuple(
            GroupUse(f"g{n}", MODEL, (member,), running=3, kv_layout="weights")
            for n, member in enumerate(alone)
        )

    moving = Moving(rebalance=Rebalance.STUCK)
    rate = {"arriving_tokens_per_s": 20_000}
    assert moving.tick(growing(100), 20, **rate) == []
    decisions = moving.tick(growing(1290), 1, **rate)
    load = moving.monitor.load(MODEL)
    assert not load.waiting and load.expected_tokens > load.capacity_tokens
    assert {decision.action for decision in decisions} == {Action.MOVE}


def test_a_large_request_moves_others_only_with_rebalance_all() -> None:
    groups = full_beside_roomy(400, 0)
    demand = {"queued": 1, "queued_tokens": 950, "first_queued_tokens": 950}
    assert Moving(rebalance=Rebalance.STUCK).tick(groups, 10, **demand) == []
    (decision,) = Moving(rebalance=Rebalance.ALL).tick(groups, 10, **demand)
    assert (decision.action, decision.reason.cause) == (Action.MOVE, Cause.LARGE)


def test_the_policy_migrate_moves_and_never_merges() -> None:
    moving = Moving(policy=OverloadPolicy.MIGRATE)
    demand = {"queued": 50, "queued_tokens": 50_000, "first_queued_tokens": 1000}
    actions = {decision.action for decision in moving.tick(full_beside_roomy(), 200, **demand)}
    assert actions == {Action.MOVE, Action.EXHAUSTED}


def test_below_the_threshold_of_a_split_a_full_group_is_no_overload() -> None:
    """Otherwise groups would merge, split at once, and merge again."""
    idle = tuple(GroupUse(f"i{n}", MODEL, (MemberUse(f"i{n}", 1300, 0, 1300),)) for n in range(6))
    assert decisions_of((full_beside_half_empty(0)[1], *idle)) == []


def test_a_group_with_a_leaving_member_does_not_hold_up_other_groups() -> None:
    pair = tuple(MemberUse(f"w{n}", 5600, 100, 1300) for n in range(2))
    leaving = GroupUse("g0", MODEL, pair, draining=True)
    flooded = tuple(
        GroupUse(f"g{n}", MODEL, (MemberUse(f"w{n}", 1300, 1300, 1300),), 9, 9000)
        for n in (2, 3, 4, 5)
    )
    decisions = decisions_of((leaving, *flooded), 45)
    assert [(decision.action, decision.reason.cause) for decision in decisions] == [
        (Action.SPLIT, Cause.DRAINING),
        (Action.MERGE, Cause.OVERLOAD),
    ]
    assert decisions[0].group_ids == ("g0",)


def test_refusals_count_as_overload(world: World) -> None:
    world.used, world.refused_tokens = 1900, 300
    assert [decision.action for decision in world.tick(5)] == [Action.MERGE]


def test_requests_waiting_at_workers_count_as_overload(world: World) -> None:
    members = (MemberUse("w0", UNMERGED, 900, UNMERGED),)
    groups = tuple(GroupUse(f"g{n}", MODEL, members, 1, 200) for n in range(2))
    for tick in range(20):
        decisions = world.monitor.handle(GroupsSeen(world.now_s + 0.1 * tick, groups))
        if decisions:
            break
    assert decisions[0].reason.load.waiting_tokens == 400


def test_no_second_decision_precedes_the_effect_of_the_first() -> None:
    world = World(delay_s=1e9)
    world.tick(20)
    world.used, world.queued_tokens = 1900, 300
    assert len(world.tick(40)) == 1
    assert len(world.tick(20)) == 1


def test_subsided_demand_splits_fitting_groups_after_a_longer_dwell(world: World) -> None:
    world.used, world.queued_tokens = 1900, 300
    world.tick(30)
    assert world.merged
    world.used, world.queued_tokens = 990, 0
    assert world.tick(40) == []
    (decision,) = world.tick(20)
    assert (decision.action, decision.group_ids) == (Action.SPLIT, ("g0",))
    assert (decision.reason.cause, decision.reason.threshold_tokens) == (Cause.SUBSIDED, 1000)
    assert decision.reason.dwell_s == 5.0
    assert world.tick(50) == [] and not world.merged


def test_a_split_needs_room_in_each_member() -> None:
    monitor = OverloadMonitor()
    four = tuple(MemberUse(f"w{n}", 3600, 1200, UNMERGED) for n in range(4))
    use = GroupUse("g0", MODEL, four)
    for tick in range(200):
        assert monitor.handle(GroupsSeen(tick * TICK_S, (use,))) == []
    fits = replace(use, members=tuple(replace(member, used_tokens=1000) for member in four))
    answers = [monitor.handle(GroupsSeen(20 + tick * TICK_S, (fits,))) for tick in range(60)]
    assert [decision.action for decisions in answers for decision in decisions] == [Action.SPLIT]


def test_a_lack_of_partners_is_reported_once_per_overload(world: World) -> None:
    world.used, world.queued_tokens = 1900, 300
    world.tick(20)
    world.used = 1700
    decisions = world.tick(200)
    assert [decision.action for decision in decisions] == [Action.EXHAUSTED]
    world.queued_tokens = 0
    world.tick(5)
    world.queued_tokens = 300
    assert world.tick(50) == [], "a pause is no end"
    world.queued_tokens = 0
    world.tick(60)
    world.queued_tokens = 300
    assert [decision.action for decision in world.tick(50)] == [Action.EXHAUSTED]


def test_a_shortfall_ends_without_reports() -> None:
    monitor, now_s = OverloadMonitor(), 0.0
    full = GroupUse("g0", MODEL, (MemberUse("w0", 1000, 1000, 1000),), 9, 9000)
    silent = GroupUse("g0", MODEL, (), report_status=ReportStatus.SILENT, silent_ids=("w0",))

    def tick(group: GroupUse, count: int) -> None:
        nonlocal now_s
        for _ in range(count):
            now_s += TICK_S
            monitor.handle(GroupsSeen(now_s, (group,)))
            monitor.handle(DemandReported(now_s, ()))

    tick(full, 60)
    assert monitor.shortfalls == {MODEL: 9000}
    tick(silent, 40)
    assert monitor.shortfalls[MODEL] > 0, "a pause is no end"
    tick(full, 20)
    tick(silent, 40)
    assert monitor.shortfalls[MODEL] > 0, "pauses do not add up"
    tick(silent, 20)
    assert monitor.shortfalls == {MODEL: 0}


def test_insufficient_merges_are_reported_once_per_overload() -> None:
    world = World(delay_s=1e9)
    world.tick(20)
    monitor = world.monitor
    world.used, world.queued_tokens = 1900, 5000
    (merge,) = world.tick(10)
    assert merge.needed_tokens == 4900
    now_s = world.now_s
    (decision,) = monitor.handle(MergesPlanned(now_s, MODEL, 4100))
    assert (decision.action, decision.needed_tokens) == (Action.EXHAUSTED, 4100)
    assert decision.reason.cause is Cause.OVERLOAD and decision.reason.held_s >= 0.2
    assert monitor.handle(MergesPlanned(now_s, MODEL, 4100)) == []
    assert monitor.shortfalls == {MODEL: monitor.load(MODEL).short_tokens}
    assert monitor.shortfalls[MODEL] > 0
    # A worker has come: the next plan suffices.
    assert monitor.handle(MergesPlanned(now_s, MODEL, 0)) == []
    assert monitor.shortfalls == {MODEL: 0}
    assert monitor.handle(MergesPlanned(now_s, MODEL, 1)) != []
    world.used = world.queued_tokens = 0
    world.tick(60)
    assert monitor.shortfalls == {MODEL: 0}
    assert monitor.handle(MergesPlanned(now_s, "gone", 7)) == []


def test_a_model_without_reported_groups_has_no_load() -> None:
    assert OverloadMonitor().load(MODEL) == ModelLoad(*[0] * len(fields(ModelLoad)))


def test_silent_groups_have_no_load() -> None:
    """The free KV of a frozen worker must not hide an overload of the others."""
    groups = tuple(
        GroupUse(f"g{n}", MODEL, (MemberUse(f"w{n}", 1000, used, 1000),))
        for n, used in enumerate((900, 900, 0))
    )
    queue = (ModelDemand(MODEL, 4, 400),)
    assert decisions_of(groups, 40, queue) == []
    frozen = (*groups[:2], GroupUse("g2", MODEL, (), report_status=ReportStatus.SILENT))
    assert [decision.action for decision in decisions_of(frozen, 40, queue)] == [Action.MERGE]
    unknown = tuple(
        GroupUse(f"g{n}", MODEL, (), report_status=ReportStatus.SILENT) for n in range(3)
    )
    assert decisions_of(unknown, 40, queue) == []


def test_kv_of_a_leaving_worker_is_no_capacity() -> None:
    members = (MemberUse("w0", 1000, 0, 1000),)
    draining = GroupUse("g0", MODEL, members, draining=True)
    full = GroupUse("g1", MODEL, (MemberUse("w1", 1000, 1000, 1000),))
    (decision,) = decisions_of((draining, full), 40, (ModelDemand(MODEL, 4, 800),))
    assert (decision.action, decision.needed_tokens) == (Action.EXHAUSTED, 800)


def test_an_endless_changeover_delays_decisions_for_a_limited_time() -> None:
    full = tuple(
        GroupUse(f"g{n}", MODEL, (MemberUse(f"w{n}", 1000, 1000, 1000),), 4, 400) for n in (1, 2)
    )
    changing = GroupUse("g0", MODEL, (), report_status=ReportStatus.CHANGING, silent_ids=("w0",))
    first = decisions_of((changing, *full), 400)[0]
    assert first.action is Action.MERGE and 30 < first.now_s < 35
    pair = tuple(MemberUse(f"x{n}", 1800, 100, 1000) for n in range(2))
    leaving = GroupUse("x0", MODEL, pair, draining=True)
    assert decisions_of((changing, leaving), 5)[0].group_ids == ("x0",)


def test_a_worker_that_falls_silent_now_and_then_does_not_restart_the_dwell_time() -> None:
    pair = tuple(MemberUse(f"w{n}", 1800, 100, 1000) for n in range(2))
    merged = GroupUse("g0", MODEL, pair)
    monitor, decisions = OverloadMonitor(), []
    for tick in range(100):
        silent = GroupUse("g2", MODEL, (), report_status=ReportStatus.SILENT, silent_ids=("w2",))
        reporting = GroupUse("g2", MODEL, (MemberUse("w2", 1000, 0, 1000),))
        other = silent if tick // 20 % 2 else reporting
        decisions += monitor.handle(GroupsSeen(tick * TICK_S, (merged, other)))
    assert [decision.action for decision in decisions] == [Action.SPLIT]


def test_no_decision_is_made_during_a_changeover() -> None:
    full = tuple(
        GroupUse(f"g{n}", MODEL, (MemberUse(f"w{n}", 1000, 1000, 1000),), 4, 400) for n in (1, 2)
    )
    changing = GroupUse("g0", MODEL, (), report_status=ReportStatus.CHANGING)
    assert decisions_of((changing, *full)) == []
    monitor, decisions = OverloadMonitor(), []
    for tick in range(60):
        first = changing if tick < 30 else replace(full[0], group_id="g0")
        decisions += monitor.handle(GroupsSeen(tick * TICK_S, (first, *full)))
    (merge,) = decisions
    assert merge.now_s > 30 * TICK_S + OverloadConfig().report_s


@pytest.mark.parametrize("policy", [OverloadPolicy.RECOMPUTE, OverloadPolicy.SWAP])
def test_recompute_and_swap_never_merge(policy: OverloadPolicy) -> None:
    world = World(policy=policy)
    world.tick(20)
    world.used, world.queued_tokens = 1900, 5000
    assert [decision.action for decision in world.tick(200)] == [Action.EXHAUSTED]


def test_manual_changes_are_planned(world: World) -> None:
    merge = world.change(Action.MERGE)
    assert (merge.reason.cause, merge.action) == (Cause.MANUAL, Action.MERGE)
    assert merge.group_ids == ("g0",)
    # The groups stay merged although there is no demand.
    assert world.tick(200) == [] and world.merged
    restore = world.change(Action.SPLIT)
    assert (restore.reason.cause, restore.reason.threshold_tokens) == (Cause.MANUAL, 1000)
    assert world.tick(20) == [], "groups that are still seen as they were are not split again"
    world.used, world.queued_tokens = 1900, 300
    assert world.tick(200) == [] and not world.merged
    assert world.tick(150)[0].action is Action.MERGE


def test_manual_changes_of_unknown_models_are_refused(world: World) -> None:
    assert world.monitor.handle(ManualChange(0.0, "other", Action.MERGE)) == []


def test_models_are_independent() -> None:
    monitor = OverloadMonitor()
    groups = tuple(
        GroupUse(f"{name}{n}", name, (MemberUse(f"{name}{n}", 1000, used, 1000),))
        for name, used in (("a", 1000), ("b", 0))
        for n in range(2)
    )
    decisions = []
    for tick in range(20):
        decisions += monitor.handle(GroupsSeen(tick * TICK_S, groups))
        queue = ModelDemand("a", 1, 10)
        decisions += monitor.handle(DemandReported(tick * TICK_S, (queue,)))
    assert [decision.model for decision in decisions] == ["a"]


def waves(period_s: float, seed: int) -> Iterator[bool]:
    """Whether demand is high at each tick; with some noise at the edges."""
    rng = Random(seed)
    tick = 0
    while True:
        high = int(tick * TICK_S / period_s) % 2 == 0
        yield high if rng.random() < 0.95 else not high
        tick += 1


@pytest.mark.parametrize("period_s", [0.1, 0.3, 1.0, 5.0, 6.0, 8.0, 15.0])
def test_oscillating_demand_does_not_cause_flapping(period_s: float) -> None:
    """Ten minutes: the dwell of splits doubles until it outlasts the low tide."""
    world = World()
    world.tick(20)
    wave = waves(period_s, seed=7)
    for _ in range(6000):
        high = next(wave)
        world.used, world.queued_tokens = (1900, 400) if high else (100, 0)
        world.tick()
    merges = [decision for decision in world.decisions if decision.action is Action.MERGE]
    restores = [decision for decision in world.decisions if decision.action is Action.SPLIT]
    assert len(merges) <= 8 and abs(len(merges) - len(restores)) <= 1


def test_long_tides_are_followed() -> None:
    world = World()
    world.tick(20)
    for _ in range(3):
        world.used, world.queued_tokens = 1900, 400
        world.tick(600)
        assert world.merged
        world.used, world.queued_tokens = 100, 0
        world.tick(600)
        assert not world.merged


def test_a_regretted_split_makes_the_next_wait_longer() -> None:
    world = World()
    world.tick(20)
    dwells = []
    for _ in range(6):
        world.used, world.queued_tokens = 1900, 400
        while not world.merged:
            world.tick()
        world.used, world.queued_tokens = 100, 0
        while world.merged:
            world.tick()
        dwells.append(world.decisions[-1].reason.dwell_s)
    assert dwells == [5.0, 10.0, 20.0, 40.0, 80.0, 80.0]


def test_a_group_with_a_leaving_member_splits_even_if_full(world: World) -> None:
    """Even under overload; a single-worker group need not split."""
    world.used, world.queued_tokens = 2500, 1000
    world.merged = True
    world.tick(20)
    world.leaving = True
    (decision,) = world.tick(1)
    assert (decision.action, decision.group_ids) == (Action.SPLIT, ("g0",))
    assert (decision.reason.cause, decision.reason.held_s) == (Cause.DRAINING, 0.0)
    world.used = world.queued_tokens = 0
    assert world.tick(100) == [] and not world.merged


def preparing_to_split(**config: object) -> World:
    """A world in which demand has subsided and a split is in preparation."""
    world = World(**config)
    world.merged = True
    world.tick(20)
    world.used = 500
    world.delay_s = 16.0
    decisions = world.tick(60)
    assert [decision.action for decision in decisions] == [Action.SPLIT]
    world.limit = UNMERGED
    return world


def test_a_prepared_split_is_cancelled_when_load_returns() -> None:
    world = preparing_to_split()
    world.used, world.queued_tokens = 1000, 400
    (decision,) = world.tick(20)
    assert (decision.action, decision.group_ids) == (Action.CALL_OFF, ("g0",))
    assert decision.reason.cause is Cause.OVERLOAD
    assert decision.reason.held_s >= decision.reason.dwell_s == 0.2
    assert world.merged
    world.used, world.queued_tokens = 1400, 0
    assert world.tick(100) == [], "its capacity is there again"
    world.used = 500
    assert world.tick(90) == [], "the next dwell is longer"
    assert [decision.action for decision in world.tick(30)] == [Action.SPLIT]


def test_a_split_goes_on_while_its_requests_fit() -> None:
    world = preparing_to_split()
    world.used, world.queued_tokens = 600, 300
    assert {decision.action for decision in world.tick(100)} <= {Action.SPLIT}


def test_a_completed_split_is_not_cancelled() -> None:
    world = preparing_to_split()
    world.tick(170)
    assert not world.merged
    world.used, world.queued_tokens = 1900, 600
    assert [decision.action for decision in world.tick(20)] == [Action.MERGE]


def test_a_split_for_a_leaving_member_is_not_cancelled() -> None:
    world = preparing_to_split()
    world.leaving = True
    world.used, world.queued_tokens = 1000, 400
    assert Action.CALL_OFF not in {decision.action for decision in world.tick(60)}
