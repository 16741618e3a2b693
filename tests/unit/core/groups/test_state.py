"""Group decisions: which records are written, with which epoch."""

from dataclasses import replace

import pytest

from services.core.groups.layer_map import Stage
from services.core.groups.state import GroupState, ProtocolConfig
from services.core.groups.vocabulary import (
    AbortMember,
    Assignment,
    ClusterListed,
    Command,
    Event,
    Group,
    GroupPhase,
    GroupStuck,
    LeadershipChanged,
    Member,
    MemberAnswered,
    PrepareMembers,
    ReconfigurationCommitted,
    ReconfigurationFailed,
    Reconfigure,
    ReconfigureCalledOff,
    StoredAssignment,
    StoredGroup,
    Targets,
    TimePassed,
    Transact,
    TransactionFinished,
    Worker,
)

LAYERS = 4
TOKEN = 100
MERGE: Targets = ((Stage("w0", 0, 2), Stage("w1", 2, 4)),)
SPLIT: Targets = ((Stage("w0", 0, 4),), (Stage("w1", 0, 4),))


class Store:
    """The content of etcd, and a leader that has read it."""

    def __init__(self, *workers: Worker) -> None:
        self.revision = 10
        self.workers = {worker.worker_id: worker for worker in workers}
        self.groups: dict[str, StoredGroup] = {}
        self.assignments: dict[str, StoredAssignment] = {}
        self.now_s = 0.0
        self.state = GroupState(ProtocolConfig(10.0, 1.0, 4.0, absent_wait_s=0.0))
        self.feed(LeadershipChanged(0.0, TOKEN))

    def feed(self, event: Event) -> list[Command]:
        commands = self.state.handle(event)
        self.state.check_invariants()
        return commands

    def listing(self) -> ClusterListed:
        self.revision += 1
        return ClusterListed(
            self.now_s,
            self.revision,
            tuple(self.workers.values()),
            tuple(self.groups.values()),
            tuple(self.assignments.values()),
        )

    def read(self) -> list[Command]:
        return self.feed(self.listing())

    def commit(self, command: Transact) -> list[Command]:
        """Apply a transaction and report it."""
        self.revision += 1
        for group in command.groups:
            self.groups[group.group_id] = StoredGroup(group, self.revision)
        for assignment in command.assignments:
            self.assignments[assignment.worker_id] = StoredAssignment(assignment, self.revision)
        return self.finish(command, self.revision)

    def finish(self, command: Transact, revision: int | None) -> list[Command]:
        return self.feed(TransactionFinished(self.now_s, command.transaction_id, revision))

    def settle(self) -> None:
        commands = self.read()
        while commands:
            commands += self.commit(transaction(commands.pop(0)))

    def ask(self, targets: Targets) -> list[Command]:
        return self.feed(Reconfigure(self.now_s, "r", targets))

    def prepare(self, targets: Targets) -> PrepareMembers:
        """Start an attempt, up to the requests to members."""
        (mark,) = self.ask(targets)
        (command,) = self.commit(transaction(mark))
        assert isinstance(command, PrepareMembers)
        return command

    def answer(
        self, worker_id: str, attempt: str, ready: bool = True, incarnation: str = ""
    ) -> list[Command]:
        incarnation = incarnation or self.workers[worker_id].incarnation
        reason = "" if ready else "no room"
        return self.feed(MemberAnswered(self.now_s, attempt, worker_id, incarnation, ready, reason))

    def merge(self) -> None:
        """w0 and w1 become one group."""
        attempt = self.prepare(MERGE).attempt
        assert self.answer("w0", attempt) == []
        (commit,) = self.answer("w1", attempt)
        assert self.commit(transaction(commit)) == [ReconfigurationCommitted("r", self.epoch())]

    def epoch(self) -> int:
        return max(stored.group.epoch for stored in self.groups.values())

    def group(self, group_id: str) -> Group:
        return self.groups[group_id].group


def transaction(command: Command) -> Transact:
    assert isinstance(command, Transact)
    return command


def worker(name: str, incarnation: str = "a", create_revision: int = 1) -> Worker:
    return Worker(name, f"{name}-{incarnation}", "m", LAYERS, create_revision)


def stable(epoch: int, *members: Member) -> Group:
    return Group(f"group-{members[0].worker_id}", epoch, GroupPhase.STABLE, members, "m")


def whole(name: str, incarnation: str = "a") -> Member:
    return Member(name, f"{name}-{incarnation}", 0, LAYERS)


@pytest.fixture
def pair() -> Store:
    store = Store(worker("w0"), worker("w1"))
    store.settle()
    return store


class TestGroupsOfOne:
    def test_a_registered_worker_gets_a_group_and_an_assignment(self) -> None:
        store = Store(worker("w0"))
        (command,) = store.read()
        assert command == Transact(
            1,
            TOKEN,
            (stable(1, whole("w0")),),
            (Assignment("w0", "w0-a", "group-w0", 1, 0, LAYERS),),
            {"group-w0": 0},
            {"w0": 0},
            {"w0": 1},
        )

    def test_no_decision_is_made_without_leadership_or_a_listing(self) -> None:
        state = GroupState()
        assert state.handle(LeadershipChanged(0.0, TOKEN)) == []
        state = GroupState()
        assert state.handle(Store(worker("w0")).listing()) == []

    def test_correct_records_are_not_changed(self, pair: Store) -> None:
        assert pair.read() == []

    def test_another_incarnation_gets_a_new_epoch(self, pair: Store) -> None:
        pair.workers["w0"] = worker("w0", "b", 20)
        pair.settle()
        assert pair.group("group-w0") == stable(2, whole("w0", "b"))
        assert pair.group("group-w1").epoch == 1

    def test_a_vanished_worker_leaves_a_tombstone_and_returns_at_a_higher_epoch(
        self, pair: Store
    ) -> None:
        gone = pair.workers.pop("w0")
        pair.settle()
        assert pair.group("group-w0") == Group("group-w0", 2, GroupPhase.DISSOLVED, (), "m")
        assert pair.assignments["w0"].assignment.group_id == ""
        # The same incarnation, as after a lost lease.
        pair.workers["w0"] = replace(gone, create_revision=30)
        pair.settle()
        assert pair.group("group-w0") == stable(3, whole("w0"))

    def test_transactions_are_sequential(self) -> None:
        store = Store(worker("w0"))
        assert len(store.read()) == 1
        assert store.read() == []

    def test_a_failed_transaction_requires_a_new_listing(self) -> None:
        store = Store(worker("w0"))
        (command,) = store.read()
        assert store.finish(transaction(command), None) == []
        assert store.feed(TimePassed(5.0)) == []
        (again,) = store.read()
        assert transaction(again).groups == transaction(command).groups

    def test_an_unanswered_write_is_not_repeated_once_visible(self) -> None:
        store = Store(worker("w0"))
        (command,) = store.read()
        store.finish(transaction(command), None)
        store.groups["group-w0"] = StoredGroup(transaction(command).groups[0], 15)
        store.assignments["w0"] = StoredAssignment(transaction(command).assignments[0], 15)
        assert store.read() == []

    def test_an_older_listing_has_no_effect(self, pair: Store) -> None:
        late = pair.listing()
        pair.workers["w0"] = worker("w0", "b", 20)
        pair.settle()
        assert pair.feed(late) == []
        assert pair.group("group-w0").epoch == 2

    @pytest.mark.parametrize("lost", ["fell behind", "deleted"])
    def test_a_record_that_the_store_lost_is_written_above_its_last_epoch(
        self, pair: Store, lost: str
    ) -> None:
        pair.workers["w0"] = worker("w0", "b", 20)
        pair.settle()
        if lost == "deleted":
            del pair.groups["group-w0"]
        else:
            pair.groups["group-w0"] = StoredGroup(stable(1, whole("w0")), 5)
        pair.settle()
        assert pair.group("group-w0") == stable(3, whole("w0", "b"))

    def test_a_restored_assignment_to_a_group_without_the_worker_is_replaced(self) -> None:
        """The store was emptied, and w0 registered before w1 wrote its assignment again."""
        store = Store(worker("w0"))
        store.settle()
        store.workers["w1"] = worker("w1")
        lost = Assignment("w1", "w1-a", "group-w0", 2, 2, LAYERS)
        store.assignments["w1"] = StoredAssignment(lost, 12)
        (command,) = store.read()
        member = Member("w1", "w1-a", 2, LAYERS)
        degraded = replace(stable(3, member), phase=GroupPhase.DEGRADED)
        assert transaction(command).groups == (degraded,)

    def test_a_group_under_a_foreign_name_is_removed(self) -> None:
        store = Store(worker("w0"))
        foreign = Group("group-x", 3, GroupPhase.STABLE, (whole("w0"),), "m")
        store.groups["group-x"] = StoredGroup(foreign, 9)
        store.settle()
        assert store.group("group-x").phase is GroupPhase.DISSOLVED
        assert store.group("group-w0") == stable(4, whole("w0"))


class TestReconfigure:
    def test_two_groups_merge(self, pair: Store) -> None:
        command = pair.prepare(MERGE)
        members = (Member("w0", "w0-a", 0, 2), Member("w1", "w1-a", 2, 4))
        assert command.targets == (stable(2, *members),)
        marked = pair.group("group-w0")
        assert (marked.epoch, marked.phase, marked.attempt) == (1, "stable", command.attempt)
        pair.answer("w0", command.attempt)
        (commit,) = pair.answer("w1", command.attempt)
        assert transaction(commit).worker_revisions == {"w0": 1, "w1": 1}
        assert transaction(commit).group_revisions.keys() == {"group-w0", "group-w1"}
        assert transaction(commit).assignment_revisions.keys() == {"w0", "w1"}
        assert pair.commit(transaction(commit)) == [ReconfigurationCommitted("r", 2)]
        assert pair.group("group-w0") == stable(2, *members)
        assert pair.group("group-w1") == Group("group-w1", 2, GroupPhase.DISSOLVED, (), "m")
        assert pair.assignments["w1"].assignment == Assignment("w1", "w1-a", "group-w0", 2, 2, 4)
        assert pair.read() == []

    def test_a_merged_group_splits(self, pair: Store) -> None:
        pair.merge()
        attempt = pair.prepare(SPLIT).attempt
        pair.answer("w1", attempt)
        (commit,) = pair.answer("w0", attempt)
        pair.commit(transaction(commit))
        assert pair.group("group-w0") == stable(3, whole("w0"))
        assert pair.group("group-w1") == stable(3, whole("w1"))

    def test_a_merged_group_merges_with_a_third(self) -> None:
        store = Store(worker("w0"), worker("w1"), worker("w2"))
        store.settle()
        store.merge()
        targets = ((Stage("w0", 0, 1), Stage("w1", 1, 3), Stage("w2", 3, 4)),)
        command = store.prepare(targets)
        assert [source.group.group_id for source in command.sources] == ["group-w0", "group-w2"]
        for name in ("w0", "w1"):
            assert store.answer(name, command.attempt) == []
        (commit,) = store.answer("w2", command.attempt)
        store.commit(transaction(commit))
        # Above the larger of both sources' epochs.
        assert store.group("group-w0").epoch == 3
        assert store.group("group-w2").phase is GroupPhase.DISSOLVED

    def test_a_refusal_changes_nothing(self, pair: Store) -> None:
        before = {group_id: stored.group for group_id, stored in pair.groups.items()}
        attempt = pair.prepare(MERGE).attempt
        commands = pair.answer("w1", attempt, ready=False)
        assert commands[0] == ReconfigurationFailed("r", "w1 refused: no room")
        aborts = [
            effect for command in commands[1:] for effect in pair.commit(transaction(command))
        ]
        assert aborts == [AbortMember(attempt, TOKEN, name, f"{name}-a") for name in ("w0", "w1")]
        assert {group_id: stored.group for group_id, stored in pair.groups.items()} == before

    def test_silence_aborts_an_attempt_and_starts_a_back_off(self, pair: Store) -> None:
        attempt = pair.prepare(MERGE).attempt
        pair.answer("w0", attempt)
        pair.now_s = 10.0
        commands = pair.feed(TimePassed(10.0))
        assert commands[0] == ReconfigurationFailed("r", "w1 was not ready within 10 s")
        for command in commands[1:]:
            pair.commit(transaction(command))
        (refused,) = pair.ask(MERGE)
        assert refused == ReconfigurationFailed(
            "r", "an earlier attempt was aborted; try again in 1.0 s"
        )
        pair.now_s = 11.5
        pair.prepare(MERGE)

    @pytest.mark.parametrize("answer", ["another attempt", "another incarnation", "no member"])
    def test_an_answer_of_another_worker_is_ignored(self, pair: Store, answer: str) -> None:
        pair.workers["w2"] = worker("w2")
        attempt = pair.prepare(MERGE).attempt
        pair.answer("w0", attempt)
        match answer:
            case "another attempt":
                assert pair.answer("w1", f"{TOKEN}-0") == []
            case "another incarnation":
                assert pair.answer("w1", attempt, incarnation="w1-b") == []
            case _:
                assert pair.answer("w2", attempt) == []
        assert len(pair.answer("w1", attempt)) == 1

    def test_a_draining_member_aborts_the_attempt(self, pair: Store) -> None:
        pair.prepare(MERGE)
        pair.workers["w1"] = replace(pair.workers["w1"], draining=True)
        assert ReconfigurationFailed("r", "w1 has left, restarted or begun to drain") in pair.read()

    def test_a_restarted_member_aborts_the_attempt(self, pair: Store) -> None:
        attempt = pair.prepare(MERGE).attempt
        pair.answer("w0", attempt)
        pair.workers["w1"] = worker("w1", "b", 50)
        commands = pair.read()
        assert commands[0] == ReconfigurationFailed("r", "w1 has left, restarted or begun to drain")
        # w0's record loses the mark, w1's becomes its successor's.
        written = {group.group_id: group for command in commands[1:] for group in command.groups}
        assert written == {
            "group-w0": stable(1, whole("w0")),
            "group-w1": stable(2, whole("w1", "b")),
        }

    def test_lost_leadership_ends_attempts_and_the_successor_removes_their_marks(
        self, pair: Store
    ) -> None:
        attempt = pair.prepare(MERGE).attempt
        (ended,) = pair.feed(LeadershipChanged(1.0, None))
        assert isinstance(ended, ReconfigurationFailed)
        assert pair.answer("w0", attempt) == []
        assert pair.answer("w1", attempt) == []
        pair.state = GroupState()
        pair.feed(LeadershipChanged(2.0, TOKEN + 5))
        removals = [transaction(command) for command in pair.read()]
        assert [command.groups[0].attempt for command in removals] == ["", ""]
        assert all(command.token == TOKEN + 5 for command in removals)
        (abort,) = pair.commit(removals[0])
        assert abort == AbortMember(attempt, TOKEN + 5, "w0", "w0-a")

    def test_two_attempts_never_share_a_worker(self, pair: Store) -> None:
        pair.prepare(MERGE)
        (refused,) = pair.ask(SPLIT)
        assert "being changed already" in refused.reason

    @pytest.mark.parametrize(
        ("targets", "reason"),
        [
            ((), "needs a member"),
            (((),), "needs a member"),
            (((Stage("w0", 0, 2), Stage("w0", 2, 4)),), "named twice"),
            (((Stage("w9", 0, 4),),), "w9 is not registered"),
            (((Stage("w0", 0, 2), Stage("w1", 3, 4)),), "each once"),
            (((Stage("w0", 0, 2), Stage("w1", 2, 3)),), "each once"),
            (((Stage("w0", 0, 4), Stage("w1", 4, 4)),), "at least 1"),
            (((Stage("w0", -1, 2), Stage("w1", 2, 4)),), "each once"),
            (SPLIT, "already have these"),
            (((Stage("w0", 0, 2), Stage("x0", 2, 4)),), "same model"),
            (((Stage("w0", 0, 2), Stage("y0", 2, 4)),), "y0 and w0 have loaded different weights"),
            (((Stage("w0", 0, 2), Stage("z0", 2, 4)),), "z0 and w0 run different versions"),
            (((Stage("w0", 0, 2), Stage("v0", 2, 4)),), "v0 runs with block_size 32 and w0 with"),
        ],
    )
    def test_impossible_changes_are_refused(
        self, pair: Store, targets: Targets, reason: str
    ) -> None:
        pair.workers["x0"] = Worker("x0", "x0-a", "another", LAYERS, 3)
        pair.workers["y0"] = Worker("y0", "y0-a", "m", LAYERS, 4, model_digest="another")
        pair.workers["z0"] = Worker("z0", "z0-a", "m", LAYERS, 5, build="2:another")
        pair.workers["v0"] = Worker("v0", "v0-a", "m", LAYERS, 6, settings="block_size 32")
        pair.settle()
        (refused,) = pair.ask(targets)
        assert isinstance(refused, ReconfigurationFailed)
        assert reason in refused.reason

    def test_a_partial_group_cannot_be_merged(self, pair: Store) -> None:
        pair.merge()
        (refused,) = pair.ask((SPLIT[0],))
        assert refused.reason == "w1 of group-w0 is missing from the change; name it, too"

    def test_a_standby_refuses_changes(self, pair: Store) -> None:
        pair.feed(LeadershipChanged(1.0, None))
        (refused,) = pair.ask(MERGE)
        assert "is not the leader" in refused.reason


class TestDegraded:
    def test_a_survivor_keeps_its_layers_then_restores_all(self, pair: Store) -> None:
        pair.merge()
        del pair.workers["w1"]
        (command,) = pair.read()
        survivor = Group("group-w0", 3, GroupPhase.DEGRADED, (Member("w0", "w0-a", 0, 2),), "m")
        assert transaction(command).groups == (survivor,)
        (mark,) = pair.commit(transaction(command))
        (prepare,) = pair.commit(transaction(mark))
        assert isinstance(prepare, PrepareMembers)
        assert prepare.targets == (stable(4, whole("w0")),)
        (commit,) = pair.answer("w0", prepare.attempt)
        ended = ReconfigurationCommitted(prepare.attempt, 4)
        assert pair.commit(transaction(commit)) == [ended], "under the attempt's own id"
        assert pair.group("group-w0") == stable(4, whole("w0"))

    def test_a_survivor_that_followed_gets_a_group_of_its_own_name(self, pair: Store) -> None:
        pair.merge()
        del pair.workers["w0"]
        (command,) = pair.read()
        assert {group.group_id: group.phase for group in transaction(command).groups} == {
            "group-w0": GroupPhase.DISSOLVED,
            "group-w1": GroupPhase.DEGRADED,
        }
        gone = {
            assignment.worker_id: assignment for assignment in transaction(command).assignments
        }["w0"]
        assert gone == Assignment("w0", "w0-a", "", 3, 0, 2)

    def test_a_lost_lease_does_not_reset_the_dropped_layers_of_a_worker(self, pair: Store) -> None:
        pair.merge()
        gone = pair.workers.pop("w1")
        pair.commit(transaction(pair.read()[0]))
        pair.workers["w1"] = replace(gone, create_revision=40)
        written = [group for command in pair.read() for group in transaction(command).groups]
        again = Group("group-w1", 4, GroupPhase.DEGRADED, (Member("w1", "w1-a", 2, 4),), "m")
        assert again in written

    def test_a_restarted_member_has_all_layers(self, pair: Store) -> None:
        pair.merge()
        pair.workers["w1"] = worker("w1", "b", 40)
        (command,) = pair.read()
        assert stable(3, whole("w1", "b")) in transaction(command).groups

    def test_a_failed_restoration_is_retried(self, pair: Store) -> None:
        pair.merge()
        del pair.workers["w1"]
        (mark,) = pair.commit(transaction(pair.read()[0]))
        (prepare,) = pair.commit(transaction(mark))
        ended, removal = pair.answer("w0", prepare.attempt, ready=False)
        assert ended == ReconfigurationFailed(prepare.attempt, "w0 refused: no room")
        pair.commit(transaction(removal))
        assert pair.feed(TimePassed(0.5)) == []
        (mark,) = pair.feed(TimePassed(1.5))
        assert transaction(mark).groups[0].attempt

    def test_a_survivor_does_not_inherit_the_back_off_of_its_group(self, pair: Store) -> None:
        pair.merge()
        attempt = pair.prepare(SPLIT).attempt
        _, removal = pair.answer("w0", attempt, ready=False)
        pair.commit(transaction(removal))
        del pair.workers["w0"]
        (mark,) = pair.commit(transaction(pair.read()[0]))
        (prepare,) = pair.commit(transaction(mark))
        assert isinstance(prepare, PrepareMembers), "at once"

    def test_two_survivors_prepare_with_marks_in_either_order(self) -> None:
        store = Store(*(worker(f"w{number}") for number in range(4)))
        store.settle()
        thirds = (Stage("w0", 0, 2), Stage("w1", 2, 3), Stage("w2", 3, 4))
        attempt = store.prepare((thirds,)).attempt
        for name in ("w0", "w1", "w2"):
            commands = store.answer(name, attempt)
        store.commit(transaction(commands[0]))
        del store.workers["w2"]
        marks = [transaction(command) for command in store.commit(transaction(store.read()[0]))]
        assert len(marks) == 2
        store.revision += 2
        later = store.finish(marks[1], store.revision)
        earlier = store.finish(marks[0], store.revision - 1)
        asked = [command for command in (*later, *earlier) if isinstance(command, PrepareMembers)]
        assert len(asked) == len(store.state.attempts) == 2


class TestAbsentMembers:
    WAIT_S = 3.0

    @pytest.fixture
    def merged(self, pair: Store) -> Store:
        pair.state.config = replace(pair.state.config, absent_wait_s=self.WAIT_S)
        pair.merge()
        return pair

    def test_leases_lost_in_an_etcd_outage_change_no_group(self, merged: Store) -> None:
        for back in (("w0",), ("w0", "w1")):
            registered = merged.workers
            merged.workers = {}
            assert merged.read() == [], "all leases have ended"
            merged.now_s += self.WAIT_S - 0.1
            merged.workers = {name: registered[name] for name in back}
            assert merged.read() == [] == merged.feed(TimePassed(merged.now_s)), back
            merged.workers = {
                name: replace(worker, create_revision=merged.revision)
                for name, worker in registered.items()
            }
            assert merged.read() == []
        assert merged.ask(SPLIT), "it is a group like others"

    def test_a_member_that_does_not_return_is_lost(self, merged: Store) -> None:
        del merged.workers["w1"]
        assert merged.read() == []
        (settled,) = merged.feed(TimePassed(self.WAIT_S))
        assert transaction(settled).groups[0].phase is GroupPhase.DEGRADED

    def test_a_member_missed_by_another_is_lost_at_once(self, merged: Store) -> None:
        del merged.workers["w1"]
        assert merged.read() == []
        stuck = GroupStuck(0.1, "w0", "w0-a", 2, "the connection to w1 is lost")
        (settled,) = merged.feed(stuck)
        assert transaction(settled).groups[0].phase is GroupPhase.DEGRADED

    def test_a_restarted_member_is_not_waited_for(self, merged: Store) -> None:
        del merged.workers["w1"]
        merged.workers["w0"] = worker("w0", "b", 40)
        settled = merged.read()
        assert {group.group_id for command in settled for group in transaction(command).groups} == {
            "group-w0"
        }

    def test_the_mark_of_an_attempt_is_removed_once_all_return(self, merged: Store) -> None:
        attempt = merged.prepare(SPLIT).attempt
        gone = merged.workers.pop("w1")
        (failed,) = merged.read()
        assert failed == ReconfigurationFailed("r", "w1 has left, restarted or begun to drain")
        assert merged.group("group-w0").attempt == attempt
        merged.workers["w1"] = gone
        (removal,) = merged.read()
        assert not transaction(removal).groups[0].attempt


class TestCallingOff:
    def call_off(self, store: Store) -> list[Command]:
        return store.feed(ReconfigureCalledOff(store.now_s, "r", "load has returned"))

    def test_removed_marks_abort_members_without_back_off(self, pair: Store) -> None:
        pair.merge()
        attempt = pair.prepare(SPLIT).attempt
        failed, removal = self.call_off(pair)
        assert failed == ReconfigurationFailed("r", "load has returned")
        assert pair.commit(transaction(removal)) == [
            AbortMember(attempt, TOKEN, name, f"{name}-a") for name in ("w0", "w1")
        ]
        assert pair.group("group-w0").attempt == ""
        assert pair.answer("w0", attempt) == pair.answer("w1", attempt) == []
        assert pair.prepare(SPLIT).attempt != attempt

    def test_a_mark_that_is_being_written_is_removed_afterwards(self, pair: Store) -> None:
        (mark,) = pair.ask(MERGE)
        assert self.call_off(pair) == [ReconfigurationFailed("r", "load has returned")]
        removals = pair.commit(transaction(mark))
        while removals:
            command = removals.pop(0)
            removals += (
                [] if isinstance(command, AbortMember) else pair.commit(transaction(command))
            )
        assert not any(stored.group.attempt for stored in pair.groups.values())

    def test_a_commit_in_progress_is_not_cancelled(self, pair: Store) -> None:
        attempt = pair.prepare(MERGE).attempt
        pair.answer("w0", attempt)
        (commit,) = pair.answer("w1", attempt)
        assert self.call_off(pair) == []
        assert pair.commit(transaction(commit)) == [ReconfigurationCommitted("r", pair.epoch())]

    def test_cancelling_an_unknown_change_has_no_effect(self, pair: Store) -> None:
        assert self.call_off(pair) == []
