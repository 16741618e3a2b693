"""Batch work that yields its KV neither triggers merges nor delays splits."""

from services.core.groups.vocabulary import Group, GroupPhase, Member
from services.core.overload.events import Action, GroupsSeen
from services.core.overload.group_use import group_uses
from services.core.overload.monitor import OverloadMonitor
from services.core.overload.worker_facts import WorkerFacts
from services.core.report import EngineReport, Load

UNMERGED, MERGED = 100, 180
FACTS = {name: WorkerFacts(name, "m", 16, UNMERGED, 1000, None, ("h",)) for name in ("w0", "w1")}
APART = (("w0",), ("w1",))
TOGETHER = (("w0", "w1"),)


def full_of_batch(online: int, yields: bool, total: int) -> EngineReport:
    """All blocks are in use, `online` of them by online requests; batch requests wait."""
    load = Load(
        running=10,
        waiting=5,
        kv_blocks_free=0,
        kv_blocks_wanted=0 if yields else 50,
        kv_blocks_total=total,
        batch_running=9,
        batch_waiting=5,
        kv_blocks_batch=total - online,
        batch_yields=yields,
    )
    return EngineReport(load, 1)


def decisions(
    layout: tuple[tuple[str, ...], ...], online: int, yields: bool, seconds: int = 60
) -> list[Action]:
    """The decisions in a minute of constant load; the first decision ends it."""
    groups = [
        Group(f"g-{names[0]}", 1, GroupPhase.STABLE, tuple(Member(n, "i") for n in names), "m")
        for names in layout
    ]
    total = MERGED if len(layout) == 1 else UNMERGED
    leader = full_of_batch(online, yields, total)
    # A member that does not lead knows nothing of classes.
    follower = EngineReport(Load(0, 0, 0, 0, kv_blocks_total=total), 1)
    reports = {names[0]: leader for names in layout} | {n: follower for n in layout[0][1:]}
    monitor = OverloadMonitor()
    for tick in range(10 * seconds):
        uses = group_uses(groups, reports, FACTS)
        if batch := monitor.handle(GroupsSeen(100.0 + tick / 10, uses)):
            return [decision.action for decision in batch]
    return []


def test_batch_work_alone_never_triggers_a_merge() -> None:
    assert decisions(APART, online=10, yields=True) == []
    assert decisions(APART, online=10, yields=False) == [Action.MERGE]


def test_batch_work_never_prevents_a_split() -> None:
    assert decisions(TOGETHER, online=20, yields=True) == [Action.SPLIT]
    assert decisions(TOGETHER, online=20, yields=False) != [Action.SPLIT]


def test_online_kv_decides_whether_a_group_can_split() -> None:
    assert Action.SPLIT not in decisions(TOGETHER, online=UNMERGED + 1, yields=True)


def test_batch_kv_that_comes_and_goes_between_two_reports_is_no_demand() -> None:
    """The leader has freed the blocks of an ended batch request, the other stage not yet."""
    group = Group("g-w0", 1, GroupPhase.STABLE, (Member("w0", "i"), Member("w1", "i")), "m")
    monitor = OverloadMonitor()
    decided: list[Action] = []
    for tick in range(100):
        batch = 100 if tick % 10 else 20
        load = Load(
            running=8,
            waiting=0,
            kv_blocks_free=MERGED - 30 - batch,
            kv_blocks_wanted=0,
            kv_blocks_total=MERGED,
            kv_blocks_batch=batch,
            batch_yields=True,
        )
        lagging = Load(1, 0, MERGED - 130, 0, kv_blocks_total=MERGED)
        reports = {"w0": EngineReport(load, 1), "w1": EngineReport(lagging, 1)}
        (use,) = group_uses([group], reports, FACTS)
        assert use.used_tokens == 30 * 16
        decisions = monitor.handle(GroupsSeen(100.0 + tick / 10, (use,)))
        decided += [decision.action for decision in decisions]
    assert decided[:1] == [Action.SPLIT]
