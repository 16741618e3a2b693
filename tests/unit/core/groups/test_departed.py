"""Records of permanently lost workers: when they are removed, and what remains."""

import pytest

from services.core.groups.singleton_groups import REMOVED_MAX
from services.core.groups.state import GroupState, ProtocolConfig
from services.core.groups.vocabulary import (
    Assignment,
    ClusterListed,
    Command,
    Group,
    GroupPhase,
    LeadershipChanged,
    Member,
    StoredAssignment,
    StoredGroup,
    TimePassed,
    Transact,
    TransactionFinished,
    Worker,
)

LAYERS = 4
GONE_AFTER_S = 100.0


class Store:
    """Records, and a leader that has read them."""

    def __init__(self, token: int = 7) -> None:
        self.revision = 10
        self.workers: dict[str, Worker] = {}
        self.groups: dict[str, StoredGroup] = {}
        self.assignments: dict[str, StoredAssignment] = {}
        self.epoch_floor = self.floor_revision = 0
        self.state = self.leader(token)

    def leader(self, token: int) -> GroupState:
        """A memory manager that has read nothing yet."""
        state = GroupState(ProtocolConfig(gone_after_s=GONE_AFTER_S))
        state.handle(LeadershipChanged(0.0, token))
        return state

    def register(self, name: str, incarnation: str) -> None:
        self.revision += 1
        self.workers[name] = Worker(name, incarnation, "m", LAYERS, self.revision)

    def left_behind(self, name: str, epoch: int) -> None:
        """The records of a departed worker."""
        tombstone = Group(f"group-{name}", epoch, GroupPhase.DISSOLVED, (), "m")
        assignment = Assignment(name, f"{name}-a", "", epoch, 0, LAYERS)
        self.groups[f"group-{name}"] = StoredGroup(tombstone, self.revision)
        self.assignments[name] = StoredAssignment(assignment, self.revision)

    def read(self, now_s: float) -> list[Transact]:
        self.revision += 1
        listed = ClusterListed(
            now_s,
            self.revision,
            tuple(self.workers.values()),
            tuple(self.groups.values()),
            tuple(self.assignments.values()),
            self.epoch_floor,
            self.floor_revision,
        )
        return transactions(self.state.handle(listed))

    def pass_time(self, now_s: float) -> list[Transact]:
        return transactions(self.state.handle(TimePassed(now_s)))

    def commit(self, command: Transact, now_s: float) -> list[Transact]:
        self.revision += 1
        for group in command.groups:
            self.groups[group.group_id] = StoredGroup(group, self.revision)
        for assignment in command.assignments:
            self.assignments[assignment.worker_id] = StoredAssignment(assignment, self.revision)
        for name in command.removed_workers:
            self.assignments.pop(name, None)
            self.groups.pop(f"group-{name}", None)
            self.epoch_floor, self.floor_revision = command.epoch_floor, self.revision
        done = TransactionFinished(now_s, command.transaction_id, self.revision)
        commands = transactions(self.state.handle(done))
        self.state.check_invariants()
        return commands


def transactions(commands: list[Command]) -> list[Transact]:
    assert all(isinstance(command, Transact) for command in commands)
    return [command for command in commands if isinstance(command, Transact)]


@pytest.fixture
def store() -> Store:
    return Store()


def test_a_long_departed_worker_is_forgotten_above_all_its_epochs(
    store: Store,
) -> None:
    store.left_behind("w0", epoch=41)
    assert store.read(0.0) == []
    assert store.pass_time(GONE_AFTER_S - 0.1) == []
    (removal,) = store.pass_time(GONE_AFTER_S)
    assert removal.removed_workers == ("w0",)
    assert (removal.epoch_floor, removal.floor_revision) == (41, 0)
    assert removal.group_revisions == {"group-w0": 10}
    assert removal.assignment_revisions == {"w0": 10}
    assert removal.worker_revisions == {"w0": 0}
    # It is tried once at a time.
    assert store.pass_time(GONE_AFTER_S + 1) == []
    assert store.commit(removal, GONE_AFTER_S + 2) == []
    assert store.groups == {} and store.assignments == {}


@pytest.mark.parametrize("restarted", [False, True])
def test_a_returning_worker_gets_an_epoch_above_all_it_has_seen(
    store: Store, restarted: bool
) -> None:
    store.left_behind("w0", epoch=41)
    store.read(0.0)
    (removal,) = store.pass_time(GONE_AFTER_S)
    store.commit(removal, GONE_AFTER_S)
    if restarted:
        store.state = store.leader(token=8)
    store.register("w0", "w0-b")
    (settlement,) = store.read(GONE_AFTER_S + 1)
    assert [group.epoch for group in settlement.groups] == [42]
    assert [assignment.epoch for assignment in settlement.assignments] == [42]


def test_a_worker_that_returns_in_time_keeps_its_records(store: Store) -> None:
    store.left_behind("w0", epoch=3)
    store.read(0.0)
    store.register("w0", "w0-b")
    (settlement,) = store.read(GONE_AFTER_S / 2)
    store.commit(settlement, GONE_AFTER_S / 2)
    assert store.pass_time(3 * GONE_AFTER_S) == []
    del store.workers["w0"]
    (dissolved,) = store.read(3 * GONE_AFTER_S)
    store.commit(dissolved, 3 * GONE_AFTER_S)
    # The time runs from its last absence.
    assert store.pass_time(4 * GONE_AFTER_S - 1) == []
    (removal,) = store.pass_time(4 * GONE_AFTER_S)
    assert removal.removed_workers == ("w0",)


def test_a_floor_never_sinks(store: Store) -> None:
    store.epoch_floor, store.floor_revision = 99, 5
    store.left_behind("w0", epoch=3)
    store.read(0.0)
    (removal,) = store.pass_time(GONE_AFTER_S)
    assert (removal.epoch_floor, removal.floor_revision) == (99, 5)
    store.epoch_floor = store.floor_revision = 0  # the record was deleted
    store.register("w1", "w1-a")
    (settlement,) = store.read(GONE_AFTER_S)
    assert settlement.groups[0].epoch == 100


def test_remaining_members_are_settled_first(store: Store) -> None:
    members = (Member("w0", "w0-a", 0, 2), Member("w1", "w1-a", 2, 4))
    store.groups["group-w0"] = StoredGroup(Group("group-w0", 5, GroupPhase.STABLE, members, "m"), 9)
    for member in members:
        assignment = Assignment(
            member.worker_id, member.incarnation, "group-w0", 5, member.first_layer
        )
        store.assignments[member.worker_id] = StoredAssignment(assignment, 9)
    (dissolved,) = store.read(0.0)
    assert not dissolved.removed_workers
    assert store.pass_time(GONE_AFTER_S) == []
    (removal,) = store.commit(dissolved, GONE_AFTER_S)
    assert removal.removed_workers == ("w0", "w1")
    assert removal.epoch_floor == 6
    # There is only an assignment of w1.
    assert removal.group_revisions == {"group-w0": store.revision, "group-w1": 0}


def test_departed_workers_are_forgotten_in_batches(store: Store) -> None:
    for number in range(REMOVED_MAX + 3):
        store.left_behind(f"w{number:02}", epoch=number + 1)
    store.read(0.0)
    (first,) = store.pass_time(GONE_AFTER_S)
    assert len(first.removed_workers) == REMOVED_MAX
    assert 3 * REMOVED_MAX + 2 <= 128
    (second,) = store.commit(first, GONE_AFTER_S)
    assert len(second.removed_workers) == 3
    assert second.floor_revision == store.revision
    assert store.commit(second, GONE_AFTER_S) == []
    assert store.assignments == {}
    assert store.epoch_floor == REMOVED_MAX + 3


def test_a_standby_removes_nothing(store: Store) -> None:
    store.state = GroupState(ProtocolConfig(gone_after_s=GONE_AFTER_S))
    store.left_behind("w0", epoch=3)
    assert store.read(0.0) == []
    assert store.pass_time(2 * GONE_AFTER_S) == []
