"""The policy static-pipeline: every worker is merged once, independent of demand."""

import pytest

from services.core.overload.events import (
    Action,
    Cause,
    Decision,
    GroupsSeen,
    GroupUse,
    ManualChange,
    MemberUse,
    OverloadConfig,
    OverloadPolicy,
    ReportStatus,
)
from services.core.overload.monitor import STATIC, OverloadMonitor
from services.core.overload.static_pipelines import RETRY_S

TICK_S = 0.1
CAPACITY = 1000


class World:
    """Groups by id with their workers; time passes in ticks."""

    def __init__(self, *groups: str) -> None:
        """`groups`: the letters of a group are its workers."""
        self.monitor = OverloadMonitor(OverloadConfig(policy=OverloadPolicy.STATIC_PIPELINE))
        self.groups = list(groups)
        self.draining = ""
        self.changing = ""
        self.used = 0
        self.waiting = 0
        self.now_s = 100.0

    def tick(self, seconds: float) -> list[Decision]:
        """Let time pass; returns the decisions."""
        decisions = []
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            decisions += self.monitor.handle(GroupsSeen(self.now_s, self._uses()))
            self.monitor.check_invariants()
        return decisions

    def _uses(self) -> tuple[GroupUse, ...]:
        uses = []
        for name in self.groups:
            members = tuple(MemberUse(w, CAPACITY, self.used, CAPACITY) for w in name)
            use = GroupUse(name, "m", members, self.waiting, 500 * self.waiting)
            if name == self.draining:
                use = GroupUse(name, "m", members, draining=True)
            if name == self.changing:
                use = GroupUse(
                    name, "m", (), report_status=ReportStatus.CHANGING, silent_ids=tuple(name)
                )
            uses.append(use)
        return tuple(uses)


def test_all_single_workers_are_merged_in_pairs_without_demand() -> None:
    world = World("a", "b", "c", "d")
    (decision,) = world.tick(3)
    assert (decision.action, decision.reason.cause) == (Action.MERGE, Cause.START)
    assert decision.group_ids == ("a", "b", "c", "d")
    world.groups = ["ab", "cd"]
    assert world.tick(120) == [], "no split, though demand is low"
    assert set(world.monitor.split_obstacles(world.now_s, {}).values()) == {STATIC}


def test_overload_and_low_demand_change_nothing() -> None:
    world = World("ab", "cd")
    world.used, world.waiting = 990, 5
    assert [decision.action for decision in world.tick(30)] == [Action.EXHAUSTED]
    world.used = world.waiting = 0
    assert world.tick(120) == []


def test_workers_that_come_later_are_merged_among_themselves() -> None:
    world = World("ab", "c")
    assert world.tick(10) == [], "a pair needs two"
    world.groups = ["ab", "c", "d"]
    (decision,) = world.tick(3)
    assert decision.group_ids == ("c", "d")


def test_survivors_of_a_loss_stay_single() -> None:
    world = World("ab", "cd")
    world.tick(5)
    world.groups = ["a", "c", "d"]
    assert world.tick(120) == []
    world.groups = ["a", "b", "c", "d"]
    assert world.tick(120) == [], "the restarted worker has its old id"
    world.groups = ["a", "e", "f", "c", "d"]
    (decision,) = world.tick(3)
    assert decision.group_ids == ("e", "f")


def test_groups_that_are_split_by_hand_stay_single() -> None:
    world = World("ab")
    world.tick(5)
    world.monitor.handle(ManualChange(world.now_s, "m", Action.SPLIT, ("ab",)))
    world.groups = ["a", "b"]
    assert world.tick(120) == []


def test_a_leaving_member_splits_its_group() -> None:
    world = World("ab", "cd")
    world.tick(5)
    world.draining = "ab"
    (decision, *_) = world.tick(3)
    assert (decision.action, decision.reason.cause) == (Action.SPLIT, Cause.DRAINING)
    assert decision.group_ids == ("ab",)


def test_no_decision_is_made_while_a_group_changes() -> None:
    world = World("a", "b")
    world.changing = "b"
    assert world.tick(10) == []
    world.changing = ""
    assert len(world.tick(3)) == 1


def test_a_failed_merge_is_retried_later() -> None:
    world = World("a", "b")
    assert len(world.tick(3)) == 1
    assert world.tick(RETRY_S - 5) == []
    assert len(world.tick(10)) == 1


@pytest.mark.parametrize("policy", [OverloadPolicy.DROP, OverloadPolicy.RECOMPUTE])
def test_other_policies_merge_nothing_at_the_start(policy: OverloadPolicy) -> None:
    world = World("a", "b")
    world.monitor = OverloadMonitor(OverloadConfig(policy=policy))
    assert world.tick(30) == []
