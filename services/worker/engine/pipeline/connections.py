"""Which members this engine is connected to, on both lanes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from services.worker.engine.transfer.lane import Identity, Lane, LaneEvent, PeerConnected, PeerLost
from services.worker.ipc import Lane as LanePlan
from services.worker.ipc import MemberPlan

RETRY_S = 0.05
"""A peer in the middle of an iteration refuses a connection until the iteration has ended."""


@dataclass(slots=True)
class _Peers:
    """The connections of one lane: the process behind each name, and the names that are awaited.

    `awaited`: with the nonce of the connection. `retry_s`: when a peer that refused may be asked
    again. `lost`: processes that were connected and lost, even if they are connected again: frames
    between the two are missing until the next configuration.
    """

    lane: Lane
    connected: dict[str, Identity] = field(default_factory=dict)
    awaited: dict[str, tuple[Identity, str]] = field(default_factory=dict)
    retry_s: dict[str, float] = field(default_factory=dict)
    lost: set[Identity] = field(default_factory=set)

    def note(self, event: LaneEvent, now_s: float) -> None:
        name = event.peer.worker_id
        match event:
            case PeerConnected(peer=peer):
                self.connected[name] = peer
                self.awaited.pop(name, None)
                self.retry_s.pop(name, None)
            case PeerLost(peer=peer):
                # A refusal does not name the process, and a lost one may have a successor.
                self.lose(peer)
                awaited, _ = self.awaited.get(name, (None, ""))
                if awaited is not None and peer.incarnation in ("", awaited.incarnation):
                    del self.awaited[name]
                    self.retry_s[name] = now_s + RETRY_S

    def has(self, peer: Identity) -> bool:
        """Whether there is a connection to this very process."""
        return self.connected.get(peer.worker_id) == peer and self.lane.has(peer.worker_id)

    def detect_lost(self) -> None:
        """Lose what has ended without an event for this end."""
        for peer in [one for one in self.connected.values() if not self.has(one)]:
            self.lose(peer)

    def lose(self, peer: Identity) -> None:
        """A connection to this process is gone, if there was one."""
        if self.connected.get(peer.worker_id) == peer:
            del self.connected[peer.worker_id]
            self.lost.add(peer)


class Connections:
    """Connects pairs of workers: the one with the smaller id dials, the other one expects it."""

    def __init__(self, activations: Lane, bulk: Lane, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._activations = _Peers(activations)
        self._bulk = _Peers(bulk)

    def open(self, own: MemberPlan, peer: MemberPlan) -> None:
        """Connect to a peer, or expect it, on each lane that has no connection to it.

        To be repeated until `has`: a peer that connects before it is expected is refused. Raises
        LaneFull if too many are expected.
        """
        identity = Identity(peer.worker_id, peer.incarnation)
        for peers, theirs, ours in (
            (self._activations, peer.activations, own.activations),
            (self._bulk, peer.bulk, own.bulk),
        ):
            if peers.has(identity):
                continue
            peers.lose(identity)  # this end may have got no event of that
            if own.worker_id < peer.worker_id:
                self._dial(peers, identity, theirs)
            else:
                self._expect(peers, identity, ours)

    def _dial(self, peers: _Peers, peer: Identity, theirs: LanePlan) -> None:
        """Connect, unless an attempt to do so is under way, the end of which is an event."""
        name = peer.worker_id
        waiting, _ = peers.awaited.get(name, (None, ""))
        if waiting != peer and self._now_s() >= peers.retry_s.get(name, 0.0):
            peers.awaited[name] = (peer, theirs.nonce)
            peers.lane.connect(name, theirs.address, theirs.nonce.encode())

    def _expect(self, peers: _Peers, peer: Identity, ours: LanePlan) -> None:
        """Let a peer in; one that never came in an earlier attempt has another nonce now."""
        if peers.awaited.get(peer.worker_id) != (peer, ours.nonce):
            peers.lane.expect(peer, ours.nonce.encode())
            peers.awaited[peer.worker_id] = (peer, ours.nonce)

    def has(self, peer: MemberPlan) -> bool:
        """Whether frames flow to and from a peer on both lanes."""
        identity = Identity(peer.worker_id, peer.incarnation)
        return all(peers.has(identity) for peers in (self._activations, self._bulk))

    def end_all(self, activations: bool, bulk: bool) -> None:
        """End all connections of these lanes; this end gets no event of that."""
        for peers, ends in ((self._activations, activations), (self._bulk, bulk)):
            for name in peers.connected if ends else ():
                peers.lane.disconnect(name)

    def enter(self, members: Iterable[MemberPlan]) -> None:
        """A configuration begins; a peer that is connected now was never lost in it."""
        processes = {Identity(one.worker_id, one.incarnation) for one in members}
        for peers in (self._activations, self._bulk):
            gone = processes.difference(peers.connected.values())
            peers.lost &= gone

    def detect_lost(self) -> None:
        """Note connections that have ended without an event for this end."""
        self._activations.detect_lost()
        self._bulk.detect_lost()

    @property
    def any_lost(self) -> bool:
        """Whether there is anything to look after."""
        return bool(self._activations.lost or self._bulk.lost)

    def lost(self, members: Iterable[MemberPlan]) -> list[str]:
        """Which of the members were lost, on either lane."""
        gone = self._activations.lost | self._bulk.lost
        return [
            one.worker_id for one in members if Identity(one.worker_id, one.incarnation) in gone
        ]

    def note_activations(self, event: LaneEvent) -> None:
        """A peer came or went on the activation lane."""
        self._activations.note(event, self._now_s())

    def note_bulk(self, event: LaneEvent) -> None:
        """A peer came or went on the bulk lane."""
        self._bulk.note(event, self._now_s())
