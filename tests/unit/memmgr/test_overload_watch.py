"""Input of the overload monitor, and handling of its decisions."""

import asyncio
import logging
from dataclasses import replace

import pytest

from services.core.demand import ModelDemand
from services.core.groups.layer_map import Stage
from services.core.groups.vocabulary import Group, GroupPhase, Member
from services.core.overload.action_plan import ActionPlan, Change
from services.core.overload.events import (
    Action,
    GroupUse,
    MemberUse,
    OverloadConfig,
    ReportStatus,
)
from services.core.overload.group_use import group_uses
from services.core.overload.monitor import OverloadMonitor
from services.core.overload.worker_facts import WorkerFacts
from services.core.report import EngineReport, Load, MemoryReport
from services.memmgr import overload_watch
from services.memmgr.demand_view import DemandView
from services.memmgr.overload_watch import DECISIONS_MAX, LoggedDecision, OverloadWatch, text_of
from services.memmgr.worker_memory import MemoryView
from tests.support.reports import memory_report
from tests.support.waiting import DEADLINE_S, eventually


def engine(total: int = 10, free: int = 3, epoch: int = 1) -> EngineReport:
    return EngineReport(Load(1, 2, free, 4, kv_blocks_total=total), epoch)


def memory(name: str, free: int) -> MemoryReport:
    return memory_report(name, engine(free=free))


def group(*names: str) -> Group:
    members = tuple(Member(name, "i") for name in names)
    return Group(f"group-{names[0]}", 1, GroupPhase.STABLE, members, "m")


FACTS = {
    name: WorkerFacts(name, "m", 16, 8, 1000, None, ("h",)) for name in ("w0", "w1", "w2", "w3")
}


def test_blocks_become_tokens_of_each_member() -> None:
    reports = {"w0": engine(), "w1": engine(12, 12)}
    members = (MemberUse("w0", 160, 112, 128), MemberUse("w1", 192, 0, 128))
    assert group_uses([group("w0", "w1")], reports, FACTS) == (
        GroupUse("group-w0", "m", members, 4, 2 * 4 * 16, running=1),
    )


def test_single_workers_that_can_send_kv_have_a_layout() -> None:
    facts = {
        name: replace(FACTS[name], can_drop=True, model_digest="weights", build="code")
        for name in ("w0", "w1", "w2", "w3")
    }
    facts["w3"] = replace(facts["w3"], build="")
    reports = dict.fromkeys(facts, engine())
    changing = replace(group("w2"), attempt="a")
    groups = [group("w0"), group("w0", "w1"), changing, group("w3")]
    layouts = [use.kv_layout for use in group_uses(groups, reports, facts)]
    assert layouts == ["weights code 16", "", "", ""]


def test_batch_requests_that_yield_do_not_count_as_running() -> None:
    load = replace(engine().load, running=3, batch_running=2)
    for yields, running in ((True, 1), (False, 3)):
        reports = {"w0": EngineReport(replace(load, batch_yields=yields), 1)}
        (use,) = group_uses([group("w0")], reports, FACTS)
        assert use.running == running


def test_groups_without_current_reports_have_no_numbers() -> None:
    reports = {"w0": engine(), "stranger": engine(), "w2": engine(epoch=2)}
    groups = [group("w0", "w1"), group("stranger"), group("w0"), group("w2")]
    uses = group_uses(groups, reports, FACTS)
    assert [use.report_status for use in uses] == [
        ReportStatus.SILENT,
        ReportStatus.SILENT,
        ReportStatus.CURRENT,
        ReportStatus.CHANGING,
    ]
    assert [len(use.members) for use in uses] == [0, 0, 1, 0]


class Watched:
    """Two full workers and a queue, watched without dwell times."""

    def __init__(self) -> None:
        news = asyncio.Event()
        self.view, self.demand = MemoryView(news), DemandView(news)
        self.acted = list[LoggedDecision]()
        self.short_tokens = 0
        self.busy: dict[str, str] = {}
        self.groups = [group("w0"), group("w1")]
        self.view.set_registered({"w0": "i", "w1": "i"})
        for name in ("w0", "w1"):
            self.view.report(memory(name, free=0))
        config = OverloadConfig(overload_dwell_s=0, report_s=0, settle_s=0)
        self.monitor = OverloadMonitor(config)
        self.watch = OverloadWatch(
            self.monitor,
            self.view,
            self.demand,
            lambda: self.groups,
            lambda: FACTS,
            self.act,
            lambda: self.busy,
            news,
        )

    def act(self, logged: LoggedDecision) -> ActionPlan:
        """A plan that is `short_tokens` short."""
        self.acted.append(logged)
        return ActionPlan((), self.short_tokens)


def test_decisions_are_kept_logged_and_acted_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    watched = Watched()
    with watched.demand.stream() as stream:
        stream.report((ModelDemand("m", 3, 300),))
        watched.watch.evaluate()
        (logged,) = watched.acted
        decision = logged.decision
        assert decision.action is Action.MERGE
        load = decision.reason.load
        assert (load.queued_tokens, load.used_tokens, load.waiting) == (300, 320, 7)
        assert [entry.decision for entry in watched.watch.decisions] == [decision]
        assert text_of(decision) in caplog.text and "queued 300" in caplog.text
        for _ in range(DECISIONS_MAX + 5):
            watched.watch.evaluate()
    assert len(watched.watch.decisions) == DECISIONS_MAX


def test_merged_groups_without_reports_have_a_reason_not_to_split() -> None:
    watched = Watched()
    watched.groups = [group("w0", "w2"), group("w1"), group("w3")]
    watched.watch.evaluate()
    assert watched.watch.split_obstacles == {"group-w0": "there is no recent report from w2"}
    watched.groups = [replace(group("w0", "w1"), epoch=2)]
    watched.watch.evaluate()
    assert watched.watch.split_obstacles == {"group-w0": "its members report another epoch"}
    watched.groups = [group("w0", "w1")]
    watched.busy = {"group-w0": "a change of group-w0 failed, next try in 3.0 s"}
    watched.watch.evaluate()
    assert watched.watch.split_obstacles == watched.busy


def test_impossible_decisions_are_kept_but_not_acted_on() -> None:
    watched = Watched()
    watched.groups = watched.groups[:1]
    for _ in range(3):
        watched.watch.evaluate()
    assert [entry.decision.action for entry in watched.watch.decisions] == [Action.EXHAUSTED]
    assert watched.acted == []


def test_merges_that_gain_too_little_are_a_decision_of_their_own() -> None:
    watched = Watched()
    watched.short_tokens = 40
    for _ in range(3):
        watched.watch.evaluate()
    decisions = [
        (entry.decision.action, entry.decision.needed_tokens) for entry in watched.watch.decisions
    ]
    assert decisions[1] == (Action.EXHAUSTED, 40) and decisions.count(decisions[1]) == 1
    assert all(entry.decision.action is Action.MERGE for entry in watched.acted)
    assert watched.watch.shortfalls == {"m": watched.acted[0].decision.needed_tokens}


def test_manual_changes_are_recorded() -> None:
    watched = Watched()
    for name in ("w0", "w1"):
        watched.view.report(memory(name, free=10))
    watched.watch.evaluate()
    names = ("group-w0", "group-w1")
    logged = watched.watch.note_manual_change("m", Action.MERGE, Change(names, (), ""))
    assert logged is not None and list(watched.watch.decisions) == [logged]
    assert "merge group-w0, group-w1 (manual)" in text_of(logged.decision)
    assert watched.watch.note_manual_change("other", Action.MERGE, Change((), (), "")) is None
    w0, w1, w2 = (Stage(f"w{number}", 0, 1) for number in range(3))
    for targets, text in (((w0, w1), (w2,)), "group-w0 into 2"), (((w0,), (w1,)), "group-w0"):
        change = Change(("group-w0",), targets, "")
        logged = watched.watch.note_manual_change("m", Action.SPLIT, change)
        assert logged is not None and f"split {text} (manual)" in text_of(logged.decision)
    assert watched.acted == []


def test_the_outcome_of_many_changes_is_short() -> None:
    watched = Watched()
    watched.watch.evaluate()
    (logged,) = watched.acted
    assert logged.outcome == ""
    for number in range(5):
        logged.note(f"g{number}", "preparing")
        logged.note(f"g{number}", f"g{number} stable")
    assert logged.outcome == "g0 stable; g1 stable; g2 stable; and 2 more"


async def test_a_calm_cluster_is_evaluated_seldom_and_a_report_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overload_watch, "PAUSE_S", 0.001)
    monkeypatch.setattr(overload_watch, "ALERT_S", 0.002)
    monkeypatch.setattr(overload_watch, "CALM_S", 10 * DEADLINE_S)
    watched, looks = Watched(), list[bool]()
    idle = EngineReport(Load(0, 0, 10, 0, kv_blocks_total=10), 1)
    for name in ("w0", "w1"):
        watched.view.report(memory_report(name, idle))
    evaluate = watched.watch.evaluate

    def noted() -> None:
        evaluate()
        looks.append(watched.monitor.is_alert)

    monkeypatch.setattr(watched.watch, "evaluate", noted)
    running = asyncio.create_task(watched.watch.run())
    await eventually(lambda: len(looks) == 1)
    await asyncio.sleep(0.05)
    assert looks == [False], "nothing was reported"
    moved = replace(idle, load=replace(idle.load, kv_blocks_free=9))
    watched.view.report(memory_report("w0", moved))
    await asyncio.sleep(0.05)
    assert looks == [False], "what was reported decides nothing"
    watched.view.report(memory_report("w0", replace(idle, load=replace(idle.load, running=1))))
    await eventually(lambda: looks == [False, False])
    watched.view.report(memory("w0", free=0))
    watched.view.report(memory("w1", free=0))
    changed = watched.watch.shortfalls_changed
    watched.short_tokens = 40
    with watched.demand.stream() as stream:
        stream.report((ModelDemand("m", 3, 300),))
        await eventually(lambda: looks[-1])
        seen = len(looks)
        await eventually(lambda: len(looks) > seen + 3)  # an overload: it may be time to decide
    await eventually(changed.is_set)
    assert not watched.watch.shortfalls_changed.is_set()
    running.cancel()
