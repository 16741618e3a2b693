"""Metrics of a memory manager as leader and as standby."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from services.core.groups.coordinator import ChangePhase
from services.core.groups.vocabulary import Group, GroupPhase, Member
from services.core.overload.events import Action, Cause
from services.core.report import EngineReport, Load
from services.memmgr.change_count import ChangeCount
from services.memmgr.metrics import MemmgrCollector, usable_blocks
from services.memmgr.worker_memory import MemoryView
from tests.support.exposition import Samples, collected, value
from tests.support.reports import memory_report


def group(*names: str, phase: GroupPhase = GroupPhase.STABLE) -> Group:
    return Group(f"g-{names[0]}", 1, phase, tuple(Member(name, "i") for name in names), "m")


def memory() -> MemoryView:
    view = MemoryView(asyncio.Event())
    view.set_registered({"a": "i", "b": "i", "c": "i"})
    for name, blocks in (("a", 10), ("b", 7), ("c", 5)):
        load = Load(1, 0, 4, 0, kv_blocks_total=blocks)
        view.report(memory_report(name, EngineReport(load)))
    return view


def exported(leads: bool, changes: ChangeCount | None = None) -> Samples:
    groups = (group("a", "b"), group("c"), group("d", phase=GroupPhase.DEGRADED))
    driver = SimpleNamespace(leads=leads, groups=groups, changes=changes or ChangeCount())
    watch = SimpleNamespace(
        decided=Counter({Action.MERGE: 3}),
        moved=Counter({Cause.FULL: 2}),
        shortfalls={"m": 70},
        rising={"m": True},
    )
    return collected(MemmgrCollector(cast(Any, driver), memory(), cast(Any, watch)))


def test_the_leader_exports_cluster_metrics() -> None:
    samples = exported(leads=True)
    assert value(samples, "tideserve_memmgr_leader") == 1
    assert value(samples, "tideserve_memmgr_groups", phase="stable") == 2
    assert value(samples, "tideserve_memmgr_groups", phase="degraded") == 1
    assert value(samples, "tideserve_memmgr_merged_groups") == 1
    assert value(samples, "tideserve_memmgr_serving_workers", model_name="m") == 3
    assert value(samples, "tideserve_memmgr_usable_kv_blocks", model_name="m") == 7 + 5
    assert value(samples, "tideserve_memmgr_relief_exhausted", model_name="m") == 1
    assert value(samples, "tideserve_memmgr_kv_shortfall_tokens", model_name="m") == 70
    assert value(samples, "tideserve_memmgr_demand_rising", model_name="m") == 1
    assert value(samples, "tideserve_memmgr_decisions_total", action="merge") == 3
    assert value(samples, "tideserve_memmgr_decisions_total", action="exhausted") == 0
    assert value(samples, "tideserve_memmgr_moved_requests_total", cause="full group") == 2
    assert value(samples, "tideserve_memmgr_moved_requests_total", cause="draining") == 0


def test_a_standby_exports_only_its_own_metrics() -> None:
    samples = exported(leads=False)
    assert value(samples, "tideserve_memmgr_leader") == 0
    cluster = (
        "_groups",
        "_serving_workers",
        "_usable_kv_blocks",
        "_relief_exhausted",
        "_demand_rising",
        "_shortfall_tokens",
    )
    assert [name for name, _ in samples if name.endswith(cluster)] == []


def test_worker_metrics_are_not_exported() -> None:
    assert [name for name, labels in exported(leads=True) if "worker" in dict(labels)] == []


def test_changes_are_counted_by_outcome() -> None:
    changes = ChangeCount()
    for phase, elapsed_s in (
        (ChangePhase.PREPARING, 0.0),
        (ChangePhase.COMMITTED, 0.2),
        (ChangePhase.STABLE, 0.4),
        (ChangePhase.FAILED, 200.0),
    ):
        changes.note(phase, elapsed_s)
    samples = exported(leads=True, changes=changes)
    name = "tideserve_memmgr_change_duration_seconds"
    assert value(samples, "tideserve_memmgr_changes_total", result="stable") == 1
    assert value(samples, "tideserve_memmgr_changes_total", result="failed") == 1
    assert value(samples, f"{name}_count") == 1
    assert value(samples, f"{name}_sum") == 0.4
    assert value(samples, f"{name}_bucket", le="0.25") == 0
    assert value(samples, f"{name}_bucket", le="0.5") == 1


def test_a_group_has_the_blocks_of_its_smallest_member() -> None:
    workers = memory().workers()
    assert usable_blocks((group("a", "b"), group("c")), workers) == {"m": 7 + 5}
    # One that has not reported holds nothing; a group that ends has no members.
    assert usable_blocks((group("a", "unknown"),), workers) == {"m": 0}
    assert usable_blocks((), workers) == {}
