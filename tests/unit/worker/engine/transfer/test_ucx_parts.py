"""The parts of a UCX lane over a transport in memory: connections, traffic, heartbeats."""

import secrets
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from services.common.clock import monotonic_s
from services.common.protocol import PROTOCOL_VERSION
from services.worker.engine.transfer import connection_table
from services.worker.engine.transfer.connection_table import UNPROVEN_MAX
from services.worker.engine.transfer.errors import LaneFull, PeerUnknown, UcxUnavailable
from services.worker.engine.transfer.frame import Frame
from services.worker.engine.transfer.lane import PeerConnected, PeerLost
from services.worker.engine.transfer.receive_check import WAIT_S
from services.worker.engine.transfer.traffic import STRAY_MAX
from services.worker.engine.transfer.ucx_transport import IncomingMessage
from tests.support.integer_group import failing
from tests.support.lane_end import (
    LaneEnd,
    MemoryEndpoint,
    MemoryTransport,
    Request,
    step_until,
)
from tests.support.transfer import NONCE, Note, bytes_of

Open = Callable[..., LaneEnd]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Create ends that can reach each other."""
    peers: dict[bytes, MemoryTransport] = {}
    ends: list[LaneEnd] = []

    def make(worker_id: str, **settings: Any) -> LaneEnd:
        ends.append(LaneEnd(worker_id, peers, **settings))
        return ends[-1]

    yield make
    for end in ends:
        end.close()


def pair(opened: Open, **settings: Any) -> tuple[LaneEnd, LaneEnd]:
    """Two ends, connected."""
    ours, theirs = opened("ours", **settings), opened("theirs", **settings)
    join(ours, theirs)
    return ours, theirs


def join(ours: LaneEnd, theirs: LaneEnd) -> None:
    """Connect them and discard the events."""
    theirs.connections.expect(ours.identity, NONCE)
    ours.connect(theirs, NONCE)
    step_until(lambda: ours.news and theirs.news, ours, theirs)
    assert ours.news == [PeerConnected(theirs.identity)]
    assert theirs.news == [PeerConnected(ours.identity)]
    for end in (ours, theirs):
        end.news.clear()
        end.transport.fetched = 0


def note(text: str, size_bytes: int = 0) -> Frame:
    return Frame("g", 1, Note(text), bytes_of(size_bytes))


def connection_of(end: LaneEnd, to: str = "theirs") -> Any:
    connection = end.connections.find(to)
    assert connection is not None
    return connection


def queue(end: LaneEnd, frame: Frame, to: str = "theirs") -> Any:
    return connection_of(end, to).queue(frame)


def texts(frames: list[Frame]) -> list[str]:
    return [frame.header.text for frame in frames]


# --- connections


def test_frames_flow_after_mutual_authentication(opened: Open) -> None:
    ours, theirs = pair(opened)
    sent = [queue(ours, note(text)) for text in "ab"]
    queue(theirs, note("c"), to="ours")
    step_until(lambda: len(theirs.frames) == 2 and ours.frames, ours, theirs)
    assert texts(theirs.frames) == ["a", "b"]
    assert texts(ours.frames) == ["c"]
    assert all(frame.done and frame.error is None for frame in sent)


def test_frames_may_be_queued_before_the_handshake(opened: Open) -> None:
    ours, theirs = opened("ours"), opened("theirs")
    theirs.connections.expect(ours.identity, NONCE)
    greet = ours.connections.dial("theirs", theirs.address, NONCE)
    queue(ours, note("early"))
    greet()
    step_until(lambda: theirs.frames, ours, theirs)
    assert texts(theirs.frames) == ["early"]


def test_a_peer_is_connected_once_its_data_arrives_through_the_transport(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """A packet filter may pass the handshake and block the transport."""
    caplog.set_level("WARNING", logger=connection_table.__name__)
    ours, theirs = opened("ours"), opened("theirs")
    theirs.transport.deaf = True
    theirs.connections.expect(ours.identity, NONCE)
    ours.connect(theirs, NONCE)
    step_until(lambda: ours.news, ours, theirs)
    assert ours.news == [PeerConnected(theirs.identity)], "this direction is fine"
    assert theirs.news == [] and theirs.connections.find("ours") is not None
    theirs.heartbeats.tick(monotonic_s() + theirs.config.connect_timeout_s)
    step_until(lambda: theirs.news and len(ours.news) == 2, ours, theirs)
    (lost,) = theirs.news
    assert isinstance(lost, PeerLost) and "can reach each other" in lost.reason
    assert "can reach each other" in caplog.text


def test_frames_before_the_welcome_are_queued(opened: Open) -> None:
    ours, theirs = opened("ours"), opened("theirs")
    theirs.connections.expect(ours.identity, NONCE)
    ours.connect(theirs, NONCE)
    step_until(lambda: theirs.connections.find("ours"), theirs)
    queue(theirs, note("early"), to="ours")
    theirs.traffic.drive(monotonic_s() + 60)
    ours.traffic.drive(monotonic_s() + 60)  # reads no socket, so the Welcome is still to come
    assert ours.transport.fetched == 2 and ours.news == []
    step_until(lambda: ours.frames, ours, theirs)
    assert ours.news == [PeerConnected(theirs.identity)] and texts(ours.frames) == ["early"]


def test_a_dialling_peer_that_cannot_be_reached_is_lost(opened: Open) -> None:
    """The listening side then expects the peer again."""
    ours, theirs = opened("ours"), opened("theirs")
    theirs.connections.expect(ours.identity, NONCE)
    greet = ours.connections.dial("theirs", theirs.address, NONCE)
    del theirs.transport.peers[ours.transport.address]
    greet()
    step_until(lambda: theirs.news and ours.news, ours, theirs)
    (lost,) = theirs.news
    assert isinstance(lost, PeerLost) and lost.peer == ours.identity


def test_the_log_names_the_lane_and_the_peer(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker has two lanes to each peer, which are lost separately."""
    caplog.set_level("INFO", logger=connection_table.__name__)
    ours, _ = pair(opened, name="bulk lane")
    connection = connection_of(ours)
    ours.connections.lose(connection, "the network is gone")
    messages = [record.getMessage() for record in caplog.records]
    assert "the bulk lane to worker theirs uses test/memory" in messages
    assert messages[-1] == "the bulk lane to worker theirs is lost: the network is gone"


@pytest.mark.parametrize("expected", [True, False])
def test_a_peer_without_the_nonce_is_refused(opened: Open, expected: bool) -> None:
    ours, theirs = opened("ours"), opened("theirs")
    if expected:
        theirs.connections.expect(ours.identity, NONCE)
    ours.connect(theirs, secrets.token_bytes(16))
    sent = queue(ours, note("never"))
    step_until(lambda: ours.news, ours, theirs)
    assert [type(event) for event in ours.news] == [PeerLost]
    assert isinstance(sent.error, PeerUnknown)
    # A peer that never proved itself makes no event.
    assert theirs.news == [] and not theirs.connections.by_descriptor


def test_a_version_mismatch_is_reported_to_the_peer(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = opened("ours"), opened("theirs")
    theirs.connections.expect(ours.identity, NONCE)
    monkeypatch.setattr(connection_table, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    ours.connect(theirs, NONCE)
    step_until(lambda: ours.news, ours, theirs)
    (lost,) = ours.news
    assert f"ours speaks version {PROTOCOL_VERSION + 1}" in lost.reason


def test_a_newer_connection_replaces_the_older(opened: Open) -> None:
    ours, theirs = pair(opened)
    older = connection_of(ours)
    theirs.connections.expect(ours.identity, NONCE)
    ours.connect(theirs, NONCE)
    step_until(lambda: PeerConnected(theirs.identity) in ours.news, ours, theirs)
    assert ours.news[0] == PeerLost(theirs.identity, "a newer connection replaced it")
    assert ours.connections.find("theirs") is not older
    assert theirs.news[-1] == PeerConnected(ours.identity)
    queue(ours, note("x"))
    step_until(lambda: theirs.frames, ours, theirs)


def test_a_peer_may_come_back_before_its_old_connection_is_missed(opened: Open) -> None:
    ours, theirs = pair(opened)
    connection = connection_of(ours)
    theirs.connections.expect(ours.identity, NONCE)
    # The listening end hears of the new connection first.
    ours.connections.forget("theirs")
    ours.poll.unregister(connection.link.fileno())
    ours.connect(theirs, NONCE)
    step_until(lambda: len(theirs.news) == 2, ours, theirs)
    assert theirs.news == [
        PeerLost(ours.identity, "a newer connection replaced it"),
        PeerConnected(ours.identity),
    ]
    ours.poll.register(connection.link.fileno())


def test_a_disconnect_is_an_event_only_at_the_peer(opened: Open) -> None:
    ours, theirs = pair(opened)
    connection = ours.connections.forget("theirs")
    assert connection is not None
    ours.connections.disconnect(connection)
    step_until(lambda: theirs.news, ours, theirs)
    assert theirs.news == [PeerLost(ours.identity, "the peer ended the connection")]
    assert ours.news == [] and ours.connections.find("theirs") is None


def test_a_lost_connection_lingers_while_its_memory_is_in_use(opened: Open) -> None:
    ours, _ = pair(opened)
    ours.transport.hold = True
    sent = queue(ours, note("x"))
    ours.step()
    connection = connection_of(ours)
    ours.connections.lose(connection, "the test says so")
    ours.step()
    assert ours.connections.lingering == [connection] and not sent.done
    ours.transport.release("aborted")
    ours.step()
    assert ours.connections.lingering == []
    assert "the test says so" in str(sent.error)


def test_out_of_order_messages_end_the_connection(opened: Open) -> None:
    ours, theirs = pair(opened)
    connection = connection_of(ours)
    connection.link.send(connection_table.Hello(connection.facts, b""))
    step_until(lambda: theirs.news, ours, theirs)
    assert theirs.news == [PeerLost(ours.identity, "the peer sent an unexpected control message")]


def test_connections_without_a_handshake_are_bounded(opened: Open) -> None:
    ours = opened("ours")
    sockets = [socket.socketpair() for _ in range(UNPROVEN_MAX + 1)]
    for connection, _ in sockets:
        ours.connections.accept(connection_table.ControlLink(Tcp(connection)))
    assert len(ours.connections.by_descriptor) == UNPROVEN_MAX
    assert sockets[-1][1].recv(1) == b""
    for _, other in sockets:
        other.close()


class Tcp(socket.socket):
    """A socket of a pair, without the options of TCP."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(fileno=connection.detach())

    def setsockopt(self, *arguments: Any) -> None:
        """Ignored."""


# --- traffic


def test_a_failed_send_loses_the_peer(opened: Open) -> None:
    ours, theirs = pair(opened)
    ours.transport.hold = True
    sent = queue(ours, note("x"))
    ours.step()
    ours.transport.release("no route")
    ours.step()
    assert ours.news == [PeerLost(theirs.identity, "no route")]
    assert isinstance(sent.error, PeerUnknown)


def test_a_thread_that_sends_drives_its_own_connection(opened: Open) -> None:
    ours, theirs = pair(opened)
    connection = connection_of(ours)
    sent = queue(ours, note("x"))
    ours.traffic.send_now(connection, monotonic_s() + 60)
    assert sent.done
    queue(theirs, note("y"), to="ours")
    theirs.step()
    ours.traffic.send_now(connection, monotonic_s() + 60)
    assert texts(ours.take()) == ["y"]


def test_a_sender_refused_for_want_of_room_is_woken_when_there_is_some(opened: Open) -> None:
    ours, theirs = pair(opened, queue_bytes_max=1000)
    ours.transport.hold = True
    queue(ours, note("x", 2000))
    ours.traffic.drive(monotonic_s() + 60)
    with pytest.raises(LaneFull):
        queue(ours, note("y"))
    woken = ours.happened
    ours.transport.release()
    assert ours.traffic.drive(monotonic_s() + 60) and ours.happened == woken + 1
    queue(ours, note("y"))
    ours.transport.release()
    assert not ours.traffic.drive(monotonic_s() + 60) and ours.happened == woken + 1
    step_until(lambda: len(theirs.frames) == 2, theirs)


def test_room_freed_while_reaping_is_noticed(opened: Open) -> None:
    ours, theirs = pair(opened, received_bytes_max=3000)
    for text in "abc":
        queue(ours, note(text, 2000))
    ours.step()
    until_s = monotonic_s() + 60
    theirs.traffic.drive(until_s)  # has room for two of them
    assert len(theirs.transport.inbox) == 1
    taken, waits = theirs.traffic.take(())
    assert len(taken) == 2 and waits, "a lane that is not notified would sleep now"
    theirs.traffic.drive(until_s)
    ((_, frame),), waits = theirs.traffic.take(())
    assert (frame.header.text, waits) == ("c", False)


def test_a_take_during_a_drive_is_notified_of_pending_messages(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair(opened, received_bytes_max=3000)
    queue(ours, note("a", 2000))
    ours.step()
    until_s = monotonic_s() + 60
    theirs.traffic.drive(until_s)
    for text in "bc":
        queue(ours, note(text, 2000))
    ours.step()
    reap, notified = theirs.traffic.reap, []

    def take_first() -> bool:
        notified.append(theirs.traffic.take(())[1])
        return reap()

    monkeypatch.setattr(theirs.traffic, "reap", take_first)
    theirs.traffic.drive(until_s)
    assert len(theirs.transport.inbox) == 1 and notified == [True]


def test_frames_without_a_connection_are_discarded(opened: Open) -> None:
    ours, _ = pair(opened, frame_bytes_max=1000)
    for size_bytes in (10, 1001):
        ours.transport.inbox.append(IncomingMessage(5, size_bytes, bytes_of(size_bytes)))
    ours.step()
    assert ours.transport.fetched == 1 and not ours.transport.inbox
    for _ in range(2 * STRAY_MAX):
        ours.transport.inbox.append(IncomingMessage(5, 10, bytes_of(10)))
    ours.step()
    assert ours.transport.fetched == 1 + 2 * STRAY_MAX
    assert ours.frames == []


def test_a_frame_that_is_too_large_loses_its_sender(opened: Open) -> None:
    ours, theirs = opened("ours"), opened("theirs", frame_bytes_max=5000)
    join(ours, theirs)
    queue(ours, note("x", 5000))
    step_until(lambda: theirs.news, ours, theirs)
    (lost,) = theirs.news
    assert "is too large" in lost.reason


def test_receiving_stops_while_the_engine_takes_nothing(opened: Open) -> None:
    ours, theirs = opened("ours"), opened("theirs", received_bytes_max=2500)
    join(ours, theirs)
    theirs.takes = False
    for text in "abcde":
        queue(ours, note(text, 1000))
    for _ in range(10):
        ours.step()
        theirs.step()
    assert len(theirs.transport.inbox) == 2
    taken, was_full = theirs.traffic.take(())
    assert was_full and [frame.header.text for _, frame in taken] == ["a", "b", "c"]
    theirs.step()
    assert texts(theirs.take()) == ["d", "e"]


def test_frames_of_a_peer_can_be_left_for_later(opened: Open) -> None:
    ours, theirs, third = opened("ours"), opened("theirs"), opened("third")
    join(ours, theirs)
    join(third, theirs)
    theirs.takes = False
    queue(ours, note("a"))
    queue(third, note("b"))
    for end in (ours, third, theirs):
        end.step()
    assert texts(theirs.take(leave=("ours",))) == ["b"]
    assert texts(theirs.take()) == ["a"]


# --- what a lost peer may have left


def checked(end: LaneEnd, *others: LaneEnd) -> bool:
    """Whether an end detects that it receives."""
    end.check.begin()
    step_until(lambda: not end.check.under_way or end.check.has_failed, end, *others)
    return not end.check.has_failed


def test_a_loopback_message_checks_receiving(opened: Open) -> None:
    ours, theirs = pair(opened)
    assert checked(ours, theirs)
    ours.transport.deaf = True
    assert not checked(ours, theirs)


def test_an_older_loopback_message_proves_nothing(opened: Open) -> None:
    ours = opened("ours")
    ours.check.begin()
    ours.check.begin()
    newest = ours.transport.inbox.pop()
    ours.step()
    assert ours.check.under_way and not ours.transport.inbox
    ours.transport.inbox.append(newest)
    ours.step()
    assert not ours.check.under_way


def test_successive_losses_do_not_delay_the_verdict(opened: Open) -> None:
    ours = opened("ours")
    ours.transport.deaf = True
    end_s = monotonic_s() + 60.0
    while not ours.check.has_failed:
        assert monotonic_s() < end_s
        ours.check.begin()
        ours.step()


@pytest.mark.parametrize("problem", ["it is not sent", "no sender", "no memory"])
def test_a_failed_receive_check_is_logged_and_harmless(
    opened: Open, problem: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = pair(opened)
    failure: dict[str, Any] = {
        "no sender": UcxUnavailable(problem),
        "no memory": MemoryError(problem),
    }
    if problem in failure:
        monkeypatch.setattr(ours.check, "_open_sender", failing(failure[problem]))
    else:
        monkeypatch.setattr(MemoryEndpoint, "send", lambda *_: Request(problem=problem))
    ours.check.begin()
    ours.step()
    assert not ours.check.under_way and problem in caplog.text
    assert ours.connections.find("theirs") is not None


def test_a_full_side_does_not_doubt_its_receiver(opened: Open) -> None:
    ours, theirs = pair(opened, received_bytes_max=1000)
    theirs.takes = False
    for _ in range(2):
        queue(ours, note("much", 1000))
    step_until(lambda: theirs.transport.fetched == 1, ours, theirs)
    theirs.check.begin()
    end_s = monotonic_s() + 2 * WAIT_S
    step_until(lambda: monotonic_s() > end_s, ours, theirs)
    assert theirs.check.under_way and not theirs.check.has_failed
    theirs.takes = True
    step_until(lambda: not theirs.check.under_way, ours, theirs)


def test_a_peer_dialled_during_a_ucx_restart_gets_the_new_address(opened: Open) -> None:
    ours, theirs = opened("ours"), opened("theirs")
    theirs.connections.expect(ours.identity, NONCE)
    greet = ours.connections.dial("theirs", theirs.address, NONCE)
    ours.transport.renew(b"another")
    greet()
    step_until(lambda: ours.news and theirs.news, ours, theirs)
    queue(theirs, note("here"), to="ours")
    step_until(lambda: ours.frames, ours, theirs)


@pytest.mark.parametrize("route", ["tcp/eth0", "test/memory"])
def test_a_lost_peer_is_suspected_if_it_shared_memory(opened: Open, route: str) -> None:
    ours, theirs = opened("ours"), opened("theirs")
    theirs.transport.routes = (route,)
    join(ours, theirs)
    assert not theirs.connections.lost_in_memory
    ours.close()
    step_until(lambda: theirs.news, theirs)
    assert theirs.connections.lost_in_memory == route.endswith("memory")


# --- heartbeats


def test_a_silent_peer_is_lost(opened: Open) -> None:
    ours, theirs = pair(opened, heartbeat_s=1.0, silence_timeout_s=10.0)
    now_s = monotonic_s()
    for passed_s in range(1, 10):
        ours.heartbeats.tick(now_s + passed_s)
    assert ours.connections.events() == []
    ours.heartbeats.tick(now_s + 11)
    (lost,) = ours.connections.events()
    assert lost == PeerLost(theirs.identity, "the peer sent no heartbeat for 10 s")


def test_a_process_that_was_stopped_does_not_drop_its_peers(opened: Open) -> None:
    ours, _ = pair(opened, heartbeat_s=1.0, silence_timeout_s=10.0)
    ours.heartbeats.tick(monotonic_s() + 1000)
    assert ours.connections.events() == []


def test_heartbeats_are_sent_at_their_interval(opened: Open) -> None:
    ours, theirs = pair(opened, heartbeat_s=1.0)
    connection = connection_of(theirs, "ours")
    connection.heard_s = 0.0
    ours.heartbeats.tick(ours.heartbeats.ticked_s + 0.5)
    theirs.step()
    assert connection.heard_s == 0.0
    ours.heartbeats.tick(ours.heartbeats.ticked_s + 0.5)
    step_until(lambda: connection.heard_s > 0.0, theirs)


def test_a_sender_is_notified_when_its_frames_are_taken(opened: Open) -> None:
    ours, theirs = pair(opened, frames_in_flight_max=8)
    connection = connection_of(theirs, "ours")
    queue(ours, note("x"))
    step_until(lambda: len(theirs.frames) == 1, ours, theirs)
    assert not connection.owes_acknowledgement
    queue(ours, note("x"))
    step_until(lambda: len(theirs.frames) == 2, ours, theirs)
    assert connection.owes_acknowledgement
    theirs.heartbeats.acknowledge()
    assert not connection.owes_acknowledgement
    for _ in range(8 - 2):
        queue(ours, note("x"))
    step_until(lambda: can_queue(ours), ours, theirs)


def can_queue(end: LaneEnd) -> bool:
    """Whether another frame may be in flight."""
    try:
        queue(end, note("x"))
    except LaneFull:
        return False
    return True


def test_a_handshake_has_a_deadline(opened: Open) -> None:
    ours, theirs = opened("ours"), opened("theirs")
    ours.connect(theirs, NONCE)
    ours.heartbeats.tick(monotonic_s() + ours.config.connect_timeout_s)
    (lost,) = ours.connections.events()
    assert lost.reason == "no valid handshake in time"
