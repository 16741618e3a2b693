"""Merged groups split into smaller merged groups, as far as their KV in use allows."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.core.demand import ModelDemand
from services.core.groups.layer_map import (
    MemberMemory,
    ModelShape,
    SplitError,
    Stage,
    capacity_tokens,
    grow_stages,
    split_layers,
)
from services.core.groups.vocabulary import Group, GroupPhase, Member
from services.core.overload.action_plan import NoPlan, merges, splits
from services.core.overload.actions import ActionState
from services.core.overload.events import (
    Action,
    Cause,
    Decision,
    DemandReported,
    GroupsSeen,
    ManualChange,
    OverloadConfig,
    PartialSplit,
)
from services.core.overload.group_use import group_uses
from services.core.overload.monitor import OverloadMonitor
from services.core.overload.partial_split import (
    partial_splits_of,
    partial_targets,
)
from services.core.overload.worker_facts import WorkerFacts
from services.core.report import EngineReport, Load

SHAPE = ModelShape(8, 1000, 0, 0, False, 1)
UNMERGED = 1000
ARENA = 8 * 1000 + UNMERGED * 8
"""Half of it is parameters."""
TICK_S = 0.1


def facts_of(arenas: Sequence[int], shape: ModelShape = SHAPE) -> dict[str, WorkerFacts]:
    blocks = [
        (arena - shape.parameter_bytes(1)) // (shape.num_layers * shape.kv_bytes)
        for arena in arenas
    ]
    return {
        f"w{n}": WorkerFacts(f"w{n}", "m", 1, blocks[n], arena, shape, ("h",), True)
        for n, arena in enumerate(arenas)
    }


def group_of(stages: Sequence[Stage], epoch: int = 1) -> Group:
    members = tuple(Member(s.worker_id, "i", s.first_layer, s.end_layer) for s in stages)
    return Group(f"group-{stages[0].worker_id}", epoch, GroupPhase.STABLE, members, "m")


def pipeline(workers: int) -> Group:
    ends = [8 * n // workers for n in range(workers + 1)]
    return group_of([Stage(f"w{n}", ends[n], ends[n + 1]) for n in range(workers)])


def test_halves_interleave_so_that_each_member_keeps_its_layers() -> None:
    facts = facts_of([ARENA] * 4)
    # A pair has 32,000 bytes for 8 layers of 1,000: 3,000 tokens; all four have 7,000.
    assert partial_splits_of(pipeline(4), facts) == ((PartialSplit(2, 3000, 6000),), "")
    assert partial_targets(pipeline(4), facts, 2) == (
        (Stage("w0", 0, 4), Stage("w2", 4, 8)),
        (Stage("w1", 0, 4), Stage("w3", 4, 8)),
    )
    (quarters, halves), _ = partial_splits_of(pipeline(8), facts_of([ARENA] * 8))
    assert (quarters.parts, quarters.limit_tokens) == (4, 3000)
    assert (halves.parts, halves.limit_tokens) == (2, 7000)


def test_three_workers_split_in_two_if_the_largest_has_room_for_all_layers() -> None:
    large = 2 * ARENA
    group = pipeline(3)
    (split,), _ = partial_splits_of(group, facts_of([ARENA, large, ARENA]))
    assert (split.parts, split.limit_tokens) == (2, 3000)
    assert partial_targets(group, facts_of([ARENA, large, ARENA]), 2) == (
        (Stage("w0", 0, 4), Stage("w2", 4, 8)),
        (Stage("w1", 0, 8),),
    )
    # With equal workers, the worker alone needs as much room as after a split into three.
    splits, reason = partial_splits_of(group, facts_of([ARENA] * 3))
    assert splits == () and "as much memory" in reason


def test_a_part_keeps_the_layers_of_its_members_where_the_fastest_division_would_not() -> None:
    """Without this rule a member would drop layers whose KV it stores and fetch others."""
    memories = [MemberMemory(name, ARENA) for name in ("w0", "w1")]
    neighbours = [Stage("w0", 0, 2), Stage("w1", 2, 4)]
    assert split_layers(SHAPE, memories, 0) == (Stage("w0", 0, 4), Stage("w1", 4, 8))
    assert grow_stages(SHAPE, memories, neighbours) == (Stage("w0", 0, 2), Stage("w1", 2, 8))


def test_a_group_without_room_for_its_parameters_in_parts_stays_whole() -> None:
    tight = SHAPE.parameter_bytes(1) // 4 + 100
    facts = facts_of([ARENA, tight, ARENA, tight])
    possible, reason = partial_splits_of(pipeline(4), facts)
    assert possible == () and "do not fit" in reason
    with pytest.raises(SplitError):
        partial_targets(pipeline(4), facts, 2)
    with pytest.raises(NoPlan, match="do not fit"):
        splits([pipeline(4)], facts, {"group-w0": 2})
    unknown = {name: replace(worker, shape=None) for name, worker in facts.items()}
    assert partial_splits_of(pipeline(4), unknown) == ((), "the sizes of its model are unknown")


class Cluster:
    """Workers whose groups change as soon as decided; `used` is the KV of all requests."""

    def __init__(self, workers: int, **config: object) -> None:
        self.facts = facts_of([ARENA] * workers)
        self.monitor = OverloadMonitor(OverloadConfig(**config))  # type: ignore[arg-type]
        self.actions = ActionState(1.0, 1.0)
        self.groups = [pipeline(workers)]
        self.now_s = 100.0
        self.used = self.queued = 0
        self.stuck: dict[str, int] = {}  # tokens that requests wait for at a group
        self.limits: dict[str, int] = {}  # capacity of groups that prepare a split
        self.executes = True

    @property
    def sizes(self) -> list[int]:
        return sorted(len(group.members) for group in self.groups)

    def run(self, seconds: float) -> list[Decision]:
        """Let time pass; returns the decisions."""
        decided = []
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            reports = self._reports()
            uses = group_uses(self.groups, reports, self.facts)
            decisions = self.monitor.handle(GroupsSeen(self.now_s, uses))
            demand = ModelDemand("m", queued=self.queued > 0, queued_tokens=self.queued)
            decisions += self.monitor.handle(DemandReported(self.now_s, (demand,)))
            self.monitor.check_invariants()
            for decision in decisions:
                if self.executes:
                    self._change(decision, reports)
            decided += decisions
        return decided

    def _reports(self) -> dict[str, EngineReport]:
        reports = {}
        for group in self.groups:
            used = self.used // len(self.groups)
            for member in group.members:
                layers = member.end_layer - member.first_layer
                total = (ARENA - layers * 1000) // layers
                total = min(total, self.limits.get(group.group_id, total))
                # The leader reports the requests that wait.
                leads = member is group.members[0]
                wanted = self.stuck.get(group.group_id, 0) if leads else 0
                load = Load(1, wanted > 0, total - used, wanted, kv_blocks_total=total)
                reports[member.worker_id] = EngineReport(load, group.epoch)
        return reports

    def _change(self, decision: Decision, reports: dict[str, EngineReport]) -> None:
        if decision.action not in (Action.MERGE, Action.SPLIT):
            return
        plan = self.actions.begin(decision, self.groups, self.facts, reports, self.now_s)
        used = self.used // len(self.groups)
        for change in plan.changes:
            for target in change.targets:
                memories = [MemberMemory(stage.worker_id, ARENA) for stage in target]
                assert min(capacity_tokens(SHAPE, memories, target)) >= used, "KV does not fit"
            kept = [group for group in self.groups if group.group_id not in change.group_ids]
            epoch = max(group.epoch for group in self.groups) + 1
            self.groups = kept + [group_of(target, epoch) for target in change.targets]
            self.actions.ended(change, True, self.now_s)


def test_a_group_of_four_halves_at_half_of_the_undropped_capacity() -> None:
    cluster = Cluster(4)
    cluster.used = UNMERGED * 4 // 2
    assert cluster.run(5.0) == []
    (decision,) = cluster.run(1.5)
    assert (decision.group_ids, decision.parts) == (("group-w0",), (2,))
    assert decision.reason.threshold_tokens == 3000 and decision.reason.held_s >= 5.0
    assert cluster.sizes == [2, 2]
    assert cluster.run(60.0) == [], "half is not below half"
    cluster.used = int(0.45 * UNMERGED * 4)
    (decision,) = cluster.run(10.0)
    assert set(decision.group_ids) == {"group-w0", "group-w1"} and decision.parts == ()
    assert cluster.sizes == [1, 1, 1, 1]


def test_singles_have_priority_while_the_kv_fits_them() -> None:
    cluster = Cluster(4)
    cluster.used = UNMERGED
    (decision,) = cluster.run(10.0)
    assert decision.parts == () and cluster.sizes == [1, 1, 1, 1]


def test_kv_that_soon_does_not_fit_singles_still_allows_halves() -> None:
    """While a full split is near, halves wait; then they come at once."""
    cluster = Cluster(4)
    cluster.used = 1500
    assert cluster.run(3.0) == []
    cluster.used = 900
    assert cluster.run(4.0) == [], "singles will be possible soon"
    cluster.used = 1500
    (decision,) = cluster.run(0.2)
    assert decision.parts == (2,)


def test_eight_workers_return_in_three_steps() -> None:
    cluster = Cluster(8)
    cluster.used = int(0.45 * UNMERGED * 8)
    sizes = []
    for _ in range(4):
        cluster.run(8.0)
        sizes.append(cluster.sizes)
    assert sizes == [[4, 4], [2, 2, 2, 2], [1] * 8, [1] * 8]


def test_without_partial_splits_a_group_waits_until_single_workers_have_room() -> None:
    cluster = Cluster(4, partial_splits=False)
    cluster.used = 1500
    assert cluster.run(60.0) == []
    cluster.used = 1000
    (decision,) = cluster.run(10.0)
    assert decision.parts == ()


def test_halves_merge_again_when_load_returns_and_then_wait_longer() -> None:
    cluster = Cluster(4)
    cluster.used = 2000
    cluster.run(8.0)
    assert cluster.sizes == [2, 2]
    cluster.used, cluster.queued = 6000, 900
    (decision,) = cluster.run(3.0)
    assert decision.action is Action.MERGE and cluster.sizes == [4]
    cluster.used, cluster.queued = 2000, 0
    assert cluster.run(10.0) == [], "the dwell has doubled"
    (decision,) = cluster.run(4.0)
    assert decision.parts == (2,)


def test_a_prepared_partial_split_is_cancelled_when_load_returns() -> None:
    cluster = Cluster(4)
    cluster.used, cluster.executes = 2000, False
    (decision,) = cluster.run(8.0)
    assert decision.action is Action.SPLIT
    cluster.used, cluster.queued = 7000, 900
    (called_off,) = cluster.run(1.0)
    assert (called_off.action, called_off.group_ids) == (Action.CALL_OFF, ("group-w0",))


def test_an_oversized_split_is_cancelled_below_half_of_the_capacity() -> None:
    """Four parts limit eight workers to 3,000 tokens, and demand subsides below 4,000."""
    cluster = Cluster(8)
    cluster.used, cluster.executes = 2900, False
    (decision,) = cluster.run(8.0)
    assert decision.parts == (4,)
    cluster.limits = {"group-w0": 3000}
    cluster.stuck = {"group-w0": 90}
    assert {d.action for d in cluster.run(6.0)} <= {Action.SPLIT}, "its requests fit"
    cluster.stuck = {"group-w0": 600}
    (called_off,) = cluster.run(1.0)
    assert (called_off.action, called_off.group_ids) == (Action.CALL_OFF, ("group-w0",))
    cluster.limits, cluster.stuck, cluster.used, cluster.executes = {}, {}, 3500, True
    assert cluster.run(8.0) == [], "the dwell has doubled"
    (decision,) = cluster.run(4.0)
    assert decision.parts == (2,), "there is room for the demand in halves"


def test_only_oversized_splits_are_cancelled_at_low_demand() -> None:
    cluster = Cluster(4)
    cluster.used = 2000
    cluster.run(8.0)
    cluster.used, cluster.executes = 1500, False
    (decision,) = cluster.run(8.0)
    assert decision.group_ids == ("group-w0", "group-w1")
    cluster.limits = dict.fromkeys(decision.group_ids, UNMERGED)
    cluster.stuck = {"group-w1": 300}
    actions = [d for d in cluster.run(4.0) if d.action is Action.CALL_OFF]
    assert [d.group_ids for d in actions] == [("group-w1",)]


def test_a_full_group_cancels_no_split_at_low_demand() -> None:
    """Otherwise every temporarily full group would keep the others merged."""
    cluster = Cluster(8)
    cluster.groups = [pipeline(4), *(group_of([Stage(f"w{n}", 0, 8)]) for n in range(4, 8))]
    cluster.used, cluster.executes = 5 * 500, False
    (decision,) = cluster.run(8.0)
    assert decision.group_ids == ("group-w0",)
    cluster.limits, cluster.stuck = {"group-w0": UNMERGED}, {"group-w4": 900}
    assert {d.action for d in cluster.run(4.0)} <= {Action.SPLIT}


def test_a_completed_partial_split_is_not_cancelled() -> None:
    """The first half has the id of the group that has split."""
    cluster = Cluster(4)
    cluster.used = 2000
    cluster.run(6.4)
    assert cluster.sizes == [2, 2] and cluster.groups[0].group_id == "group-w0"
    cluster.used, cluster.queued = 6000, 900
    actions = [decision.action for decision in cluster.run(8.0)]
    assert actions == [Action.MERGE]


def test_a_merged_group_has_a_reason_not_to_split() -> None:
    cluster = Cluster(4)
    cluster.used = 3500
    cluster.run(1.0)
    assert cluster.monitor.split_obstacles(cluster.now_s, {}) == {
        "group-w0": "its KV in use, 3500 tokens, must fall to 3000 tokens"
    }
    cluster.used, cluster.queued = 2900, 200
    cluster.run(0.1)
    assert cluster.monitor.split_obstacles(cluster.now_s, {}) == {
        "group-w0": "demand and forecast, 3100 tokens, must fall below 3000 tokens"
    }
    cluster.used = cluster.queued = 0
    cluster.run(4.0)
    (text,) = cluster.monitor.split_obstacles(cluster.now_s, {}).values()
    assert text == "demand must stay low for 2 s more (of 5 s)"
    cluster = Cluster(3)
    cluster.used = 1500
    cluster.run(1.0)
    (text,) = cluster.monitor.split_obstacles(cluster.now_s, {}).values()
    assert text.startswith("its KV in use, 1500 tokens, must fall to 1000 tokens (no partial")


def test_disabled_partial_splits_are_the_reason_not_to_split() -> None:
    cluster = Cluster(4, partial_splits=False)
    cluster.used = 1500
    cluster.run(1.0)
    (text,) = cluster.monitor.split_obstacles(cluster.now_s, {}).values()
    off = "(no partial split: partial_splits is false)"
    assert text == f"its KV in use, 1500 tokens, must fall to 1000 tokens {off}"
    cluster.used, cluster.queued = 900, 1500
    cluster.run(0.1)
    (text,) = cluster.monitor.split_obstacles(cluster.now_s, {}).values()
    assert text.startswith("demand and forecast, ") and text.endswith(f"2000 tokens {off}")


def test_a_doubled_dwell_time_is_the_reason_not_to_split() -> None:
    cluster = Cluster(4)
    cluster.used = 2000
    cluster.run(8.0)
    cluster.used, cluster.queued = 6000, 900
    cluster.run(3.0)
    cluster.used, cluster.queued = 2000, 0
    cluster.run(5.0)
    (text,) = cluster.monitor.split_obstacles(cluster.now_s, {}).values()
    assert text.startswith("demand must stay low for ") and text.endswith(" s more (of 10 s)")


def test_a_change_of_another_group_delays_splits() -> None:
    cluster = Cluster(4)
    halves = partial_targets(pipeline(4), cluster.facts, 2)
    cluster.groups = [group_of(target) for target in halves]
    cluster.run(5.9)
    reports = cluster._reports()
    changing = replace(cluster.groups[1], epoch=2)
    uses = group_uses([cluster.groups[0], changing], reports, cluster.facts)
    cluster.monitor.handle(GroupsSeen(cluster.now_s, uses))
    assert cluster.monitor.split_obstacles(cluster.now_s, {}) == {
        "group-w0": "the last change delays splits for 1 s more",
        "group-w1": "its members report another epoch",
    }


def test_a_group_that_cannot_change_has_a_reason() -> None:
    cluster = Cluster(4)
    cluster.run(1.0)
    changing = {"group-w0": "group-w0 is changing"}
    assert cluster.monitor.split_obstacles(cluster.now_s, changing) == changing
    cluster.facts["w1"] = replace(cluster.facts["w1"], draining=True)
    cluster.executes = False
    cluster.run(0.1)
    assert cluster.monitor.split_obstacles(cluster.now_s, {}) == {"group-w0": ""}


def test_a_manual_partial_split_is_kept_for_a_while() -> None:
    """Demand of halves would allow single workers at once."""
    cluster = Cluster(4)
    cluster.run(0.1)
    change = ManualChange(cluster.now_s, "m", Action.SPLIT, ("group-w0",), (2,))
    (decision,) = cluster.monitor.handle(change)
    assert decision.parts_of == {"group-w0": 2}
    cluster._change(decision, cluster._reports())
    assert cluster.sizes == [2, 2]
    hold_s = cluster.monitor.config.manual_hold_s
    assert cluster.run(hold_s - 1.0) == []
    texts = cluster.monitor.split_obstacles(cluster.now_s, {}).values()
    assert all(text.startswith("a manual change delays splits for") for text in texts)
    (split,) = cluster.run(2.0)
    assert split.action is Action.SPLIT and split.reason.cause is Cause.SUBSIDED


def test_merges_and_partial_splits_of_a_plan_agree() -> None:
    """Halves of a planned merge can merge again without a layer that its member lacks."""
    facts = facts_of([ARENA] * 4)
    alone = [group_of([Stage(name, 0, 8)]) for name in facts]
    (merge,) = merges(alone, facts, {}, 3000)
    (change,) = splits([group_of(merge.targets[0], 2)], facts, {"group-w0": 2})
    assert change.text == "group-w0 splits into 2+2"
    assert sorted(len(target) for target in change.targets) == [2, 2]
    halves = [group_of(target, 3) for target in change.targets]
    (again,) = merges(halves, facts, {}, 1000)
    held = {stage.worker_id: stage for target in change.targets for stage in target}
    for stage in again.targets[0]:
        assert held[stage.worker_id].first_layer <= stage.first_layer
        assert held[stage.worker_id].end_layer >= stage.end_layer
