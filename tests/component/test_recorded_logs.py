"""Logs recorded before requests had classes replay to identical decisions under fcfs.

`recorded` has what scheduler, memory manager and workers of a cluster wrote at commit 524d41ce in
`test_logs_of_a_cluster_that_changes_groups_replay`: a flood of which some requests were
preempted, prompts that begin alike, and three merges and splits under load. Their version is
today's. The scheduler's settings are those that turn later mechanisms off; the rest of what has
come since is a field with a default. They do not name the scheduling policy, which was fcfs.
"""

import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.event_log import read_config, read_entries
from services.core.changeover.frames import Adopt
from services.core.changeover.state import Changeover, MemberConfig
from services.core.groups.coordinator import CoordinatorConfig, CoordinatorState
from services.core.planner.sequence import SequenceState
from services.core.queue_order import Scheduling
from services.core.scheduler.class_rules import ClassRules
from services.core.scheduler.state_config import StateConfig
from tideserve.sim.replay import MEMMGR_TYPES, SCHEDULER_TYPES, WORKER_TYPES, Replayed, replay

RECORDED = Path(__file__).with_name("recorded")
WORKERS = 2


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A folder with the extracted logs."""
    for packed in RECORDED.glob("*.jsonl.xz"):
        (tmp_path / packed.stem).write_bytes(lzma.decompress(packed.read_bytes()))
    return tmp_path


def test_logs_of_the_scheduler_and_the_memory_manager_replay(logs: Path) -> None:
    (path,) = logs.glob("scheduler-*")
    config = read_config(path, StateConfig)
    state = replace(config, rules=ClassRules(Scheduling.FCFS)).state()
    assert replay(state, read_entries(path, SCHEDULER_TYPES)) == Replayed(2731, 164)
    (path,) = logs.glob("memmgr-*")
    groups = CoordinatorState(read_config(path, CoordinatorConfig))
    assert replay(groups, read_entries(path, MEMMGR_TYPES)) == Replayed(103, 60)


def test_logs_of_the_workers_replay(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`reached` is newer: it counts tokens that ran for the first time, for a metric."""
    whole = SequenceState.__eq__
    monkeypatch.setattr(
        SequenceState,
        "__eq__",
        lambda first, other: whole(replace(first, reached=0), replace(other, reached=0)),
    )
    paths = sorted(logs.glob("worker-*"))
    assert len(paths) == WORKERS
    for path in paths:
        config = read_config(path, MemberConfig)
        config = replace(config, planner=replace(config.planner, scheduling=Scheduling.FCFS))
        entries = list(read_entries(path, WORKER_TYPES))
        assert any(isinstance(getattr(entry.value, "frame", None), Adopt) for entry in entries)
        state = Changeover.of(config)
        replayed = replay(state, entries)
        assert replayed.difference == ""
        assert replayed.decisions > 3000
        assert state.planner.preemptions_total > 0
        assert not state.planner.sequences
