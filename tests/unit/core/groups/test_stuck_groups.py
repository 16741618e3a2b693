"""A group that cannot continue although all its members are registered."""

from dataclasses import replace

import pytest

from services.core.groups.stuck_groups import REBUILD_WINDOW_S, REBUILDS_MAX
from services.core.groups.vocabulary import (
    Command,
    EngineHung,
    Group,
    GroupPhase,
    GroupStuck,
    PrepareMembers,
    Reconfigure,
    TimePassed,
    Transact,
)
from tests.unit.core.groups.test_state import MERGE, SPLIT, Store, transaction, worker


def merged() -> Store:
    store = Store(worker("w0"), worker("w1"))
    store.settle()
    store.merge()
    return store


def group_of(store: Store, worker_id: str) -> Group:
    return store.groups[store.assignments[worker_id].assignment.group_id].group


def report(
    store: Store, worker_id: str, epoch: int | None = None, process: str = ""
) -> list[Command]:
    incarnation = process or store.workers[worker_id].incarnation
    epoch = group_of(store, worker_id).epoch if epoch is None else epoch
    return store.feed(GroupStuck(store.now_s, worker_id, incarnation, epoch, "the lane is cut"))


@pytest.fixture
def store() -> Store:
    return merged()


def test_members_have_an_iteration_time_to_reconnect(store: Store) -> None:
    epoch = group_of(store, "w0").epoch
    (mark,) = store.feed(_slow(store, "w0", epoch, 4.0))
    assert store.feed(_slow(store, "w1", epoch, 2.5)) == []
    (asked,) = store.commit(transaction(mark))
    assert isinstance(asked, PrepareMembers)
    assert asked.timeout_s == store.state.config.rebuild_timeout_s + 4.0


def _slow(store: Store, worker_id: str, epoch: int, iteration_s: float) -> GroupStuck:
    incarnation = store.workers[worker_id].incarnation
    return GroupStuck(store.now_s, worker_id, incarnation, epoch, "a lane is cut", iteration_s)


def renewal(store: Store) -> PrepareMembers:
    """A member reports, and the coordinator asks the members to reconnect."""
    (mark,) = report(store, "w0")
    (asked,) = store.commit(transaction(mark))
    assert isinstance(asked, PrepareMembers)
    return asked


def test_a_stuck_group_is_rebuilt_with_the_same_members_and_layers(store: Store) -> None:
    before = group_of(store, "w0")
    asked = renewal(store)
    assert asked.timeout_s == store.state.config.rebuild_timeout_s
    assert report(store, "w1") == [], "it is being mended already"
    store.answer("w0", asked.attempt)
    (commit,) = store.answer("w1", asked.attempt)
    store.commit(transaction(commit))
    after = group_of(store, "w1")
    assert (after.members, after.phase) == (before.members, GroupPhase.STABLE)
    assert after.epoch > before.epoch
    assert report(store, "w0", before.epoch) == [], "of an epoch that is over"
    assert isinstance(report(store, "w0")[0], Transact), "it may happen again"


def renewed(store: Store) -> None:
    """A member reports, and the members reconnect."""
    asked = renewal(store)
    store.answer("w0", asked.attempt)
    (commit,) = store.answer("w1", asked.attempt)
    store.commit(transaction(commit))


def test_a_repeatedly_stuck_group_is_divided(store: Store) -> None:
    """Its members connect, but large frames never arrive."""
    for _ in range(REBUILDS_MAX):
        store.now_s += 20
        renewed(store)
    store.now_s += 20
    divide = transaction(report(store, "w0")[0])
    assert {group.phase for group in divide.groups} == {GroupPhase.DEGRADED}


def test_a_long_healthy_group_can_be_rebuilt_again(store: Store) -> None:
    for _ in range(2 * REBUILDS_MAX + 1):
        store.now_s += REBUILD_WINDOW_S
        renewed(store)
    assert group_of(store, "w0").phase is GroupPhase.STABLE


def test_members_that_never_connect_are_divided_at_once() -> None:
    """Neither a lease nor the back-off of a failed attempt delays the division."""
    for silent in (False, True):
        store = merged()
        asked = renewal(store)
        if silent:
            store.now_s += store.state.config.rebuild_timeout_s
            commands = store.feed(TimePassed(store.now_s))
        else:
            commands = store.answer("w1", asked.attempt, ready=False)
        suspects = store.state._stuck.suspects
        assert suspects == ({"w0", "w1"} if silent else set()), "one of them may hang"
        (divide,) = [command for command in commands if isinstance(command, Transact)]
        assert {(group.group_id, group.phase) for group in divide.groups} == {
            ("group-w0", GroupPhase.DEGRADED),
            ("group-w1", GroupPhase.DEGRADED),
        }
        restores = [command for command in store.commit(divide) if isinstance(command, Transact)]
        assert len(restores) == 2, "each gets its layers back"
        prepares = [command for mark in restores for command in store.commit(mark)]
        names = [[m.worker_id for m in prepare.survivors] for prepare in prepares]  # type: ignore[union-attr]
        assert names == ([[], []] if silent else [["w1"], ["w0"]])


def hung(store: Store, worker_id: str, process: str = "", still: bool = True) -> list[Command]:
    incarnation = process or store.workers[worker_id].incarnation
    return store.feed(EngineHung(store.now_s, worker_id, incarnation, still))


def divided(commands: list[Command]) -> bool:
    """Whether each member gets its own group."""
    written = [
        group for command in commands if isinstance(command, Transact) for group in command.groups
    ]
    return [command.phase for command in written] == [GroupPhase.DEGRADED, GroupPhase.DEGRADED]


def test_a_stuck_group_with_a_frozen_engine_is_divided_at_once(store: Store) -> None:
    assert hung(store, "w1") == [], "no member misses it yet"
    assert divided(report(store, "w0"))


def test_a_frozen_engine_does_not_extend_the_wait(store: Store) -> None:
    renewal(store)
    commands = hung(store, "w1")
    reasons = [getattr(command, "reason", "") for command in commands]
    assert divided(commands)
    assert "the engine of w1 hangs" in reasons


def test_a_recovered_engine_does_not_block_its_group(store: Store) -> None:
    hung(store, "w1")
    assert hung(store, "w1", still=False) == []
    assert isinstance(renewal(store), PrepareMembers)


def test_engines_of_other_groups_and_former_processes_do_not_count(store: Store) -> None:
    assert hung(store, "w1", "w1-before") == hung(store, "unknown", "x") == []
    assert isinstance(renewal(store), PrepareMembers)


def test_engine_reports_of_a_former_process_do_not_count(store: Store) -> None:
    hung(store, "w1")
    assert hung(store, "w1", "w1-before", still=False) == []
    assert divided(report(store, "w0"))


def test_a_requested_change_waits_for_a_frozen_engine(
    store: Store,
) -> None:
    attempt = store.prepare(SPLIT).attempt
    assert hung(store, "w1") == []
    store.answer("w0", attempt)
    assert store.answer("w1", attempt), "it went on in time"


def test_a_change_in_preparation_is_cancelled(store: Store) -> None:
    attempt = store.prepare(SPLIT).attempt
    commands = report(store, "w0")
    reasons = [getattr(command, "reason", "") for command in commands]
    assert "group-w0 is stuck: the lane is cut" in reasons
    assert store.answer("w0", attempt) == []


def test_reports_of_another_process_or_a_single_worker_are_ignored(store: Store) -> None:
    assert report(store, "w0", process="older") == []
    assert store.feed(GroupStuck(0.0, "unknown", "x", 1, "?")) == []
    alone = Store(worker("w0"), worker("w1"))
    alone.settle()
    assert report(alone, "w0") == []
    assert alone.feed(Reconfigure(0.0, "r", MERGE)), "and both can still be merged"


def test_entries_are_removed_with_their_group_records(store: Store) -> None:
    asked = renewal(store)
    store.answer("w1", asked.attempt, ready=False)
    stuck = store.state._stuck
    assert stuck._reasons and stuck._unrecoverable
    records = store.state.records
    group = records.groups.pop("group-w0")
    records.groups["group-w1"] = replace(group, group=replace(group.group, group_id="group-w1"))
    stored = records.assignments["w1"]
    moved = replace(stored.assignment, group_id="group-w1")
    records.assignments["w1"] = replace(stored, assignment=moved)
    stuck.note(records, GroupStuck(0.0, "w1", "w1-a", group.group.epoch, "the lane is cut"))
    assert stuck._reasons.keys() == {"group-w1"} and not stuck._unrecoverable
