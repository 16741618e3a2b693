"""Two processes that exchange frames and transfers over UCX, also when one is lost."""

import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest

from services.common.protocol import PROTOCOL_VERSION
from services.core.changeover.transfer_outcome import TransferOutcome, TransferStatus
from services.worker.engine.transfer.errors import (
    LaneClosed,
    LaneFull,
    PeerUnknown,
    UcxUnavailable,
)
from services.worker.engine.transfer.frame import Bytes, Frame
from services.worker.engine.transfer.gate import ActivationGate
from services.worker.engine.transfer.lane import Identity, Lane, LaneEvent, PeerConnected, PeerLost
from services.worker.engine.transfer.mover import CHUNK_BYTES_MAX, Mover, MoverConfig, MoverEvent
from services.worker.engine.transfer.pieces import PackBytes, parameter_pieces
from services.worker.engine.transfer.ucx_config import UcxConfig, UcxLaneConfig
from services.worker.engine.transfer.ucx_lane import UcxLane
from services.worker.engine.transfer.ucx_transport import load_ucxx
from tests.support.refusing_address import refusing_address
from tests.support.transfer import CODEC, NONCE, Memory, Note, bytes_of, empty_like, filled
from tests.support.transfer_peer import PEER, SLAB_BYTES, TESTER, digest_of, lane

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0

T = TypeVar("T")


def until(check: Callable[[], T], *sources: Any) -> T:
    """Wait until `check` returns a true value, called again after events of `sources`."""
    end_s = time.monotonic() + DEADLINE_S
    while not (value := check()):
        assert time.monotonic() < end_s, f"still {value!r} after {DEADLINE_S} s"
        select.select(sources, [], [], 0.2)
    return value


class PeerProcess:
    """The process of `tests.support.transfer_peer`."""

    def __init__(self, transports: str) -> None:
        command = [sys.executable, "-m", "tests.support.transfer_peer", transports]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        addresses = self.read()
        self.activations, self.bulk = addresses["activations"], addresses["bulk"]

    def read(self) -> dict[str, str]:
        """The next message of the process."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the peer has died"
        message: dict[str, str] = json.loads(line)
        return message

    def read_outcome(self, status: TransferStatus) -> dict[str, str]:
        """The next transfer with this status that its mover reports."""
        while (message := self.read()).get("status") != status:
            pass
        return message

    def order(self, transfer_id: str) -> None:
        """Order it to send its slab."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{transfer_id}\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        """Suspend it; returns once it is stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def end(self) -> None:
        """Kill it in any state."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Collector:
    """Frames and events of a lane."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.frames: list[Frame] = []
        self.news: list[LaneEvent] = []

    def look(self) -> "Collector":
        self.frames += [frame for _, frame in self.lane.receive()]
        self.news += self.lane.events()
        return self

    def wait_frames(self, count: int) -> list[Frame]:
        until(lambda: len(self.look().frames) >= count, self.lane)
        return self.frames

    def wait_news(self, kind: type[LaneEvent]) -> Any:
        def matching() -> list[LaneEvent]:
            return [event for event in self.look().news if isinstance(event, kind)]

        return until(matching, self.lane)[-1]


@pytest.fixture(params=["sm,tcp", "tcp"])
def transports(request: pytest.FixtureRequest) -> str:
    """The transports of UCX."""
    try:
        load_ucxx()
    except UcxUnavailable as error:
        pytest.skip(str(error))
    return str(request.param)


@pytest.fixture
def peer(transports: str) -> Iterator[PeerProcess]:
    """A running peer process that expects the test's connection."""
    process = PeerProcess(transports)
    yield process
    process.end()


@pytest.fixture
def ours(transports: str) -> Iterator[UcxLane]:
    """A lane of the test."""
    made = lane(TESTER, transports)
    yield made
    made.close()


def note(text: str, payload: object = b"") -> Frame:
    return Frame("g", 1, Note(text), payload)


SIZES = [0, 1, 100, 8192, 65_535, 65_536, 300_000, 5 << 20]


def test_frames_of_any_size_arrive_in_order(peer: PeerProcess, ours: UcxLane) -> None:
    ours.connect("peer", peer.activations, NONCE)
    payloads = [bytes_of(size, size) for size in SIZES * 3]
    sent = [ours.send("peer", note(str(n), payload)) for n, payload in enumerate(payloads)]
    collector = Collector(ours)
    frames = collector.wait_frames(len(payloads))
    assert [frame.header for frame in frames] == [Note(str(n)) for n in range(len(payloads))]
    for frame, payload in zip(frames, payloads, strict=True):
        frame.verify()
        assert np.array_equal(frame.payload, payload)
        assert (frame.sender, frame.incarnation) == ("peer", "1")
    until(lambda: all(note_sent.done for note_sent in sent), ours)
    assert all(note_sent.error is None for note_sent in sent)
    assert collector.news == [PeerConnected(PEER)]


def test_more_frames_than_may_be_in_flight(peer: PeerProcess, ours: UcxLane) -> None:
    ours.connect("peer", peer.activations, NONCE)
    collector = Collector(ours)
    for number in range(30):
        for _ in range(100):
            ours.send("peer", note("x", b"1234"))
        assert len(collector.wait_frames(100 * (number + 1))) == 100 * (number + 1)


@pytest.mark.parametrize("size_bytes", [1000, 1 << 20])
def test_a_receiver_that_does_not_read_stops_its_sender(transports: str, size_bytes: int) -> None:
    config = UcxLaneConfig(
        ucx=UcxConfig(transports),
        queue_bytes_max=8 << 20,
        received_bytes_max=4 << 20,
        frames_in_flight_max=64,
        silence_timeout_s=30.0,
        hello_timeout_s=5.0,
    )
    ours, theirs = (UcxLane(identity, CODEC, config) for identity in (TESTER, PEER))
    theirs.expect(TESTER, NONCE)
    ours.connect("peer", theirs.address, NONCE)
    sent = 0
    with pytest.raises(LaneFull):
        while sent < 1000:
            ours.send("peer", note(str(sent), bytes_of(size_bytes)))
            sent += 1
    assert sent <= 64
    collector = Collector(theirs)
    frames = collector.wait_frames(sent)
    assert [frame.header for frame in frames] == [Note(str(number)) for number in range(sent)]
    until(lambda: accepts(ours))
    ours.close()
    theirs.close()


def attend(lane: Lane) -> list[Frame]:
    """Wait for the next frames as an engine does."""
    while not (frames := [frame for _, frame in lane.receive()]):
        with lane.attended():
            ready, _, _ = select.select([lane], [], [], DEADLINE_S)
        assert ready, f"nothing came within {DEADLINE_S} s"
    return frames


def quiet_pair(transports: str) -> tuple[UcxLane, UcxLane]:
    """Connected lanes whose threads check deadlines every 250 s, so only frames wake them."""
    config = UcxLaneConfig(
        ucx=UcxConfig(transports),
        heartbeat_s=1000.0,
        hello_timeout_s=1000.0,
        silence_timeout_s=5000.0,
    )
    ours, theirs = (UcxLane(identity, CODEC, config) for identity in (TESTER, PEER))
    theirs.expect(TESTER, NONCE)
    ours.connect("peer", theirs.address, NONCE)
    return ours, theirs


@pytest.mark.parametrize("size_bytes", [100, 300_000])
def test_a_waiting_lane_is_woken_by_a_frame(transports: str, size_bytes: int) -> None:
    ours, theirs = quiet_pair(transports)
    count, payload = 500, bytes_of(size_bytes)

    def answer() -> None:
        for _ in range(count):
            (frame,) = attend(theirs)
            theirs.send(TESTER.worker_id, Frame("g", 1, frame.header, frame.payload))

    answering = threading.Thread(target=answer)
    answering.start()
    for number in range(count):
        ours.send("peer", note(str(number), payload))
        (frame,) = attend(ours)
        assert frame.header == Note(str(number))
        assert np.array_equal(frame.payload, payload)
    answering.join()
    ours.close()
    theirs.close()


def test_frames_that_arrive_while_the_receiver_sends_and_computes(transports: str) -> None:
    """Both send while neither receives; a send rarely happens to receive as well."""
    ours, theirs = quiet_pair(transports)
    Collector(ours).wait_news(PeerConnected)
    Collector(theirs).wait_news(PeerConnected)
    for number in range(100):
        size_bytes = (100, 300_000)[number % 2]
        ours.send("peer", note("to", bytes_of(size_bytes)))
        theirs.send(TESTER.worker_id, note("from", bytes_of(size_bytes)))
        for receiver in (theirs, ours):
            ready, _, _ = select.select([receiver], [], [], DEADLINE_S)
            assert ready and len(Collector(receiver).wait_frames(1)) == 1
    ours.close()
    theirs.close()


def test_a_lane_that_closes_during_a_wait(peer: PeerProcess, ours: UcxLane) -> None:
    ours.connect("peer", peer.activations, NONCE)
    Collector(ours).wait_news(PeerConnected)
    with ours.attended():
        ours.close()
    with pytest.raises(LaneClosed):
        ours.receive()


def accepts(lane: Lane) -> bool:
    """Whether a frame to the peer can be queued."""
    try:
        lane.send("peer", note(""))
    except LaneFull:
        return False
    return True


class Bulk:
    """The test's connected bulk lane, with a mover in a thread."""

    def __init__(self, ours: UcxLane, peer: PeerProcess, memory: Memory) -> None:
        self.memory = memory
        self.gate = ActivationGate()
        self.mover = Mover(ours, self.gate, MoverConfig(), memory.standing, memory.unpack)
        ours.connect("peer", peer.bulk, NONCE)
        self.news: list[MoverEvent] = []
        self.mover.start()

    def send(self, transfer_id: str, pack: PackBytes | None = None) -> None:
        cut = self.memory.slab_cut(transfer_id)
        read = pack or self.memory.pack_slab
        pieces = parameter_pieces(cut, partial(self.mover.piece_bytes, "peer"), read)
        self.mover.send(transfer_id, "peer", "g", 1, pieces)

    def wait(self, kind: type[MoverEvent]) -> Any:
        def matching() -> list[MoverEvent]:
            self.news += self.mover.events()
            return [event for event in self.news if isinstance(event, kind)]

        return until(matching, self.mover)[-1]

    def wait_outcome(self, status: TransferStatus) -> TransferOutcome:
        def ended() -> list[TransferOutcome]:
            self.news += self.mover.events()
            ends = [event for event in self.news if isinstance(event, TransferOutcome)]
            return [outcome for outcome in ends if outcome.status is status]

        return until(ended, self.mover)[-1]


@pytest.fixture
def bulk(peer: PeerProcess, ours: UcxLane) -> Iterator[Bulk]:
    """A bulk lane with a full slab in the test's memory."""
    made = Bulk(ours, peer, filled(SLAB_BYTES))
    yield made
    made.mover.close()


def test_a_large_transfer_arrives_intact(peer: PeerProcess, bulk: Bulk) -> None:
    bulk.send("out")
    sent = TransferOutcome("out", TransferStatus.SENT, "peer", SLAB_BYTES)
    assert bulk.wait_outcome(TransferStatus.SENT) == sent
    assert peer.read_outcome(TransferStatus.RECEIVED)["digest"] == digest_of(bulk.memory.slab)


def test_transfers_cross(peer: PeerProcess, bulk: Bulk) -> None:
    theirs = filled(SLAB_BYTES, seed=9).slab
    source = bulk.memory.slab.copy()
    bulk.memory.slab, packed = empty_like(bulk.memory).slab, bulk.memory.slab
    peer.order("back")

    def pack(offset_bytes: int, target: Bytes) -> None:
        target[:] = packed[offset_bytes : offset_bytes + target.size]

    bulk.send("out", pack)
    assert bulk.wait_outcome(TransferStatus.RECEIVED).transfer_id == "back"
    bulk.wait_outcome(TransferStatus.SENT)
    assert digest_of(bulk.memory.slab) == digest_of(theirs)
    assert peer.read_outcome(TransferStatus.RECEIVED)["digest"] == digest_of(source)


def test_a_transfer_cancelled_midway_ends_on_both_sides(peer: PeerProcess, bulk: Bulk) -> None:
    reached, cancelled = threading.Event(), threading.Event()

    def pack(offset_bytes: int, target: Bytes) -> None:
        if offset_bytes >= SLAB_BYTES // 2:
            reached.set()
            assert cancelled.wait(DEADLINE_S)
        bulk.memory.pack_slab(offset_bytes, target)

    bulk.send("out", pack)
    assert reached.wait(DEADLINE_S)
    bulk.mover.cancel("out")
    cancelled.set()
    failed = TransferOutcome("out", TransferStatus.FAILED, "peer", reason="cancelled")
    assert bulk.wait_outcome(TransferStatus.FAILED) == failed
    bulk.memory.slab[:] = 0  # may be reused now
    assert "abandoned by its sender" in peer.read_outcome(TransferStatus.FAILED)["detail"]
    bulk.send("again")
    bulk.wait_outcome(TransferStatus.SENT)
    assert peer.read_outcome(TransferStatus.RECEIVED)["digest"] == digest_of(bulk.memory.slab)


def test_a_killed_peer_is_lost_and_its_transfer_fails(peer: PeerProcess, bulk: Bulk) -> None:
    reached, killed = threading.Event(), threading.Event()

    def pack(offset_bytes: int, target: Bytes) -> None:
        if offset_bytes >= SLAB_BYTES // 2:
            reached.set()
            assert killed.wait(DEADLINE_S)
        bulk.memory.pack_slab(offset_bytes, target)

    bulk.send("out", pack)
    assert reached.wait(DEADLINE_S)
    peer.process.kill()
    killed.set()
    assert bulk.wait(PeerLost).peer == PEER
    # Reported by the lane's event, or by an earlier send.
    failed = bulk.wait_outcome(TransferStatus.FAILED)
    assert "lost" in failed.reason or "no connection" in failed.reason
    assert bulk.memory.reads <= SLAB_BYTES // CHUNK_BYTES_MAX


def test_a_suspended_peer_is_lost_at_the_deadline(peer: PeerProcess, transports: str) -> None:
    ours = lane(TESTER, transports, silence_timeout_s=3.0)
    ours.connect("peer", peer.activations, NONCE)
    collector = Collector(ours)
    collector.wait_news(PeerConnected)
    peer.stop()
    sent = [ours.send("peer", note("", bytes_of(size))) for size in (10, 4 << 20)]
    assert "no heartbeat" in collector.wait_news(PeerLost).reason
    until(lambda: all(note_sent.done for note_sent in sent), ours)
    assert isinstance(sent[1].error, PeerUnknown)
    with pytest.raises(PeerUnknown):
        ours.send("peer", note(""))
    peer.process.send_signal(signal.SIGCONT)
    assert collector.look().frames == []
    ours.close()


def test_a_peer_that_closes_the_connection_is_lost(transports: str, ours: UcxLane) -> None:
    other = lane(PEER, transports)
    other.expect(TESTER, NONCE)
    ours.connect("peer", other.address, NONCE)
    collector = Collector(ours)
    collector.wait_news(PeerConnected)
    other.disconnect("tester")
    assert "ended the connection" in collector.wait_news(PeerLost).reason
    other.close()
    with pytest.raises(LaneClosed):
        other.send("tester", note(""))


def test_a_wrong_nonce_is_refused_and_a_right_nonce_is_valid_once(
    peer: PeerProcess, ours: UcxLane
) -> None:
    collector = Collector(ours)
    # It cannot refuse before there is a message to send.
    peer.stop()
    ours.connect("peer", peer.activations, secrets.token_bytes(16))
    sent = ours.send("peer", note("never"))
    peer.process.send_signal(signal.SIGCONT)
    assert collector.wait_news(PeerLost).peer == Identity("peer", "")
    until(lambda: sent.done, ours)
    assert sent.error is not None
    ours.connect("peer", peer.activations, NONCE)
    collector.wait_news(PeerConnected)
    ours.disconnect("peer")
    collector.news.clear()
    ours.connect("peer", peer.activations, NONCE)
    collector.wait_news(PeerLost)
    assert collector.frames == []


def test_a_peer_of_another_version_gets_an_error(
    peer: PeerProcess, transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = PROTOCOL_VERSION + 1
    monkeypatch.setattr("services.worker.engine.transfer.connection_table.PROTOCOL_VERSION", later)
    ours = lane(TESTER, transports)
    ours.connect("peer", peer.activations, NONCE)
    reason = Collector(ours).wait_news(PeerLost).reason
    assert reason.startswith(f"tester speaks version {later} of the protocol between workers")
    ours.close()


@pytest.mark.parametrize("greeting", [b"", b"\xff" * 100, b"\x04\0\0\0junk"])
def test_a_connection_without_a_handshake_is_closed(
    peer: PeerProcess, ours: UcxLane, greeting: bytes
) -> None:
    host, _, port = peer.activations.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger:
        stranger.sendall(greeting)
        assert stranger.recv(100) == b""
    ours.connect("peer", peer.activations, NONCE)
    ours.send("peer", note("x"))
    assert len(Collector(ours).wait_frames(1)) == 1


def test_connecting_to_a_closed_port(ours: UcxLane) -> None:
    with refusing_address() as address:
        ours.connect("peer", address, NONCE)
        assert Collector(ours).wait_news(PeerLost).peer == Identity("peer", "")


def test_all_sockets_listen_on_the_given_host(peer: PeerProcess) -> None:
    connections = psutil.Process(peer.process.pid).net_connections("inet")
    listening = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
