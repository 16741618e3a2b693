import select

import pytest

from services.worker.engine.transfer.errors import LaneClosed, LaneFull, PeerUnknown
from services.worker.engine.transfer.frame import Frame
from services.worker.engine.transfer.lane import Identity, PeerConnected, PeerLost
from tests.support.local_lane import QUEUED_FRAMES_MAX, LocalLane, LocalNetwork
from tests.support.transfer import CODEC, NONCE, Note, bytes_of

A, B = Identity("a", "1"), Identity("b", "1")


def note(text: str, payload: object = b"") -> Frame:
    return Frame("g", 1, Note(text), payload)


def pair() -> tuple[LocalNetwork, LocalLane, LocalLane]:
    network = LocalNetwork(CODEC)
    a, b = network.lane(A), network.lane(B)
    b.expect(A, NONCE)
    a.connect("b", b.address, NONCE)
    return network, a, b


def is_readable(lane: LocalLane) -> bool:
    return bool(select.select([lane.fileno()], [], [], 0)[0])


def texts(lane: LocalLane) -> list[str]:
    headers = [frame.header for _, frame in lane.receive()]
    return [header.text for header in headers if isinstance(header, Note)]


def test_frames_go_both_ways_in_order() -> None:
    network, a, b = pair()
    sent = [a.send("b", note(str(number), bytes_of(number))) for number in range(5)]
    assert not any(frame.done for frame in sent)
    network.pump()
    assert all(frame.done and frame.error is None for frame in sent)
    assert (a.events(), b.events()) == ([PeerConnected(B)], [PeerConnected(A)])
    received = b.receive()
    assert [(peer, frame.sequence) for peer, frame in received] == [("a", n) for n in range(5)]
    assert all(
        frame.payload.tobytes() == bytes_of(n).tobytes() for n, (_, frame) in enumerate(received)
    )
    assert (received[0][1].sender, received[0][1].incarnation) == ("a", "1")
    b.send("a", note("back"))
    network.pump()
    assert texts(a) == ["back"]


def test_the_descriptor_is_readable_while_something_waits() -> None:
    network, a, b = pair()
    network.pump()
    a.receive(), b.receive()
    assert not is_readable(a) and not is_readable(b)
    a.send("b", note("x"))
    network.pump()
    assert is_readable(a) and is_readable(b)
    b.receive()
    assert not is_readable(b)


def test_a_held_link_keeps_its_frames() -> None:
    network, a, b = pair()
    network.pump()
    network.hold("a", "b")
    a.send("b", note("late"))
    b.send("a", note("other way"))
    assert network.pump() == 1
    assert (texts(a), texts(b)) == (["other way"], [])
    network.release("a", "b")
    network.pump()
    assert texts(b) == ["late"]


def test_queued_frames_are_bounded() -> None:
    network, a, b = pair()
    network.pump()
    for _ in range(QUEUED_FRAMES_MAX):
        a.send("b", note(""))
    with pytest.raises(LaneFull):
        a.send("b", note(""))
    network.pump()
    assert len(b.receive()) == QUEUED_FRAMES_MAX
    a.send("b", note(""))


@pytest.mark.parametrize("nonce", [NONCE[::-1], None])
def test_a_peer_without_the_nonce_is_refused(nonce: bytes | None) -> None:
    network = LocalNetwork(CODEC)
    a, b = network.lane(A), network.lane(B)
    if nonce is not None:
        b.expect(A, NONCE)
    a.connect("b", b.address, nonce or NONCE)
    sent = a.send("b", note(""))
    network.pump()
    assert [type(event) for event in a.events()] == [PeerLost]
    assert (b.events(), b.receive()) == ([], [])
    assert sent.done and isinstance(sent.error, PeerUnknown)
    with pytest.raises(PeerUnknown):
        a.send("b", note(""))


def test_a_cut_peer_loses_frames_in_flight() -> None:
    network, a, b = pair()
    network.pump()
    sent = b.send("a", note("lost"))
    a.events(), b.events()
    network.cut("a")
    assert [event.peer for event in b.events()] == [A]
    assert [event.peer for event in a.events()] == [B]
    network.pump()
    assert texts(a) == []
    assert sent.done and sent.error is not None
    with pytest.raises(PeerUnknown):
        b.send("a", note(""))


def test_the_side_that_disconnects_gets_no_event() -> None:
    network, a, b = pair()
    network.pump()
    a.events(), b.events()
    a.disconnect("b")
    assert a.events() == []
    assert [type(event) for event in b.events()] == [PeerLost]


def test_a_restarted_peer_connects_again() -> None:
    network, _, b = pair()
    network.pump()
    again = network.lane(Identity("a", "2"))
    b.expect(again.identity, NONCE)
    again.connect("b", b.address, NONCE)
    again.send("b", note("new"))
    network.pump()
    assert [type(event) for event in b.events()] == [PeerConnected, PeerLost, PeerConnected]
    ((_, frame),) = b.receive()
    assert (frame.incarnation, frame.sequence) == ("2", 0)


def test_a_closed_lane_sends_nothing() -> None:
    network, a, b = pair()
    network.pump()
    a.close()
    a.close()
    with pytest.raises(LaneClosed):
        a.send("b", note(""))
    assert isinstance(b.events()[-1], PeerLost)
