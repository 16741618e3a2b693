from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from services.worker.engine.pipeline.connections import RETRY_S, Connections
from services.worker.engine.pipeline.frames import KINDS
from services.worker.engine.transfer import handshake
from services.worker.engine.transfer.errors import LaneFull
from services.worker.engine.transfer.frame import FrameCodec
from services.worker.engine.transfer.lane import Identity, PeerLost
from services.worker.engine.transfer.pieces import BULK_KINDS
from services.worker.ipc import Lane as LanePlan
from services.worker.ipc import MemberPlan
from tests.support.local_lane import LocalNetwork

NAMES = ("w0", "w1")


def plan(name: str, attempt: int) -> MemberPlan:
    """A member of an attempt, with nonces of its own."""
    lane = LanePlan(f"local:{name}", f"the nonce of attempt {attempt}")
    return MemberPlan(name, f"{name}-1", 0, 1, lane, lane, f"address of {name}")


@dataclass
class Pair:
    """Two engines; w0 dials."""

    now_s: float = 0.0
    activations: LocalNetwork = field(default_factory=lambda: LocalNetwork(FrameCodec(KINDS)))
    bulk: LocalNetwork = field(default_factory=lambda: LocalNetwork(FrameCodec(BULK_KINDS)))

    def __post_init__(self) -> None:
        identities = {name: Identity(name, f"{name}-1") for name in NAMES}
        self.lanes = {
            name: (self.activations.lane(identity), self.bulk.lane(identity))
            for name, identity in identities.items()
        }
        self.ends = {
            name: Connections(*lanes, now_s=lambda: self.now_s)
            for name, lanes in self.lanes.items()
        }

    def open(self, name: str, attempt: int) -> None:
        """Run an engine's turn in an attempt."""
        (other,) = set(NAMES) - {name}
        self.ends[name].open(plan(name, attempt), plan(other, attempt))

    def attempt(self, number: int = 1) -> None:
        """Run both engines' turns in an attempt, w0 last, and deliver the connections."""
        self.open("w1", number)
        self.open("w0", number)
        self.deliver()

    def deliver(self) -> int:
        """Make or refuse connections; returns the number of refused activation lanes."""
        refused = 0
        self.activations.connect_pending()
        self.bulk.connect_pending()
        for name, (activations, bulk) in self.lanes.items():
            for event in activations.events():
                self.ends[name].note_activations(event)
                refused += "refused" in getattr(event, "reason", "")
            for event in bulk.events():
                self.ends[name].note_bulk(event)
        return refused

    @property
    def connected(self) -> bool:
        return self.ends["w0"].has(plan("w1", 0)) and self.ends["w1"].has(plan("w0", 0))

    def close(self) -> None:
        for lanes in self.lanes.values():
            for lane in lanes:
                lane.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_a_loss_without_an_event_is_found_by_polling(pair: Pair) -> None:
    """Both ends of a lost lane must abandon their work for each other."""
    pair.attempt()
    for end in pair.ends.values():
        end.detect_lost()
        assert not end.any_lost
    own = pair.ends["w0"]
    own.end_all(activations=True, bulk=False)
    assert not own.any_lost
    own.detect_lost()
    assert own.lost([plan("w1", 1)]) == ["w1"]


def test_a_refused_peer_retries_later(pair: Pair) -> None:
    """A peer in a long iteration does not know yet which peers to expect."""
    refusals = 0
    for _ in range(100):
        pair.open("w0", 1)
        refusals += pair.deliver()
        pair.now_s += RETRY_S / 10
    assert 0 < refusals <= 11
    pair.open("w1", 1)
    pair.now_s += RETRY_S
    pair.open("w0", 1)
    pair.deliver()
    assert pair.connected


def test_the_end_of_an_older_process_does_not_end_the_wait_for_its_successor(pair: Pair) -> None:
    """A dial would replace the one in progress, whose nonce is spent."""
    pair.open("w0", 1)
    own = pair.ends["w0"]
    own.note_activations(PeerLost(Identity("w1", "an older one"), "a newer connection replaced it"))
    pair.now_s += 2 * RETRY_S
    dialled: list[str] = []
    pair.lanes["w0"][0].connect = lambda peer, *_: dialled.append(peer)  # type: ignore[method-assign]
    pair.open("w0", 1)
    assert dialled == []


@pytest.mark.parametrize("aborted", [(), (1,)])
def test_an_attempt_aborted_before_the_peer_dials_does_not_block_the_next(
    pair: Pair, aborted: tuple[int, ...]
) -> None:
    for attempt in aborted:
        pair.open("w1", attempt)
    pair.attempt(2)
    assert pair.connected


def test_a_dial_of_an_aborted_attempt_is_repeated_with_the_new_nonce(pair: Pair) -> None:
    pair.open("w0", 1)
    pair.open("w1", 2)
    pair.open("w0", 2)
    assert pair.deliver() == 1
    pair.now_s += RETRY_S
    pair.open("w0", 2)
    pair.deliver()
    assert pair.connected


def test_a_peer_refused_by_a_full_table_is_expected_later(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(handshake, "EXPECTED_MAX", 0)
        with pytest.raises(LaneFull, match="0 peers are expected already"):
            pair.open("w1", 1)
    pair.attempt()
    assert pair.connected


@pytest.mark.parametrize("entered", [False, True])
def test_a_lost_peer_is_missing_until_the_next_configuration(pair: Pair, entered: bool) -> None:
    """A connection made by a preparation does not recover frames that the old one lost."""
    for attempt in (1, 2):
        pair.attempt(attempt)
        if attempt == 1:
            pair.bulk.cut("w1")
            pair.deliver()
            pair.now_s += 1.0
    assert pair.connected
    for name, end in pair.ends.items():
        (other,) = set(NAMES) - {name}
        member = plan(other, 2)
        if entered:
            end.enter([member])
        assert end.lost([member]) == ([] if entered else [other])


@pytest.mark.parametrize("cut_off", NAMES)
def test_a_side_without_a_loss_event_reconnects(pair: Pair, cut_off: str) -> None:
    """Otherwise it reports ready, and the other side waits in vain."""
    pair.attempt()
    pair.ends[cut_off].end_all(activations=True, bulk=True)
    pair.deliver()
    assert not pair.connected
    for _ in range(2):
        pair.attempt(2)
        pair.now_s += RETRY_S
    assert pair.connected
    for name, end in pair.ends.items():
        (other,) = set(NAMES) - {name}
        assert end.lost([plan(other, 2)]) == [other], "frames of this configuration are missing"


def test_a_lost_process_stays_lost_while_its_connection_is_gone(pair: Pair) -> None:
    pair.attempt()
    pair.bulk.cut("w1")
    pair.deliver()
    w0 = pair.ends["w0"]
    w0.enter([plan("w0", 1), plan("w1", 1)])
    assert w0.lost([plan("w1", 1)]) == ["w1"]
    # A successor of that name is another process.
    assert w0.lost([replace(plan("w1", 1), incarnation="w1-2")]) == []
    w0.enter([plan("w0", 1)])
    assert w0.lost([plan("w1", 1)]) == [], "nothing of a worker that is no member is missed"


def test_former_members_of_a_group_reach_each_other_without_an_introduction(pair: Pair) -> None:
    own = pair.ends["w0"]
    assert own.reaches("w1") is False
    pair.attempt()
    own.introduce(plan("w0", 2), [plan("w1", 2)], timeout_s=60.0)  # no effect: connected already
    assert own.reaches("w1") is True
    own.end_all(activations=False, bulk=True)
    assert own.reaches("w1") is False
