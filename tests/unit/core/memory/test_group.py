"""Group decisions: which records are written, with which epoch, and when nothing is."""

from dataclasses import dataclass, field
from random import Random

import pytest

from services.core.memory.group import (
    Group,
    GroupPhase,
    GroupsListed,
    GroupState,
    Member,
    StoredGroup,
    Worker,
    WorkersListed,
    WriteFinished,
    WriteGroup,
)

W0 = Worker("w0", "inc-a", "m")


def stable(epoch: int, incarnation: str = "inc-a", worker_id: str = "w0") -> Group:
    members = (Member(worker_id, incarnation),)
    return Group(f"group-{worker_id}", epoch, GroupPhase.STABLE, members, "m")


def tombstone(epoch: int) -> Group:
    return Group("group-w0", epoch, GroupPhase.DISSOLVED, (), "m")


def ready_state(
    *groups: StoredGroup, workers: tuple[Worker, ...] = (W0,)
) -> tuple[GroupState, list[WriteGroup]]:
    state = GroupState()
    assert state.handle(GroupsListed(groups)) == []
    commands = state.handle(WorkersListed(workers))
    state.check_invariants()
    return state, commands


def test_a_registered_worker_gets_a_group() -> None:
    _, commands = ready_state()
    assert commands == [WriteGroup(stable(1), 0)]


def test_nothing_is_decided_before_both_listings() -> None:
    assert GroupState().handle(WorkersListed((W0,))) == []
    assert GroupState().handle(GroupsListed((StoredGroup(stable(4), 9),))) == []


def test_a_restarted_memory_manager_adopts_a_matching_record() -> None:
    _, commands = ready_state(StoredGroup(stable(4), 9))
    assert commands == []


def test_another_incarnation_gets_a_new_epoch() -> None:
    _, commands = ready_state(StoredGroup(stable(4, "inc-old"), 9))
    assert commands == [WriteGroup(stable(5), 9)]


def test_another_model_gets_a_new_epoch() -> None:
    _, commands = ready_state(StoredGroup(stable(4), 9), workers=(Worker("w0", "inc-a", "other"),))
    assert [command.group.epoch for command in commands] == [5]
    assert commands[0].group.model == "other"


def test_a_vanished_workers_group_becomes_a_tombstone_and_comes_back_higher() -> None:
    state, _ = ready_state(StoredGroup(stable(4), 9))
    assert state.handle(WorkersListed(())) == [WriteGroup(tombstone(5), 9)]
    state.handle(WriteFinished("group-w0", committed=True))
    assert state.handle(GroupsListed((StoredGroup(tombstone(5), 12),))) == []
    # The same incarnation again, as after a lost lease.
    assert state.handle(WorkersListed((W0,))) == [WriteGroup(stable(6), 12)]
    state.check_invariants()


def test_a_tombstone_without_a_worker_is_left_alone() -> None:
    _, commands = ready_state(StoredGroup(tombstone(5), 12), workers=())
    assert commands == []


def test_one_write_at_a_time() -> None:
    state, commands = ready_state()
    assert len(commands) == 1
    assert state.handle(WorkersListed(())) == []
    assert state.handle(GroupsListed(())) == []
    state.check_invariants()


@pytest.mark.parametrize("committed", [True, False])
def test_after_a_write_the_groups_are_read_before_anything_else(committed: bool) -> None:
    state, _ = ready_state()
    assert state.handle(WriteFinished("group-w0", committed=committed)) == []
    assert state.handle(WorkersListed((W0,))) == []


def test_a_lost_write_that_was_applied_is_not_repeated() -> None:
    state, _ = ready_state()
    state.handle(WriteFinished("group-w0", committed=False))
    assert state.handle(GroupsListed((StoredGroup(stable(1), 5),))) == []


def test_a_lost_write_that_was_not_applied_is_repeated() -> None:
    state, commands = ready_state()
    state.handle(WriteFinished("group-w0", committed=False))
    assert state.handle(GroupsListed(())) == commands


def test_somebody_elses_write_raises_the_epoch() -> None:
    state, _ = ready_state()
    state.handle(WriteFinished("group-w0", committed=False))
    commands = state.handle(GroupsListed((StoredGroup(tombstone(7), 20),)))
    assert commands == [WriteGroup(stable(8), 20)]


def test_a_record_that_fell_behind_is_written_again_above_the_last_epoch() -> None:
    state, _ = ready_state(StoredGroup(stable(6), 9))
    commands = state.handle(GroupsListed((StoredGroup(stable(2), 3),)))
    assert commands == [WriteGroup(stable(7), 3)]


def test_a_deleted_record_is_written_again_above_the_last_epoch() -> None:
    state, _ = ready_state(StoredGroup(stable(6), 9))
    assert state.handle(GroupsListed(())) == [WriteGroup(stable(7), 0)]


def test_a_worker_in_a_foreign_group_waits_until_that_is_dissolved() -> None:
    foreign = Group("group-x", 3, GroupPhase.STABLE, (Member("w0", "inc-a"),), "m")
    state, commands = ready_state(StoredGroup(foreign, 9))
    gone = Group("group-x", 4, GroupPhase.DISSOLVED, (), "m")
    assert commands == [WriteGroup(gone, 9)]
    state.handle(WriteFinished("group-x", committed=True))
    assert state.handle(GroupsListed((StoredGroup(gone, 10),))) == [WriteGroup(stable(1), 0)]


@dataclass
class FakeStore:
    """A compare-and-swap store; keeps every committed record."""

    records: dict[str, StoredGroup] = field(default_factory=dict)
    revision: int = 0
    history: list[Group] = field(default_factory=list)

    def listing(self) -> GroupsListed:
        return GroupsListed(tuple(self.records.values()))

    def write(self, command: WriteGroup) -> bool:
        stored = self.records.get(command.group.group_id)
        if (stored.mod_revision if stored else 0) != command.mod_revision:
            return False
        self.revision += 1
        self.records[command.group.group_id] = StoredGroup(command.group, self.revision)
        self.history.append(command.group)
        return True


class Cluster:
    """Two memory managers on one store: late views, late writes, lost answers, restarts."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.store = FakeStore()
        self.workers: dict[str, Worker] = {}
        self.states = [GroupState(), GroupState()]
        self.pending: list[tuple[int, WriteGroup]] = []
        self.late: list[WriteGroup] = []
        self.views = [self.store.listing(), self.store.listing()]
        self.incarnations = 0

    def feed(self, which: int, event: WorkersListed | GroupsListed | WriteFinished) -> None:
        commands = self.states[which].handle(event)
        self.states[which].check_invariants()
        self.pending += [(which, command) for command in commands]

    def step(self) -> None:
        which = self.rng.randrange(2)
        match self.rng.randrange(8):
            case 0:
                name = f"w{self.rng.randrange(3)}"
                self.incarnations += self.rng.randrange(2)
                self.workers[name] = Worker(name, f"i{self.incarnations}", "m")
            case 1 if self.workers:
                self.workers.pop(self.rng.choice(sorted(self.workers)))
            case 2:
                self.views[which] = self.store.listing()
            case 3:
                self.feed(which, self.views[which])  # maybe a late one
            case 4:
                self.feed(which, WorkersListed(tuple(self.workers.values())))
            case 5 if self.pending:
                self.deliver(*self.pending.pop(self.rng.randrange(len(self.pending))))
            case 6 if self.late:
                self.store.write(self.late.pop(self.rng.randrange(len(self.late))))
            case 7 if self.rng.random() < 0.05:
                self.states[which] = GroupState()
                self.pending = [entry for entry in self.pending if entry[0] != which]

    def deliver(self, owner: int, command: WriteGroup) -> None:
        match self.rng.randrange(3):
            case 0:
                self.answer(owner, command, self.store.write(command))
            case 1:  # the answer is lost
                self.store.write(command)
                self.answer(owner, command, False)
            case 2:  # the write is applied later, or never
                self.late.append(command)
                self.answer(owner, command, False)

    def answer(self, owner: int, command: WriteGroup, committed: bool) -> None:
        self.feed(owner, WriteFinished(command.group.group_id, committed))

    def settle(self) -> None:
        for _ in range(20):
            for which in range(2):
                self.feed(which, WorkersListed(tuple(self.workers.values())))
                self.feed(which, self.store.listing())
            while self.pending:
                owner, command = self.pending.pop()
                self.answer(owner, command, self.store.write(command))


@pytest.mark.parametrize("seed", range(200))
def test_epochs_grow_and_the_groups_converge(seed: int) -> None:
    cluster = Cluster(seed)
    for _ in range(300):
        cluster.step()
    cluster.settle()

    epochs: dict[str, int] = {}
    for group in cluster.store.history:
        assert group.epoch == epochs.get(group.group_id, 0) + 1
        epochs[group.group_id] = group.epoch
    stable_members = [
        member
        for stored in cluster.store.records.values()
        if stored.group.phase is GroupPhase.STABLE
        for member in stored.group.members
    ]
    assert sorted((m.worker_id, m.incarnation) for m in stable_members) == sorted(
        (w.worker_id, w.incarnation) for w in cluster.workers.values()
    )
    before = len(cluster.store.history)
    cluster.settle()
    assert len(cluster.store.history) == before
