import pytest

from services.worker.engine.transfer.errors import LaneFull, PeerUnknown
from services.worker.engine.transfer.frame import Frame
from services.worker.engine.transfer.gate import ActivationGate
from services.worker.engine.transfer.lane import Identity, Sent
from tests.support.local_lane import QUEUED_FRAMES_MAX, LocalNetwork
from tests.support.transfer import CODEC, NONCE, Note


def test_the_gate_is_busy_while_entered() -> None:
    gate = ActivationGate()
    clears: list[bool] = []
    gate.on_clear(lambda: clears.append(gate.busy))
    gate.enter()
    gate.enter()
    gate.leave()
    assert gate.busy and clears == []
    gate.leave()
    assert not gate.busy and clears == [False]


def test_leaving_the_gate_without_entering_it_is_an_error() -> None:
    with pytest.raises(ValueError, match="without having entered"):
        ActivationGate().leave()


def test_the_gate_is_busy_until_the_frame_is_sent() -> None:
    network, gate = LocalNetwork(CODEC), ActivationGate()
    ours, theirs = network.lane(Identity("a", "1")), network.lane(Identity("b", "1"))
    frame = Frame("g", 1, Note("x"))
    with pytest.raises(PeerUnknown):
        gate.send(ours, "b", frame)
    assert not gate.busy
    theirs.expect(Identity("a", "1"), NONCE)
    ours.connect("b", theirs.address, NONCE)
    gate.send(ours, "b", frame)
    assert gate.busy
    network.pump()
    assert not gate.busy
    for _ in range(QUEUED_FRAMES_MAX):
        gate.send(ours, "b", frame)
    with pytest.raises(LaneFull):
        gate.send(ours, "b", frame)
    network.pump()
    assert not gate.busy


def test_a_completed_frame_calls_back_at_once() -> None:
    error, calls = PeerUnknown("gone"), []
    sent = Sent()
    sent.when_done(lambda: calls.append("waited"))
    assert calls == [] and not sent.done
    sent.finish(error)
    sent.when_done(lambda: calls.append("at once"))
    assert calls == ["waited", "at once"] and sent.error is error
