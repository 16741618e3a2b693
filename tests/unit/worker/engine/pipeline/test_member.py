"""A member whose group changes, and the loss of members or their KV."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from services.common.event_log import read_config, read_entries
from services.core.audit.facts import EngineStarted, EngineSwitched, MemoryHeld
from services.core.changeover.epoch_fence import EpochStatus
from services.core.changeover.lost_peers import ALONE_WAIT_S, REMOVED_WAIT_S
from services.core.changeover.state import (
    DRAINED_TIMEOUT_S,
    Changeover,
    MemberConfig,
    MemberPhase,
)
from services.core.changeover.transfer_outcome import TransferOutcome, TransferStatus
from services.core.changeover.vocabulary import RequestEvent
from services.core.groups.layer_map import Stage
from services.core.planner.events import (
    IterationDropped,
    IterationFinished,
    RequestArrived,
    RequeueChecked,
)
from services.core.stall_limit import STALLED_S
from services.worker.engine.pipeline.links import Links
from services.worker.engine.transfer.errors import MoverFull
from services.worker.ipc import ApplyConfiguration
from tests.support.engine_group import EngineGroup
from tests.support.integer_group import (
    APART,
    LAYERS,
    MERGED,
    check_tokens,
    failing,
    member,
    memory,
    merged,
    merged_and_started,
    request,
    start,
    started,
)
from tests.unit.worker.engine.pipeline.conftest import MakeGroup
from tideserve.sim.replay import WORKER_TYPES, replay


@pytest.mark.parametrize("seed", (1, 2, 5))
def test_requests_get_the_same_tokens_however_groups_change(
    make_group: MakeGroup, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    group = make_group(3, seed, event_logs=tmp_path)
    changes = [
        [[Stage("w0", 0, 1), Stage("w1", 1, 2), Stage("w2", 2, 3)]],
        [[Stage("w2", 0, 2), Stage("w0", 2, 3)], [Stage("w1", 0, 3)]],
        [[Stage("w1", 0, 1), Stage("w0", 1, 3)], [Stage("w2", 0, 3)]],
        [[Stage("w2", 0, 2), Stage("w1", 2, 3)], [Stage("w0", 0, 3)]],
        [[Stage(name, 0, 3)] for name in ("w0", "w1", "w2")],
    ]
    for round_, change in enumerate(changes):
        for number in range(8 * round_, 8 * round_ + 8):
            start(group, request(number, rng.randint(1, 30), rng.randint(1, 30)))
            for _ in range(rng.randrange(40)):
                group.turn()
            group.check_invariants()
        group.abort(rng.choice([name for name, stream in group.streams.items() if not stream.over]))
        if rng.random() < 0.5:
            group.stop(f"r{8 * round_}", 2)
        group.reconfigure(change)
    check_tokens(group)
    for path in tmp_path.iterdir():
        check_log(path)


def check_log(path: Path) -> None:
    """A replay repeats the decisions of the state machine, and the facts are logged."""
    entries = list(read_entries(path, WORKER_TYPES))
    again = replay(Changeover.of(read_config(path, MemberConfig)), entries)
    assert again.difference == "" and again.decisions > 50
    facts = [entry.value for entry in entries]
    assert [type(fact) for fact in facts[:2]] == [EngineStarted, MemoryHeld]
    switched = [fact for fact in facts if isinstance(fact, EngineSwitched)]
    assert [fact.epoch for fact in switched] == sorted({fact.epoch for fact in switched})
    held = [fact for fact in facts if isinstance(fact, MemoryHeld)]
    assert held[-1].settled and not held[-1].owners and len(held) > len(switched)
    seen = [
        (entry.epoch, entry.settled, entry.sequences > 0, entry.owners > 0, entry.resident)
        for entry in held
    ]
    assert all(state != other for state, other in pairwise(seen))


def test_a_stale_configuration_is_ignored(make_group: MakeGroup) -> None:
    group = merged_and_started(make_group())
    before = member(group, "w0").configuration
    for plans in (group._plans(MERGED, group.epoch), group._plans(APART, group.epoch - 1)):
        member(group, "w0").apply(ApplyConfiguration(plans))
        group.turn()
        assert member(group, "w0").configuration is before
    check_tokens(group)


def test_the_table_and_the_memory_change_under_the_lock_and_a_stage_runs_without_it(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group()
    ran: list[str] = []
    changed: list[str] = []

    def watch(engine_name: str, name: str) -> None:
        method = getattr(memory(group, engine_name), name)

        def watched(*args: Any, **named: Any) -> Any:
            assert member(group, engine_name).stage.lock.locked(), name
            changed.append(name)
            return method(*args, **named)

        monkeypatch.setattr(memory(group, engine_name), name, watched)

    def run(engine_name: str) -> None:
        assert not member(group, engine_name).stage.lock.locked()
        ran.append(engine_name)

    for engine_name, engine in group.engines.items():
        engine.runner.before_run = lambda name=engine_name: run(name)  # type: ignore[attr-defined]
        for name in (
            *("set_stage", "release_departed", "shrink_kv", "map_kv_of", "relocate"),
            *("map_layer_parameters", "pack_kv", "unpack_kv", "pack_slab", "unpack_slab"),
        ):
            watch(engine_name, name)
    started(group)
    group.change(MERGED)
    group.reconfigure(APART)
    check_tokens(group)
    assert set(ran) == {"w0", "w1"}
    assert {"set_stage", "release_departed", "shrink_kv", "map_kv_of"} < set(changed)
    assert {"map_layer_parameters", "pack_kv", "unpack_kv", "unpack_slab"} < set(changed)


def test_planner_events_do_not_read_the_phase_of_a_change(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly all events are planner events, and no phase of a change depends on them."""
    changeover = member(group := merged(make_group()), "w0").changeover
    phase, handle = Changeover.phase.fget, changeover.handle  # type: ignore[attr-defined]
    events: list[object] = []

    def unread(_: Changeover) -> Any:
        raise AssertionError("a phase is looked at")

    def recorded_handle(event: Any) -> Any:
        events.append(event)
        before = phase(changeover)
        with monkeypatch.context() as quick:
            if isinstance(event, IterationFinished | IterationDropped | RequeueChecked):
                quick.setattr(Changeover, "phase", property(unread))
            commands = handle(event)
        assert phase(changeover) is before or not isinstance(event, RequestEvent)
        return commands

    monkeypatch.setattr(changeover, "handle", recorded_handle)
    started(group)
    group.reconfigure(APART)
    check_tokens(group)
    member(group, "w0").handle(RequeueChecked(0.0))
    start(group, request(9))
    group.abort("r9")
    assert {type(event) for event in events} >= {IterationFinished, RequeueChecked, RequestArrived}


def test_kv_that_cannot_be_sent_is_recomputed(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = merged_and_started(make_group())
    attempt = group.prepare(APART)
    assert group.await_answers(attempt, APART)
    failed: list[object] = []
    for name in group.engines:
        changeover = member(group, name).changeover
        handle = changeover.handle

        def recorded_handle(event: Any, handle: Any = handle) -> Any:
            if isinstance(event, TransferOutcome) and event.status is TransferStatus.FAILED:
                failed.append(event)
            return handle(event)

        monkeypatch.setattr(changeover, "handle", recorded_handle)
        monkeypatch.setattr(member(group, name).mover, "send", failing(MoverFull("later")))
    group.commit(APART)
    check_tokens(group)
    assert failed


def test_kv_on_a_closed_connection_is_recomputed(make_group: MakeGroup) -> None:
    group = merged_and_started(make_group())
    group.reconfigure(APART)
    for link in (("w0", "w1"), ("w1", "w0")):
        group.network._bulk.hold(*link)  # type: ignore[attr-defined]
    for _ in range(100):
        group.turn()
    group.network._bulk.cut("w0")  # type: ignore[attr-defined]
    check_tokens(group)


def test_a_piece_of_an_epoch_that_starts_during_the_check_is_kept(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mover's thread asks, and the engine's thread switches meanwhile."""
    standing_of = member(make_group(1), "w0")._epoch_status_of
    assert standing_of("g", 0) is EpochStatus.STALE and standing_of("g", 1) is EpochStatus.CURRENT
    assert standing_of("", 0) is EpochStatus.CURRENT, "parameters have no group"
    epochs = iter((1, 2, 2))
    monkeypatch.setattr(Links, "epoch", property(lambda _: next(epochs)))
    assert standing_of("g", 2) is EpochStatus.FUTURE
    assert standing_of("g", 2) is EpochStatus.CURRENT


def test_an_unreachable_member_is_reported_and_its_group_is_rebuilt(make_group: MakeGroup) -> None:
    """Both are alive: they reconnect, keep the KV, and repeat work in flight."""
    group = merged_and_started(make_group())
    group.settle()
    group.network.cut("w1")
    group.run_until(lambda: member(group, "w0").trouble)
    assert member(group, "w0").trouble == "the connection to w1 is lost"
    preempted = member(group, "w0").state.preemptions_total
    group.change(MERGED)
    assert not any(engine.member.trouble for engine in group.engines.values())
    assert member(group, "w0").state.preemptions_total <= preempted + 1
    check_tokens(group)


def test_a_silent_stage_is_reported(make_group: MakeGroup) -> None:
    """The leader waits for it and runs nothing, so no microbatch can be missed."""
    group = make_group()
    group.network._activations.hold("w1", "w0")  # type: ignore[attr-defined]
    group.reconfigure(MERGED)
    group.run_until(lambda: member(group, "w0").changeover.phase is MemberPhase.JOINING)
    group.run_until(lambda: member(group, "w1").settled)
    assert member(group, "w0").trouble == ""
    group.now_s += DRAINED_TIMEOUT_S + STALLED_S + 1
    assert member(group, "w0").trouble.startswith("not every stage has joined")
    group.network._activations.release("w1", "w0")  # type: ignore[attr-defined]
    group.settle()
    assert member(group, "w0").trouble == ""


def test_a_lost_worker_of_another_group_is_reported_once(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = merged_and_started(make_group())
    group.change(APART)
    events: list[object] = []
    changeover = member(group, "w0").changeover
    handle = changeover.handle
    monkeypatch.setattr(changeover, "handle", lambda event: events.append(event) or handle(event))
    group.network.cut("w1")
    for _ in range(100):
        group.turn()
    group.network.skip(31.0)  # type: ignore[attr-defined]
    lost = [event for event in events if type(event).__name__ == "PeersLost"]
    assert [event.workers for event in lost] == [frozenset({"w1"})]  # type: ignore[attr-defined]
    check_tokens(group)


def deserted(group: EngineGroup) -> None:
    """The follower continues in a configuration that its leader never learns."""
    group.epoch += 1
    plans = group._plans([[Stage("w1", 1, LAYERS)]], group.epoch)
    member(group, "w1").apply(ApplyConfiguration(plans))


@pytest.mark.parametrize("cut", [False, True])
def test_a_leader_abandoned_by_its_group_ends_its_requests(
    make_group: MakeGroup, cut: bool
) -> None:
    """It is cut off from etcd, so that only its former member can notify it; or from both."""
    group = merged_and_started(make_group())
    group.settle()
    if cut:
        group.network.cut("w1")
    deserted(group)
    leader = member(group, "w0")
    asked_s = group.now_s
    group.run_until(lambda: leader.changeover.isolated)
    assert group.now_s - asked_s > (ALONE_WAIT_S if cut else REMOVED_WAIT_S)
    assert not leader.state.sequences and not leader.changeover.may_plan
    group.epoch += 1
    leader.apply(ApplyConfiguration(group._plans([[Stage("w0", 0, 1)]], group.epoch)))
    group.run_until(lambda: leader.links.epoch == group.epoch)
    assert not leader.changeover.isolated, "it is in a group again"


def test_a_leader_that_learns_its_new_group_in_time_keeps_its_requests(
    make_group: MakeGroup,
) -> None:
    group = merged_and_started(make_group())
    group.settle()
    deserted(group)
    leader = member(group, "w0")
    group.run_until(lambda: leader.changeover._lost.isolation.waiting)
    held = set(leader.state.sequences)
    assert held
    leader.apply(ApplyConfiguration(group._plans([[Stage("w0", 0, 1)]], group.epoch)))
    group.run_until(lambda: leader.links.epoch == group.epoch)
    assert set(leader.state.sequences) == held
    group.groups = []
    group.restore()
    check_tokens(group)
