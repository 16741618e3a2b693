"""A change of groups from the request until its members have settled."""

from collections.abc import Iterable
from random import Random

import pytest

from services.core.groups import coordinator
from services.core.groups.coordinator import (
    ENDED,
    TRANSITIONS,
    ChangeCalledOff,
    ChangePhase,
    ChangeRequested,
    ChangeStepped,
    Command,
    CoordinatorConfig,
    CoordinatorState,
    Event,
    MembersPolled,
    MemberStatus,
    PollMembers,
)
from services.core.groups.layer_map import Stage
from services.core.groups.state import ProtocolConfig
from services.core.groups.vocabulary import (
    LeadershipChanged,
    MemberAnswered,
    PrepareMembers,
    StoredGroup,
    Targets,
    TimePassed,
    Transact,
    TransactionFinished,
)
from tests.support.group_store import FakeStore
from tests.support.group_world import LAYERS

CONFIG = CoordinatorConfig(
    ProtocolConfig(prepare_timeout_s=10.0, backoff_s=0.0, backoff_max_s=0.0, absent_wait_s=0.0),
    running_max=2,
    change_over_timeout_s=30.0,
)
NAMES = tuple(f"w{number}" for number in range(8))


def merge(*names: str) -> Targets:
    share = LAYERS // len(names)
    return (tuple(Stage(name, n * share, (n + 1) * share) for n, name in enumerate(names)),)


def split(*names: str) -> Targets:
    return tuple((Stage(name, 0, LAYERS),) for name in names)


class Cluster:
    """A leading coordinator, a store, and members that are controlled by the test."""

    def __init__(self, config: CoordinatorConfig = CONFIG, names: Iterable[str] = NAMES) -> None:
        self.state = CoordinatorState(config)
        self.store = FakeStore(frozenset())
        self.now_s = 0.0
        self.transactions: list[Transact] = []
        self.prepares: list[PrepareMembers] = []
        self.looks: list[tuple[float, PollMembers]] = []
        self.steps: dict[str, list[ChangePhase]] = {}
        self.messages: dict[str, str] = {}
        self.epochs: dict[str, int] = {}
        self.unsettled: set[str] = set()
        self.feed(LeadershipChanged(0.0, self.store.elect()))
        for name in names:
            self.store.register(name, f"{name}-a")
        self.feed(self.store.listing(0.0))
        self.write_all()

    def feed(self, event: Event) -> None:
        for command in self.state.handle(event):
            self.carry_out(command)
        self.state.check_invariants()

    def carry_out(self, command: Command) -> None:
        match command:
            case Transact():
                self.transactions.append(command)
            case PrepareMembers():
                self.prepares.append(command)
            case PollMembers():
                self.looks.append((self.now_s + command.after_s, command))
            case ChangeStepped():
                self.steps.setdefault(command.change_id, []).append(command.phase)
                self.messages[command.change_id] = command.message

    def ask(self, change_id: str, targets: Targets, urgent: bool = False) -> None:
        self.feed(ChangeRequested(self.now_s, change_id, targets, urgent))

    def write(self, command: Transact) -> None:
        self.transactions.remove(command)
        revision = self.store.transact(command)
        self.feed(TransactionFinished(self.now_s, command.transaction_id, revision))
        if revision is None:
            self.feed(self.store.listing(self.now_s))

    def write_all(self) -> None:
        while self.transactions:
            self.write(self.transactions[0])

    def answer_all(self, ready: bool = True) -> None:
        while self.prepares:
            command = self.prepares.pop(0)
            for source in command.sources:
                for member in source.group.members:
                    self.answer(command.attempt, member.worker_id, ready)

    def answer(self, attempt: str, name: str, ready: bool) -> None:
        reason = "" if ready else "no room"
        incarnation = f"{name}-a"
        self.feed(MemberAnswered(self.now_s, attempt, name, incarnation, ready, reason))

    def commit_all(self) -> None:
        self.write_all()
        self.answer_all()
        self.write_all()

    def serve(self, *names: str) -> None:
        """These workers apply their newest configuration."""
        for name in names or NAMES:
            if (stored := self.store.assignments.get(name)) is not None:
                self.epochs[name] = stored.assignment.epoch

    def poll(self) -> None:
        """Run all due polls."""
        due = [look for look in self.looks if look[0] <= self.now_s]
        self.looks = [look for look in self.looks if look[0] > self.now_s]
        for _, command in due:
            seen = tuple(
                MemberStatus(name, self.epochs.get(name, 0), name not in self.unsettled)
                for name in command.worker_ids
            )
            self.feed(MembersPolled(self.now_s, command.change_id, seen))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed(TimePassed(self.now_s))
        self.poll()


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def merging(cluster: Cluster) -> Cluster:
    """A cluster that has begun the change "c", which merges w0 and w1."""
    cluster.ask("c", merge("w0", "w1"))
    return cluster


PREPARING, COMMITTED = ChangePhase.PREPARING, ChangePhase.COMMITTED
STABLE, SETTLED = ChangePhase.STABLE, ChangePhase.SETTLED
FAILED, LEFT = ChangePhase.FAILED, ChangePhase.LEFT


def test_a_change_is_followed_until_its_members_have_settled(merging: Cluster) -> None:
    assert merging.steps["c"] == [PREPARING]
    merging.commit_all()
    merging.unsettled.add("w1")
    merging.poll()
    assert merging.steps["c"] == [PREPARING, COMMITTED], "no member serves it yet"
    merging.serve("w0")
    merging.pass_time(0.2)
    assert merging.steps["c"] == [PREPARING, COMMITTED], "w1 does not serve it yet"
    merging.serve()
    merging.pass_time(0.2)
    assert merging.steps["c"] == [PREPARING, COMMITTED, STABLE], "KV moves at w1"
    merging.unsettled.clear()
    merging.pass_time(0.2)
    assert merging.steps["c"] == [PREPARING, COMMITTED, STABLE, SETTLED]
    assert merging.looks == []


def test_only_waiting_and_preparing_changes_can_be_cancelled(cluster: Cluster) -> None:
    for number, names in enumerate((("w0", "w1"), ("w2", "w3"), ("w4", "w5"))):
        cluster.ask(f"c{number}", merge(*names))
    cluster.write_all()
    assert "c2" not in cluster.steps, "it waits for its turn"
    for names in (("w4", "w5"), ("w0", "w1"), ("w6", "w7")):
        cluster.feed(ChangeCalledOff(cluster.now_s, merge(*names), "not wanted"))
    assert cluster.steps == {"c0": [PREPARING, FAILED], "c1": [PREPARING], "c2": [FAILED]}
    assert cluster.messages["c0"] == cluster.messages["c2"] == "not wanted"
    cluster.commit_all()
    cluster.feed(ChangeCalledOff(cluster.now_s, merge("w2", "w3"), "not wanted"))
    assert cluster.steps["c1"] == [PREPARING, COMMITTED]
    assert not any(stored.group.attempt for stored in cluster.store.groups.values())
    assert len(cluster.store.groups["group-w0"].group.members) == 1


def test_an_impossible_change_fails_at_once(cluster: Cluster) -> None:
    cluster.ask("c", merge("w0", "unknown"))
    assert cluster.steps["c"] == [FAILED]
    assert "unknown is not registered" in cluster.messages["c"]


def test_a_member_that_refuses_ends_the_change(merging: Cluster) -> None:
    merging.write_all()
    merging.answer_all(ready=False)
    assert merging.steps["c"] == [PREPARING, FAILED]
    assert merging.messages["c"] == "w0 refused: no room"


def test_a_member_that_does_not_change_over_fails_the_change_but_not_the_commit(
    merging: Cluster,
) -> None:
    merging.commit_all()
    merging.serve("w0")
    for _ in range(40):
        merging.pass_time(1.0)
    assert merging.steps["c"] == [PREPARING, COMMITTED, FAILED]
    assert "w1 did not change over within 30 s" in merging.messages["c"]
    assert len(merging.store.groups["group-w0"].group.members) == 2


def test_a_slow_kv_move_is_left_to_the_members(merging: Cluster) -> None:
    merging.commit_all()
    merging.serve()
    merging.unsettled.add("w0")
    for _ in range(40):
        merging.pass_time(1.0)
    assert merging.steps["c"] == [PREPARING, COMMITTED, STABLE, LEFT]


def test_a_change_waits_for_a_write_that_is_under_way(merging: Cluster) -> None:
    mark = merging.transactions[0]
    merging.ask("d", merge("w0", "w2"))
    assert merging.steps.get("d") is None, "asked for again"
    for _ in range(10):
        merging.pass_time(0.2)
    assert merging.steps.get("d") is None
    merging.store.revision += 1
    group = merging.store.groups["group-w1"].group
    merging.store.groups["group-w1"] = StoredGroup(group, merging.store.revision)
    merging.write(mark)
    assert merging.steps["c"] == [PREPARING, FAILED], "another writer came first"
    merging.pass_time(0.2)
    assert merging.steps["d"] == [PREPARING]


def test_waiting_for_a_write_times_out(merging: Cluster) -> None:
    merging.ask("d", merge("w0", "w2"))
    for _ in range(30):
        merging.pass_time(0.2)
    assert merging.steps["d"] == [FAILED]
    assert merging.messages["d"] == "the groups are being changed; try again in a moment"


def test_a_change_ends_without_an_answer_of_the_store(merging: Cluster) -> None:
    for _ in range(41):
        merging.pass_time(1.0)
    assert merging.steps["c"] == [PREPARING, FAILED]
    assert "etcd does not answer" in merging.messages["c"]
    merging.commit_all()
    assert merging.steps["c"] == [PREPARING, FAILED], "its attempt was committed late"


def test_automatic_changes_are_queued_and_manual_ones_are_not(cluster: Cluster) -> None:
    pairs = [("w0", "w1"), ("w2", "w3"), ("w4", "w5")]
    for pair in pairs:
        cluster.ask("+".join(pair), merge(*pair))
    cluster.ask("by hand", merge("w6", "w7"), urgent=True)
    assert set(cluster.steps) == {"w0+w1", "w2+w3", "by hand"}
    cluster.commit_all()
    cluster.poll()
    assert "w4+w5" not in cluster.steps, "their members have not changed over"
    cluster.serve("w0", "w1", "w6", "w7")
    cluster.unsettled = {"w0"}
    cluster.pass_time(0.2)
    assert cluster.steps["w0+w1"][-1] is STABLE
    assert cluster.steps["w4+w5"] == [PREPARING], "a stable change makes room"


def test_a_lost_leadership_fails_every_change_that_is_not_committed(merging: Cluster) -> None:
    merging.commit_all()
    merging.ask("d", merge("w2", "w3"))
    merging.feed(LeadershipChanged(merging.now_s, None))
    assert not merging.state.leads
    assert merging.steps["d"] == [PREPARING, FAILED]
    merging.serve()
    merging.poll()
    assert merging.steps["c"][-1] is SETTLED


def test_survivors_are_followed_without_a_request(merging: Cluster) -> None:
    merging.commit_all()
    merging.serve()
    merging.poll()
    merging.store.expire("w1")
    merging.feed(merging.store.listing(merging.now_s))
    merging.write_all()
    (prepare,) = merging.prepares
    assert merging.state.change_of(prepare.attempt) == prepare.attempt
    merging.commit_all()
    merging.serve()
    merging.poll()
    assert merging.steps[prepare.attempt] == [COMMITTED, STABLE, SETTLED]


class Chaos(Cluster):
    """A cluster with random events."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.asked = 0
        self.targets: list[Targets] = []
        super().__init__(names=NAMES[:4])

    def step(self) -> None:
        self.rng.choice(
            (
                *(self._ask, self._write, self._write, self._answer, self._answer),
                *(self._serve, self._wait, self._settle, self._lead, self._call_off),
            )
        )()

    def _ask(self) -> None:
        self.asked += 1
        some = self.rng.sample(NAMES[:4], 2)
        targets = merge(*some) if self.rng.random() < 0.6 else split(*some)
        self.targets.append(targets)
        self.ask(f"c{self.asked}", targets, urgent=self.rng.random() < 0.2)

    def _call_off(self) -> None:
        if self.targets:
            targets = self.rng.choice(self.targets[-4:])
            self.feed(ChangeCalledOff(self.now_s, targets, "not wanted"))

    def _write(self) -> None:
        if self.transactions:
            self.write(self.rng.choice(self.transactions))

    def _answer(self) -> None:
        if self.prepares:
            command = self.rng.choice(self.prepares)
            members = [member for source in command.sources for member in source.group.members]
            name = self.rng.choice(members).worker_id
            self.answer(command.attempt, name, self.rng.random() < 0.9)

    def _serve(self) -> None:
        self.serve(self.rng.choice(NAMES[:4]))

    def _settle(self) -> None:
        name = self.rng.choice(NAMES[:4])
        self.unsettled ^= {name}

    def _wait(self) -> None:
        self.pass_time(self.rng.choice([0.2] * 6 + [3.0, 35.0]))

    def _lead(self) -> None:
        if self.rng.random() < 0.2:
            self.feed(LeadershipChanged(self.now_s, None))
            self.feed(LeadershipChanged(self.now_s, self.store.elect()))

    def finish(self) -> None:
        """No further faults; every change ends by its deadline."""
        self.unsettled.clear()
        for _ in range(200):
            self.write_all()
            self.answer_all()
            self.serve()
            self.pass_time(1.0)


def test_every_change_ends_once_and_follows_the_state_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: set[tuple[ChangePhase, ChangePhase]] = set()
    enter = coordinator._Change.enter

    def noted(change: coordinator._Change, phase: ChangePhase) -> None:
        seen.add((change.phase, phase))
        enter(change, phase)

    monkeypatch.setattr(coordinator._Change, "enter", noted)
    for seed in range(60):
        chaos = Chaos(seed)
        for _ in range(150):
            chaos.step()
        chaos.finish()
        assert chaos.asked > 5
        for number in range(chaos.asked):
            steps = chaos.steps[f"c{number + 1}"]
            assert [step for step in steps if step in ENDED] == steps[-1:], (seed, number, steps)
        assert chaos.looks == []
    assert seen == TRANSITIONS, "each transition happens, and no other"
