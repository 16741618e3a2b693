"""Event logs of real services replay to identical decisions."""

import asyncio
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.audit_logs import audit_logs
from benchmarks.faults.load import Shape
from benchmarks.scenarios.churn import churn, judge
from services.common.event_log import EventLog, EventLogError, read_config, read_entries
from services.core.audit.record import COMMAND, EVENT
from services.core.changeover.state import Changeover, MemberConfig
from services.core.planner.events import EmitToken
from services.core.scheduler.dispatch import PREFIX
from services.core.scheduler.state import SchedulerState
from services.core.scheduler.state_config import StateConfig
from services.core.scheduler.vocabulary import Asked, SendAssignment, SendTicket, Ticked
from tests.support.client import gather_bounded, numbered_completion
from tests.support.cluster import Cluster
from tests.support.exhausted import no_room_for_files
from tests.support.tiny_models import make_tiny_model
from tideserve.sim.replay import SCHEDULER_TYPES, WORKER_TYPES, replay

REQUESTS = 24
CYCLES = 3
SHAPE = Shape(concurrency=4, prompt_tokens=(4, 40), output_tokens=(4, 40), token_ids=(3, 250))


def worker_state(path: Path) -> Changeover:
    return Changeover.of(read_config(path, MemberConfig))


def test_a_log_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    path.write_text('{"version": 1, "name": "worker", "config": {}}\n')
    with pytest.raises(EventLogError, match="unsupported version"):
        read_config(path, MemberConfig)


async def flood(cluster: Cluster) -> None:
    """Send requests that overflow the workers' KV cache, so that some are preempted."""

    def job(number: int) -> Callable:
        return lambda: numbered_completion(cluster.url, number, prompt_tokens=24, max_tokens=160)

    await gather_bounded([job(number) for number in range(REQUESTS)], REQUESTS)


async def repeat(cluster: Cluster) -> None:
    """Send the same long prompt repeatedly."""
    for _ in range(4):
        await numbered_completion(cluster.url, 0, prompt_tokens=300, max_tokens=4)


@pytest.mark.cluster
async def test_logs_of_a_cluster_that_changes_groups_replay(tmp_path: Path) -> None:
    """As `tideserve bench churn` after a flood: the logs replay, and I1-I11 hold."""
    folder = tmp_path / "events"
    model_dir = make_tiny_model(tmp_path / "model", seed=3)
    log = {"event_log": str(folder)}
    with Cluster(
        model_dir=model_dir,
        memory="14MiB",
        dtype="float64",
        chunk_size="64KiB",
        overload_policy="recompute",  # no automatic changes of groups
        **dict.fromkeys(("gateway", "memmgr", "worker"), log),
        # No queueing deadline.
        scheduler=log | {"dispatch": PREFIX, "standard_wait_s": 0.0},
    ) as cluster:
        await flood(cluster)
        await repeat(cluster)
        done, tally = await asyncio.to_thread(
            churn, cluster.url, cluster.admin_url, "model", CYCLES, SHAPE, lambda line: None
        )
        audited = audit_logs(folder)
        preemptions = sum(worker["preemptions_total"] for worker in cluster.status()["workers"])
    verdict = judge(done, tally, audited)
    assert list(verdict.problems) == []
    assert (done.merges, done.splits) == (CYCLES, CYCLES)
    assert tally.completed > 0
    names = [path.name.rsplit("-", 2)[0] for path in sorted(folder.iterdir())]
    assert names == ["gateway", "memmgr", "scheduler", "worker-0", "worker-1"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    check_scheduler(next(folder.glob("scheduler-*")), REQUESTS + tally.completed)
    check_workers(sorted(folder.glob("worker-*")), REQUESTS + tally.completed, preemptions)


def check_scheduler(path: Path, requests_min: int) -> None:
    """Check that the scheduler assigned every request, and that the log replays."""
    entries = list(read_entries(path, SCHEDULER_TYPES))
    assigned = sum(isinstance(entry.value, SendAssignment) for entry in entries)
    assert assigned >= requests_min
    repeated = [
        entry for entry in entries if isinstance(entry.value, Asked) and entry.value.prefix.hashes
    ]
    assert len({entry.value.prefix for entry in repeated}) == 1 < len(repeated)
    replayed = replay(read_config(path, StateConfig).state(), entries)
    assert replayed.difference == ""
    assert replayed.decisions >= 2 * requests_min


def check_workers(paths: list[Path], requests_min: int, preemptions: int) -> None:
    """Check that logs replay to the same end: all requests finished, equal preemptions."""
    finished = preempted_again = 0
    for path in paths:
        state = worker_state(path)
        entries = list(read_entries(path, WORKER_TYPES))
        assert replay(state, entries).difference == ""
        planner = state.planner
        assert not planner.sequences and not planner.table.seq_ids
        finished += sum(
            isinstance(entry.value, EmitToken) and entry.value.finish_reason is not None
            for entry in entries
        )
        preempted_again += planner.preemptions_total
    assert finished >= requests_min
    assert preempted_again == preemptions > 0


def test_a_replay_names_the_first_difference() -> None:
    ticks = [Entry(EVENT, Ticked(float(number))) for number in range(3)]
    assert replay(SchedulerState(8, 1.0), ticks).events == 3
    other = [*ticks, Entry(COMMAND, SendTicket(1, "r1"))]
    assert "recorded after event 3" in replay(SchedulerState(8, 1.0), other).difference


class Entry:
    def __init__(self, kind: str, value: object) -> None:
        self.kind, self.value = kind, value


def test_a_full_log_ends_and_the_service_continues(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "small", StateConfig(1, 1.0, "kv_share"), size_max_bytes=600)
    for number in range(100):
        log.append("event", [Ticked(float(number))])
    assert log.path.stat().st_size <= 600
    assert read_config(log.path, StateConfig) == StateConfig(1, 1.0, "kv_share")
    entries = list(read_entries(log.path, SCHEDULER_TYPES))
    assert [entry.value.now_s for entry in entries] == [float(n) for n in range(len(entries))]
    assert 3 <= len(entries) < 100


def test_a_full_disk_ends_the_log_after_a_complete_line(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "full", StateConfig(1, 1.0, "kv_share"))
    log.append("event", [Ticked(1.0)])
    with no_room_for_files(log.path.stat().st_size + 10):
        log.append("event", [Ticked(2.0)])
    log.append("event", [Ticked(3.0)])
    entries = list(read_entries(log.path, SCHEDULER_TYPES))
    assert [entry.value.now_s for entry in entries] == [1.0]


def test_a_log_cut_in_the_middle_of_a_line_is_readable(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "cut", StateConfig(1, 1.0, "kv_share"))
    log.append("event", [Ticked(1.0), Ticked(2.0)])
    log.close()
    log.append("event", [Ticked(3.0)])
    log.path.write_bytes(log.path.read_bytes()[:-3])
    assert len(list(read_entries(log.path, SCHEDULER_TYPES))) == 1


def test_unwritable_and_unreadable_logs_are_reported_in_one_sentence(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(EventLogError, match="event_log"):
        EventLog(blocked, "x", None)
    with pytest.raises(EventLogError, match="cannot read"):
        read_config(blocked, StateConfig)
    log = EventLog(tmp_path, "types", StateConfig(1, 1.0, "kv_share"))
    log.append("event", [Ticked(1.0)])
    with pytest.raises(EventLogError, match="unknown type 'Ticked'"):
        list(read_entries(log.path, {}))
