"""Frames wait in order, and none is lost to a full queue."""

import logging

import numpy as np
import pytest

from services.core.changeover.frames import AllAdopted, ForeignBlocksFreed
from services.worker.engine.pipeline import links as links_module
from services.worker.engine.pipeline.frames import KINDS
from services.worker.engine.pipeline.links import Links
from services.worker.engine.transfer.errors import LaneFull
from services.worker.engine.transfer.frame import FrameCodec
from services.worker.engine.transfer.gate import ActivationGate
from services.worker.engine.transfer.lane import Identity
from tests.support.local_lane import QUEUED_FRAMES_MAX, LocalNetwork
from tests.support.transfer import NONCE


class Ends:
    """Three members; "a" listens to both others."""

    def __init__(self) -> None:
        self.network = LocalNetwork(FrameCodec(KINDS))
        lanes = {name: self.network.lane(Identity(name, "1")) for name in "abc"}
        for name in "bc":
            lanes["a"].expect(Identity(name, "1"), NONCE)
            lanes[name].connect("a", lanes["a"].address, NONCE)
        self.network.pump()
        self.gates = {name: ActivationGate() for name in lanes}
        self.links = {name: Links(lane, name, self.gates[name]) for name, lane in lanes.items()}

    def enter(self, epoch: int, *names: str) -> None:
        for name in names:
            self.links[name].enter("g", epoch)

    def send(self, sender: str, numbers: range) -> None:
        for number in numbers:
            self.links[sender].send("a", ForeignBlocksFreed(number))

    def received(self) -> list[tuple[str, int]]:
        """Senders and numbers of the frames that "a" takes in a turn."""
        self.network.pump()
        taken = self.links["a"].receive()
        return [
            (command.peer, command.frame.blocks)
            for command in taken
            if isinstance(command.frame, ForeignBlocksFreed)
        ]


@pytest.fixture
def ends(caplog: pytest.LogCaptureFixture) -> Ends:
    caplog.set_level(logging.WARNING)
    return Ends()


def test_frames_of_another_epoch_wait_or_are_dropped(ends: Ends) -> None:
    ends.enter(1, "a", "b")
    ends.enter(2, "c")
    ends.send("b", range(2))
    ends.send("c", range(10, 12))
    assert ends.received() == [("b", 0), ("b", 1)]
    ends.enter(2, "a")
    ends.send("b", range(2, 4))
    assert ends.received() == [("c", 10), ("c", 11)]


def test_a_lagging_member_loses_no_frame(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(links_module, "EARLY_MAX", 5)
    ends.enter(1, "a", "b")
    ends.enter(2, "c")
    for first in range(0, 30, 3):
        ends.send("c", range(first, first + 3))
        ends.send("b", range(first, first + 1))
        assert ends.received() == [("b", first)], "the old epoch's frames must not wait"
    assert len(ends.links["a"]._fence.early) <= 5 + 3
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1 and "frames of c are of a newer epoch than 1 of g" in messages[0]
    ends.enter(2, "a")
    taken = ends.received() + ends.received()
    assert taken == [("c", number) for number in range(30)]


def test_early_frames_are_bounded_in_bytes(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "EARLY_BYTES_MAX", 3000)
    ends.enter(2, "c")
    for _ in range(5):
        ends.links["c"].send("a", AllAdopted(), np.zeros(1024, np.uint8))
        ends.received()
    assert len(ends.links["a"]._fence.early) == 3
    ends.enter(2, "a")
    assert len(ends.links["a"].receive()) == 5


def test_frames_refused_by_a_full_lane_are_sent_later(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    count = 2 * QUEUED_FRAMES_MAX + 10
    buffer = np.zeros(1, np.uint8)
    for number in range(count):
        buffer[0] = number % 251
        ends.links["b"].send("a", ForeignBlocksFreed(number), buffer)
    assert len(caplog.records) == 1 and "frames for it are queued here" in caplog.text
    taken = []
    while len(taken) < count:
        ends.network.pump()
        fresh = ends.links["a"].receive()
        assert fresh, "frames are missing"
        taken += [(command.frame.blocks, command.payload[0]) for command in fresh]  # type: ignore[union-attr]
        ends.links["b"].receive()
    assert taken == [(number, number % 251) for number in range(count)]
    ends.send("b", range(1))
    assert ends.received() == [("b", 0)]
    assert not ends.gates["b"].busy


def test_frames_for_a_lost_peer_are_dropped_at_once(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    ends.send("b", range(QUEUED_FRAMES_MAX + 7))
    ends.network.cut("a")
    caplog.clear()
    ends.links["b"].receive()
    assert [record.getMessage() for record in caplog.records] == [
        "a is not connected: 7 frames not sent"
    ]
    assert not ends.gates["b"].busy
    ends.send("b", range(1))
    assert "a is not connected: ForeignBlocksFreed not sent" in caplog.text


def test_a_stalled_peer_times_out(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "UNSENT_MAX", 3)
    ends.send("b", range(QUEUED_FRAMES_MAX + 3))
    with pytest.raises(LaneFull, match="a accepts no frames: 3 are queued for it; see its log"):
        ends.send("b", range(1))
