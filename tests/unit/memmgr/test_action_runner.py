"""Execution of decisions: plans, changes of groups, back-off after failures."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from services.core.groups.coordinator import ChangePhase, ChangeStepped
from services.core.groups.layer_map import ModelShape, Stage
from services.core.groups.vocabulary import Group, GroupPhase, Member, Targets
from services.core.overload.action_plan import ActionPlan, NoPlan, merges, merges_of_full, splits
from services.core.overload.actions import ActionState
from services.core.overload.events import Action, Cause, Decision, DecisionReason, ModelLoad
from services.core.overload.worker_facts import WorkerFacts
from services.core.report import EngineReport, Load
from services.memmgr.action_runner import ActionRunner
from services.memmgr.change_trace import ChangeCause
from services.memmgr.overload_watch import LoggedDecision
from services.memmgr.worker_memory import MemoryView

SHAPE = ModelShape(4, 1000, 0, 0, False, 5)
ARENA = 4 * 1000 + 100 * 16 * 4 * 5
FACTS = {
    f"w{n}": WorkerFacts(f"w{n}", "m", 16, 100, ARENA, SHAPE, ("rack", f"h{n // 2}"), True)
    for n in range(4)
}


def single_group(name: str) -> Group:
    return Group(f"group-{name}", 1, GroupPhase.STABLE, (Member(name, "i", 0, 4),), "m")


def merged(*names: str) -> Group:
    members = tuple(Member(name, "i", 2 * n, 2 * n + 2) for n, name in enumerate(names))
    return Group(f"group-{names[0]}", 2, GroupPhase.STABLE, members, "m")


def engine(free: int) -> EngineReport:
    return EngineReport(Load(1, 0, free, 0, kv_blocks_total=100))


def logged(action: Action, *group_ids: str, needed_tokens: int = 100) -> LoggedDecision:
    reason = DecisionReason(Cause.OVERLOAD, 0, 0.0, 0.0, ModelLoad(0, 0, 0, 0, 0, 0, 0, 0, 0))
    return LoggedDecision(0, Decision(0.0, "m", action, reason, needed_tokens, group_ids))


def test_only_needed_groups_merge_nearest_first() -> None:
    groups = [single_group(name) for name in ("w0", "w2", "w1", "w3")]
    used = {name: engine(90) for name in FACTS} | {"w0": engine(0)}
    (change,) = merges(groups, FACTS, used, needed_tokens=100)
    assert change.group_ids == ("group-w2", "group-w3")
    assert change.targets == ((Stage("w2", 0, 2), Stage("w3", 2, 4)),)
    assert "for 3400 instead of 3200 tokens" in change.text
    both = merges(groups, FACTS, used, needed_tokens=300)
    assert {change.group_ids for change in both} == {
        ("group-w0", "group-w1"),
        ("group-w2", "group-w3"),
    }
    assert not any("all that can merge" in change.text for change in both)


def test_insufficient_gain_of_all_merges_is_reported() -> None:
    (change,) = merges([single_group("w0"), single_group("w1")], FACTS, {}, needed_tokens=1000)
    assert change.text.endswith("; all possible merges gain 200 of 1000 tokens")


def test_a_flapping_worker_is_not_merged_until_it_stays() -> None:
    state = ActionState(backoff_s=1.0, backoff_max_s=1.0)
    everybody = dict.fromkeys(FACTS, "i")
    for number in range(3):
        state.note_workers(everybody, 10.0 * number)
        state.note_workers(everybody | {"w1": f"i{number}"}, 10.0 * number + 5)
    groups = [single_group("w0"), single_group("w1"), single_group("w2")]

    def merged_by(decision: Decision, now_s: float) -> set[str]:
        plan = state.begin(decision, groups, FACTS, {}, now_s)
        for change in plan.changes:
            state.ended(change, True, now_s)
        return {name for change in plan.changes for name in change.group_ids}

    merge = logged(Action.MERGE).decision
    assert merged_by(merge, 30.0) == {"group-w0", "group-w2"}, "near ones else: w0 and w1"
    full = logged(Action.MERGE, "group-w0").decision
    assert merged_by(full, 30.0) == {"group-w0", "group-w2"}
    groups = groups[:2]
    plan = state.begin(merge, groups, FACTS, {}, 31.0)
    assert plan.changes == () and "steady workers" in plan.reason
    rule = "w1 left 3 times within 300 s and does not merge for another 114 s"
    assert plan.reason.endswith("; 1 could merge now; " + rule)
    assert plan.short_tokens == 100, "a shortfall, as far as can be"
    again = state.begin(merge, groups, FACTS, {}, 31.5)
    assert again.reason == plan.reason + "; next try in 0.5 s", "the rule stays visible"
    pair = [merged("w0", "w1")]
    split = logged(Action.SPLIT, "group-w0").decision
    (change,) = state.begin(split, pair, FACTS, {}, 32.0).changes
    state.ended(change, True, 32.0)
    assert merged_by(merge, 200.0) == {"group-w0", "group-w1"}


def poll_workers(state: ActionState, names: Iterable[str], first_s: float, last_s: float) -> None:
    """Poll reporting workers twice a second."""
    for half in range(int(2 * first_s), int(2 * last_s)):
        state.note_workers(dict.fromkeys(names, "i"), half / 2)


def merged_at(state: ActionState, now_s: float) -> set[str]:
    groups = [single_group(name) for name in FACTS]
    plan = state.begin(logged(Action.MERGE).decision, groups, FACTS, {}, now_s)
    return {name for change in plan.changes for name in change.group_ids}


def test_a_worker_that_falls_silent_often_is_not_merged() -> None:
    state = ActionState(backoff_s=1.0, backoff_max_s=1.0)
    for minute in range(3):
        poll_workers(state, FACTS, 60.0 * minute, 60.0 * minute + 50)
        poll_workers(state, FACTS.keys() - {"w1"}, 60.0 * minute + 50, 60.0 * minute + 60)
    assert "group-w1" not in merged_at(state, 180.0)


def test_a_stall_of_the_memory_manager_does_not_count_as_leaving() -> None:
    """The first polls after it find no reports, then some."""
    state = ActionState(backoff_s=1.0, backoff_max_s=1.0)
    for minute in range(4):
        poll_workers(state, FACTS, 60.0 * minute, 60.0 * minute + 50)
        poll_workers(state, (), 60.0 * minute + 54, 60.0 * minute + 55)
        poll_workers(state, ("w0", "w1"), 60.0 * minute + 55, 60.0 * minute + 56)
        poll_workers(state, FACTS, 60.0 * minute + 56, 60.0 * minute + 60)
    assert merged_at(state, 240.0) == {"group-w0", "group-w1"}


def test_a_refusal_names_the_rules_of_a_few_groups_and_counts_the_others() -> None:
    groups = [replace(single_group(name), attempt="7-1") for name in FACTS]
    plan = ActionState(1.0, 1.0).begin(logged(Action.MERGE).decision, groups, {}, {}, 0.0)
    assert plan.reason.endswith("group-w2 is changing; and 1 more")
    plan = ActionState(1.0, 1.0).begin(
        logged(Action.MERGE).decision, [single_group("w0")], {}, {}, 0.0
    )
    assert plan.reason.endswith("; w0 is not registered")


def test_workers_that_are_silent_all_at_once_have_not_left() -> None:
    state = ActionState(backoff_s=1.0, backoff_max_s=1.0)
    for minute in range(4):
        poll_workers(state, FACTS, 60.0 * minute, 60.0 * minute + 50)
        poll_workers(state, (), 60.0 * minute + 50, 60.0 * minute + 60)
    assert merged_at(state, 240.0) == {"group-w0", "group-w1"}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"can_drop": False}, "cannot drop layers"),
        ({"shape": None}, "cannot drop layers"),
        ({"draining": True}, "is shutting down"),
    ],
)
def test_workers_that_cannot_drop_are_left_out(changes: dict[str, Any], rule: str) -> None:
    facts = FACTS | {"w1": replace(FACTS["w1"], **changes)}
    with pytest.raises(NoPlan, match="; 1 could merge now"):
        merges([single_group("w0"), single_group("w1")], facts, {}, 100)
    merge = logged(Action.MERGE).decision
    reason = (
        ActionState(1.0, 1.0)
        .begin(merge, [single_group("w0"), single_group("w1")], facts, {}, 0.0)
        .reason
    )
    assert reason.endswith("could merge now; w1 " + rule)
    (change,) = merges([single_group("w0"), single_group("w1"), single_group("w2")], facts, {}, 100)
    assert change.group_ids == ("group-w0", "group-w2")


@pytest.mark.parametrize(
    "changes",
    [{"model_digest": "another"}, {"build": "2:another"}, {"settings": "block_size 32"}],
)
def test_workers_with_other_weights_or_code_do_not_merge(changes: dict[str, Any]) -> None:
    facts = FACTS | {"w1": replace(FACTS["w1"], **changes)}
    (change,) = merges([single_group("w0"), single_group("w1"), single_group("w2")], facts, {}, 1)
    assert change.group_ids == ("group-w0", "group-w2")
    with pytest.raises(NoPlan, match="no merge of 2 groups gains memory"):
        merges([single_group("w0"), single_group("w1")], facts, {}, 1)


def test_different_weights_of_one_name_merge_by_their_own_shape() -> None:
    """A first release of a model with four layers, and its next release with eight."""
    eight = ModelShape(8, 1000, 0, 0, False, 5)
    later = {
        f"x{n}": WorkerFacts(
            f"x{n}", "m", 16, 100, 8 * 1000 + 100 * 16 * 8 * 5, eight, (), True, model_digest="b"
        )
        for n in range(2)
    }
    groups = [
        Group(f"group-{name}", 1, GroupPhase.STABLE, (Member(name, "i", 0, 8),), "m")
        for name in later
    ]
    (first,) = merges(
        [*groups, single_group("w0"), single_group("w1"), single_group("w2")],
        FACTS | later,
        {},
        100,
    )
    assert {stage.end_layer for stage in first.targets[0]} <= {1, 2, 3, 4}
    both = merges([*groups, single_group("w0"), single_group("w1")], FACTS | later, {}, 1000)
    assert sorted(change.targets[0][-1].end_layer for change in both) == [4, 8]
    assert sum(change.gain_tokens for change in both) == 400


def test_a_full_group_merges_with_one_that_has_room() -> None:
    """Near groups first, then the emptiest; no other groups merge for it."""
    groups = [single_group(name) for name in FACTS]
    used = {"w0": engine(0), "w2": engine(20), "w3": engine(90)}
    (change,) = merges_of_full(groups, ("group-w0",), FACTS, used)
    assert set(change.group_ids) == {"group-w0", "group-w1"}
    (change,) = merges_of_full([groups[0], *groups[2:]], ("group-w0",), FACTS, used)
    assert set(change.group_ids) == {"group-w0", "group-w3"}
    both = merges_of_full(groups, ("group-w0", "group-w1"), FACTS, used)
    assert [len({"group-w0", "group-w1"} & set(change.group_ids)) for change in both] == [1, 1]
    # A short pipeline slows serving less than a long one, near or far.
    near = {name: replace(FACTS[name], location=("rack", "h0")) for name in ("w1", "w2")}
    mixed = [groups[0], merged("w1", "w2"), groups[3]]
    (change,) = merges_of_full(mixed, ("group-w0",), FACTS | near, {"w3": engine(50)})
    assert set(change.group_ids) == {"group-w0", "group-w3"}
    # During a rolling update the worker is the only one of its release.
    facts = FACTS | {"w0": replace(FACTS["w0"], build="1:old")}
    with pytest.raises(NoPlan, match="no group with free memory"):
        merges_of_full(groups, ("group-w0",), facts, used)
    decision = logged(Action.MERGE, "group-w0").decision
    plan = ActionState(1.0, 1.0).begin(decision, groups, facts, used, 0.0)
    assert plan.changes == () and "no group with free memory" in plan.reason


def test_the_policy_static_pipeline_merges_single_workers_in_pairs() -> None:
    state, groups = ActionState(1.0, 1.0), [single_group(name) for name in FACTS]
    decision = logged(Action.MERGE, *(group.group_id for group in groups)).decision
    decision = replace(
        decision, reason=replace(decision.reason, cause=Cause.START), needed_tokens=0
    )
    plan = state.begin(decision, groups, FACTS, {}, 0.0)
    assert plan.short_tokens is None
    assert {change.group_ids for change in plan.changes} == {
        ("group-w0", "group-w1"),
        ("group-w2", "group-w3"),
    }
    assert all(len(change.targets) == 1 for change in plan.changes)
    # Only the groups of the decision merge, and of three workers two.
    fewer = replace(decision, group_ids=decision.group_ids[:3])
    assert len(ActionState(1.0, 1.0).begin(fewer, groups, FACTS, {}, 0.0).changes) == 1
    facts = {name: replace(fact, can_drop=False) for name, fact in FACTS.items()}
    plan = ActionState(1.0, 1.0).begin(decision, groups, facts, {}, 0.0)
    assert plan.changes == () and "no two of 0 single workers" in plan.reason


def test_tokens_freed_by_running_merges_are_not_requested_again() -> None:
    state = ActionState(1.0, 1.0)
    groups = [single_group(name) for name in FACTS]

    def begin(needed_tokens: int) -> ActionPlan:
        decision = logged(Action.MERGE, needed_tokens=needed_tokens).decision
        return state.begin(decision, groups, FACTS, {}, 0.0)

    (first,) = begin(150).changes
    assert first.gain_tokens == 200
    assert begin(200) == ActionPlan((), 0, "merges in progress gain 200 of 200 tokens")
    (second,) = begin(300).changes
    assert not set(first.group_ids) & set(second.group_ids)
    assert "all that can merge" not in second.text
    state.ended(first, is_stable=True, now_s=0.0)
    state.ended(second, is_stable=True, now_s=0.0)
    both = begin(300).changes
    assert len(both) == 2
    for change in both:
        state.ended(change, is_stable=True, now_s=0.0)
    (all_four,) = begin(700).changes
    assert all_four.gain_tokens == 600
    assert begin(700).short_tokens == 100


def test_a_group_splits_into_its_members() -> None:
    (change,) = splits([single_group("w2"), merged("w0", "w1")], FACTS, {})
    assert change.targets == ((Stage("w0", 0, 4),), (Stage("w1", 0, 4),))
    with pytest.raises(NoPlan):
        splits([single_group("w2")], FACTS, {})


class FakeDriver:
    """Changes groups at once, or as set by the test."""

    def __init__(self) -> None:
        self.leads = True
        self.stable_groups: tuple[Group, ...] = (single_group("w0"), single_group("w1"))
        self.facts = dict(FACTS)
        self.asked: list[Targets] = []
        self.ending = ChangeStepped("c", ChangePhase.STABLE, "all members serve epoch 2", 2)
        self.go = asyncio.Event()
        self.go.set()
        self.called_off: list[Targets] = []

    async def reconfigure(
        self, targets: Targets, cause: ChangeCause
    ) -> AsyncIterator[ChangeStepped]:
        self.asked.append(targets)
        yield ChangeStepped("c", ChangePhase.PREPARING, "they get ready")
        await self.go.wait()
        yield self.ending

    def call_off(self, targets: Targets, reason: str) -> None:
        self.called_off.append(targets)
        self.ending = ChangeStepped("c", ChangePhase.FAILED, reason)
        self.go.set()


class Bench:
    def __init__(self, pause_s: float) -> None:
        self.driver = FakeDriver()
        self.actor = ActionRunner(self.driver, MemoryView(asyncio.Event()), pause_s, pause_s)

    async def act(self, action: Action, *group_ids: str) -> str:
        """Run a decision; returns its state a moment later."""
        entry = logged(action, *group_ids)
        self.actor.act(entry)
        for _ in range(10):
            await asyncio.sleep(0)
        return entry.outcome


@asynccontextmanager
async def bench(pause_s: float = 100.0) -> AsyncIterator[Bench]:
    made = Bench(pause_s)
    task = asyncio.create_task(made.actor.run())
    await asyncio.sleep(0)
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_the_outcome_of_a_merge_is_recorded() -> None:
    async with bench() as case:
        outcome = await case.act(Action.MERGE)
        assert case.driver.asked == [((Stage("w0", 0, 2), Stage("w1", 2, 4)),)]
        assert outcome.startswith("group-w0, group-w1 merge (w0: 2 + w1: 2 layers)")
        assert outcome.endswith("stable, all members serve epoch 2")


async def test_the_outcome_of_a_restore_is_recorded() -> None:
    async with bench() as case:
        case.driver.stable_groups = (merged("w0", "w1"), merged("w2", "w3"))
        await case.act(Action.SPLIT, "group-w2", "group-gone")
        assert case.driver.asked == [((Stage("w2", 0, 4),), (Stage("w3", 0, 4),))]


async def test_a_cancelled_restore_causes_no_back_off() -> None:
    async with bench() as case:
        case.driver.stable_groups = (merged("w0", "w1"), merged("w2", "w3"))
        case.driver.go.clear()
        await case.act(Action.SPLIT, "group-w0")
        await case.act(Action.CALL_OFF, "group-w2")
        assert case.driver.called_off == []
        outcome = await case.act(Action.CALL_OFF, "group-w0")
        assert case.driver.called_off == case.driver.asked
        assert outcome.endswith("called off: load has returned")
        await case.act(Action.CALL_OFF, "group-w0")
        assert len(case.driver.called_off) == 1
        await case.act(Action.SPLIT, "group-w0")
        assert len(case.driver.asked) == 2


async def test_changing_groups_are_not_changed_again() -> None:
    async with bench(pause_s=0.0) as case:
        case.driver.go.clear()
        await case.act(Action.MERGE)
        assert "merges in progress gain 200 of 100 tokens" in await case.act(Action.MERGE)
        case.driver.go.set()
        await asyncio.sleep(0.01)
        await case.act(Action.MERGE)
        marked = tuple(replace(group, attempt="7-1") for group in case.driver.stable_groups)
        case.driver.stable_groups = marked
        refused = await case.act(Action.MERGE)
        assert "; 0 could merge now; group-w0 is changing; group-w1 is changing" in refused
        assert len(case.driver.asked) == 2


async def test_a_failure_causes_a_back_off() -> None:
    async with bench() as case:
        case.driver.ending = ChangeStepped("c", ChangePhase.FAILED, "w1 refused: no room")
        assert (await case.act(Action.MERGE)).endswith("failed, w1 refused: no room")
        refused = await case.act(Action.MERGE)
        assert "; 0 could merge now; a change of group-w0 failed, next try in" in refused
        assert "next try in" in await case.act(Action.MERGE)
        assert len(case.driver.asked) == 1


async def test_a_failed_split_reports_the_end_of_its_back_off() -> None:
    async with bench() as case:
        case.driver.stable_groups = (merged("w0", "w1"), merged("w2", "w3"))
        case.driver.ending = ChangeStepped("c", ChangePhase.FAILED, "w1 refused: no room")
        assert case.actor.busy == {}
        await case.act(Action.SPLIT, "group-w0")
        (reason,) = case.actor.busy.values()
        assert reason.startswith("a change of group-w0 failed, next try in ")


async def test_a_split_does_not_wait_because_there_was_no_merge() -> None:
    async with bench() as case:
        case.driver.stable_groups = (merged("w0", "w1"),)
        assert "; 1 could merge now" in await case.act(Action.MERGE)
        await case.act(Action.SPLIT, "group-w0")
        assert len(case.driver.asked) == 1


async def test_an_impossible_split_does_not_delay_merges() -> None:
    async with bench() as case:
        assert "is in progress" in await case.act(Action.SPLIT, "group-gone")
        await case.act(Action.MERGE)
        assert len(case.driver.asked) == 1


async def test_only_the_leader_acts() -> None:
    async with bench() as case:
        case.driver.leads = False
        assert await case.act(Action.MERGE) == "another memory manager leads"
        assert case.driver.asked == []
