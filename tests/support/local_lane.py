"""Lanes between engines in one process, without UCX.

The owner of the `LocalNetwork` delivers frames, also one at a time, so that a seeded test decides
every interleaving. Frames are encoded and decoded as on the wire.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from services.common.protocol import PROTOCOL_VERSION
from services.worker.engine.transfer.doorbell import Doorbell
from services.worker.engine.transfer.errors import (
    FrameError,
    LaneClosed,
    LaneFull,
    PeerUnknown,
)
from services.worker.engine.transfer.frame import Bytes, Frame, FrameCodec
from services.worker.engine.transfer.handshake import ExpectedPeers, Facts, Hello, proof_of
from services.worker.engine.transfer.lane import (
    Identity,
    Lane,
    LaneEvent,
    PeerConnected,
    PeerLost,
    Sent,
)

QUEUED_FRAMES_MAX = 1024


@dataclass(slots=True)
class _Queue:
    """Frames in flight in one direction; not delivered while `held`."""

    frames: deque[tuple[Bytes, Sent]] = field(default_factory=deque)
    held: bool = False
    open: bool = False
    sequence: int = 0


class LocalLane(Lane):
    """One engine's end; made by `LocalNetwork.lane`."""

    def __init__(self, network: "LocalNetwork", identity: Identity, address: str) -> None:
        self.identity = identity
        self.expected = ExpectedPeers()
        self.arrived: deque[tuple[str, Frame]] = deque()
        self.news: deque[LaneEvent] = deque()
        self.bell = Doorbell()
        self.closed = False
        self._network = network
        self._address = address

    @property
    def address(self) -> str:
        return self._address

    def expect(self, peer: Identity, nonce: bytes) -> None:
        self.expected.expect(peer, nonce, 0.0, 1.0)

    def connect(self, peer: str, address: str, nonce: bytes) -> None:
        self._network.connect(self, peer, address, nonce)

    def disconnect(self, peer: str) -> None:
        self._network.leave(self.identity.worker_id, peer)

    def has(self, peer: str) -> bool:
        return self._network.has(self.identity.worker_id, peer)

    def send(self, peer: str, frame: Frame) -> Sent:
        if self.closed:
            raise LaneClosed("the lane is closed")
        return self._network.send(self, peer, frame)

    def receive(self, leave: Collection[str] = ()) -> list[tuple[str, Frame]]:
        self.bell.clear()
        taken = [arrival for arrival in self.arrived if arrival[0] not in leave]
        self.arrived = deque(arrival for arrival in self.arrived if arrival[0] in leave)
        return taken

    def give_back(self, frame: Frame) -> None:
        frame.payload[:] = 0xEE  # detects readers that still use the buffer

    def events(self) -> list[LaneEvent]:
        taken = list(self.news)
        self.news.clear()
        return taken

    def fileno(self) -> int:
        return self.bell.fileno()

    def close(self) -> None:
        if not self.closed:
            self._network.cut(self.identity.worker_id)
            self.closed = True
            self.bell.close()

    def queue_event(self, event: LaneEvent) -> None:
        """Queue an event. Called by the network."""
        self.news.append(event)
        self.bell.ring()


class LocalNetwork:
    """The network between local lanes; single-threaded."""

    def __init__(self, codec: FrameCodec) -> None:
        self._codec = codec
        self._lanes: dict[str, LocalLane] = {}
        self._queues: dict[tuple[str, str], _Queue] = {}
        self._connecting: deque[tuple[LocalLane, str, str, bytes]] = deque()
        self._separate: set[frozenset[str]] = set()
        self._pending_breaks: dict[
            tuple[str, str], tuple[LocalLane, PeerLost]
        ] = {}  # by survivor and lost worker

    def lane(self, identity: Identity) -> LocalLane:
        """A lane for a worker; cuts an older lane of the same worker."""
        self.cut(identity.worker_id)
        lane = LocalLane(self, identity, f"local:{identity.worker_id}")
        self._lanes[identity.worker_id] = lane
        return lane

    def waiting(self) -> list[tuple[str, str]]:
        """(sender, receiver) of links that could deliver a frame now."""
        return [
            link
            for link, queue in self._queues.items()
            if queue.frames and queue.open and not queue.held
        ]

    def deliver(self, sender: str, receiver: str) -> None:
        """Deliver the oldest frame of a link that `waiting` names."""
        encoded, sent = self._queues[sender, receiver].frames.popleft()
        received = encoded.copy()
        sent.finish()
        encoded[:] = 0xEE  # the sender may reuse the buffer
        self._lanes[sender].bell.ring()
        target = self._lanes[receiver]
        target.arrived.append((sender, self._codec.decode(received)))
        target.bell.ring()

    def pump(self) -> int:
        """Make pending connections and deliver all frames not held; returns their number."""
        self.connect_pending()
        moved = 0
        while links := self.waiting():
            for link in links:
                self.deliver(*link)
                moved += 1
        return moved

    def has(self, first: str, other: str) -> bool:
        """Whether the first of a pair has a connection, open or pending, to the other."""
        return (first, other) in self._queues

    def connect_pending(self) -> None:
        """Make or refuse the connections that `connect` has queued."""
        while self._connecting:
            self._shake_hands(*self._connecting.popleft())

    def hold(self, sender: str, receiver: str) -> None:
        """Hold frames of a link until `release`."""
        self._queues.setdefault((sender, receiver), _Queue()).held = True

    def release(self, sender: str, receiver: str) -> None:
        """Resume delivery of a link's frames."""
        self._queues.setdefault((sender, receiver), _Queue()).held = False

    def damage(self, sender: str, receiver: str) -> None:
        """Flip the last bit of the newest frame on a link."""
        encoded, _ = self._queues[sender, receiver].frames[-1]
        encoded[-1] ^= 1

    def cut(self, worker_id: str) -> None:
        """End every connection of a worker, as its death would; both ends get PeerLost."""
        peers = [link[1] for link in self._queues if link[0] == worker_id]
        for peer in peers:
            self.part(worker_id, peer, notify=(worker_id, peer))
        for survivor, lost in [pair for pair in self._pending_breaks if worker_id in pair]:
            self._notify_break(survivor, lost)

    def leave(self, worker_id: str, peer: str) -> None:
        """Close a worker's connection to a peer; only the peer gets PeerLost."""
        self.part(worker_id, peer, notify=(peer,))
        self._pending_breaks.pop((worker_id, peer), None)

    def part(self, first: str, other: str, notify: Collection[str]) -> None:
        """End the connection of a pair; the workers in `notify` get PeerLost, others later."""
        was_open = False
        for sender, receiver in ((first, other), (other, first)):
            queue = self._queues.pop((sender, receiver), None)
            if queue is None:
                continue
            was_open = was_open or queue.open
            for _, sent in queue.frames:
                sent.finish(PeerUnknown(f"the connection to {receiver} ended"))
        for survivor, lost in ((first, other), (other, first)):
            if was_open and not self._lanes[survivor].closed:
                event = PeerLost(self._lanes[lost].identity, "the connection ended")
                self._pending_breaks[survivor, lost] = self._lanes[survivor], event
            if survivor in notify:
                self._notify_break(survivor, lost)

    def separate(self, first: str, other: str) -> None:
        """End the connection of a pair, and refuse later attempts."""
        self._separate.add(frozenset((first, other)))
        self.part(first, other, notify=(first, other))

    def notify_break(self, first: str, other: str) -> None:
        """Deliver the pending PeerLost events of a pair."""
        self._notify_break(first, other)
        self._notify_break(other, first)

    def _notify_break(self, survivor: str, lost: str) -> None:
        lane, event = self._pending_breaks.pop((survivor, lost), (None, None))
        if lane is not None and event is not None and not lane.closed:
            lane.queue_event(event)

    def connect(self, lane: LocalLane, peer: str, address: str, nonce: bytes) -> None:
        """Queue a handshake for the next pump."""
        us = lane.identity.worker_id
        self.part(us, peer, notify=(us, peer))  # including pending events of an earlier break
        for link in ((us, peer), (peer, us)):
            self._queues.setdefault(link, _Queue())
        self._connecting.append((lane, peer, address, nonce))

    def send(self, lane: LocalLane, peer: str, frame: Frame) -> Sent:
        """Queue a frame for `deliver`."""
        queue = self._queues.get((lane.identity.worker_id, peer))
        if queue is None:
            raise PeerUnknown(f"there is no connection to {peer}")
        if len(queue.frames) >= QUEUED_FRAMES_MAX:
            raise LaneFull(f"{QUEUED_FRAMES_MAX} frames wait for {peer}")
        us = lane.identity
        sent = Sent()
        encoded = self._codec.encode(frame.stamped(us.worker_id, us.incarnation, queue.sequence))
        queue.sequence += 1
        queue.frames.append((encoded, sent))
        return sent

    def _shake_hands(self, lane: LocalLane, peer: str, address: str, nonce: bytes) -> None:
        us = lane.identity
        host = next(
            (candidate for candidate in self._lanes.values() if candidate.address == address), None
        )
        facts = Facts(us.worker_id, us.incarnation, b"", 0, PROTOCOL_VERSION)
        try:
            if host is None or host.closed or host.identity.worker_id != peer:
                raise FrameError("no lane has this address")
            if frozenset((us.worker_id, peer)) in self._separate:
                raise FrameError("nothing gets across")
            if (us.worker_id, peer) not in self._queues:
                raise FrameError("the connection broke while it was made")
            host.expected.redeem(Hello(facts, proof_of(Hello, facts, nonce)), 0.0)
        except FrameError as error:
            self.part(us.worker_id, peer, notify=())
            lane.queue_event(PeerLost(Identity(peer, ""), f"refused: {error}"))
            return
        for link in ((us.worker_id, peer), (peer, us.worker_id)):
            self._queues[link].open = True
        lane.queue_event(PeerConnected(host.identity))
        host.queue_event(PeerConnected(us))
